"""Ghost batch norm.

What. Batch norm takes its statistics in training from groups of `samples`, not from the batch of a device.
Effect on quality. Published: between -0.3 and +0.3 % top-1 with ResNet-50.
Effect on time. Published: -5 % throughput: more and smaller kernels.
Relieves. Nothing: it buys back accuracy that large batches lose.
When not. Small batches of a device; its authors call 256 large.
Use. With the model: `apply_ghost_batch_norm(model)`.
Source. Hoffer et al. 2017, https://arxiv.org/abs/1705.08741; MosaicML Composer 0.7,
algorithms/ghost_batchnorm.
Unlike Composer. Same default (32). The running statistics move once a batch, by the momentum, towards the
mean over the groups: from 0 to 0.5 after a batch of mean 5 at momentum 0.1, as with plain batch norm. In
Composer they move once a group by momentum / groups, to 0.48 with 8 groups; in the paper once a group by the
momentum. A remainder makes groups larger here, smaller in Composer; a batch of fewer samples is one group
here, an error there.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.config.schema import Strict
from common.training.method import Batch, Method, Progress, replace_layers

TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def apply_ghost_batch_norm(model: nn.Module, samples: int = 32) -> int:
    """Replace every batch norm, in place, by one over groups of `samples`; returns the number of norms.

    Parameters and buffers stay the same objects. A remainder is spread over the groups, which are then a
    little larger; a batch of fewer samples is one group. Subclasses that compute more stay, as those of timm.
    """

    def grouped(layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, _BatchNorm) and type(layer).forward is _BatchNorm.forward:
            return GhostNorm(layer, samples)
        return None

    return replace_layers(model, grouped)


class GhostNorm(_BatchNorm):
    """Batch norm over groups of samples in training, plain batch norm in evaluation."""

    def __init__(self, norm: _BatchNorm, samples: int) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        for name in TENSORS:
            setattr(self, name, getattr(norm, name))
        self.samples, self.training = samples, norm.training

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape: this class replaces BatchNorm1d, BatchNorm2d and BatchNorm3d."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        groups = input.tensor_split(max(1, len(input) // self.samples))
        factors = running_factors([len(group) for group in groups], self.count_batch())
        return torch.cat(
            [self.normalize(group, factor) for group, factor in zip(groups, factors, strict=True)]
        )

    def normalize(self, group: Tensor, factor: float) -> Tensor:
        """Normalize a group by its statistics; the running ones move towards these by `factor`."""
        running = (self.running_mean, self.running_var)
        return F.batch_norm(group, *running, self.weight, self.bias, True, factor, self.eps)

    def count_batch(self) -> float:
        """Count a batch; returns the momentum with which the running statistics follow it."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1 / float(self.num_batches_tracked)
        return self.momentum or 0.0


def running_factors(sizes: Sequence[int], momentum: float) -> list[float]:
    """Return a momentum for each group: updates by them, in turn, equal one update by `momentum`.

    Each group then weighs `momentum` times its share of the samples, and the old value 1 - momentum.
    """
    weights = [momentum * size / sum(sizes) for size in sizes]
    return [weight / (1 - math.fsum(weights[number + 1 :])) for number, weight in enumerate(weights)]


class GhostBatchNorm(Method):
    """Replaces every batch norm. Raises UserError for a training batch of fewer than two groups."""

    class Config(Strict):
        samples: int = Field(default=32, ge=1, description="of a group, at least")

    def model(self, model: nn.Module) -> nn.Module:
        if not apply_ghost_batch_norm(model, self.settings.samples):
            self.refuse("no batch norm in this model")
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        samples, num = self.settings.samples, batch.num_samples
        if progress is not None and num < 2 * samples:
            self.refuse(
                f"groups of {samples} need {2 * samples} samples at a time, found {num}", setting="samples"
            )
        return batch
