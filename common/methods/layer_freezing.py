"""Layer freezing.

What. Late in training, stops training layers, beginning with the first: their gradients are not computed and
their weights stay. Batch norms still update their running statistics.
Effect on quality. Published: -0.5 to -1 % top-1 with ResNet-50.
Effect on time. Published: +5 % throughput. The backward pass ends at the first layer that is trained.
Relieves. Backward pass, optimizer.
When not. To reach a target: the accuracy lost costs more than the time saved; several ranks, which all-reduce
every gradient, and a compiled model (both refused).
Use. Each batch: `freeze_layers(model, frozen_share(step / num_steps))`.
Source. Brock et al. 2017, https://arxiv.org/abs/1706.04983; MosaicML Composer 0.7, algorithms/layer_freezing.
Unlike Composer. Same defaults (0.5, 1.0). Layers freeze between steps here, at the end of an epoch there;
frozen parameters stay in the optimizer without a gradient, there they leave it. Several ranks are refused;
Composer lets DDP search for unused parameters.
"""

from math import ceil

from pydantic import Field
from torch import nn

from common.config.schema import RunConfig, Strict
from common.errors import check_share
from common.training import ranks
from common.training.method import Batch, Method, Progress, split_gradual
from common.training.registry import refuse_compiled

FROZEN_HERE = "is_frozen_by_freeze_layers"  # attribute of a parameter


def frozen_share(done: float, start: float = 0.5, level: float = 1.0) -> float:
    """Return the share of frozen layers after the fraction `done` of the training.

    It is zero until `start` and then grows linearly to `level` at the end.
    """
    return level * max(0.0, done - start) / (1 - start)


def freeze_layers(model: nn.Module, share: float) -> int:
    """Freeze the first layers, a share of all; returns how many are frozen.

    Layers are the modules with parameters of their own, in the order of `model.modules()`; the last is never
    frozen. A parameter shared by two layers belongs to the first. Layers that an earlier call froze train
    again if they are not among the first; parameters that other code froze stay frozen.
    """
    check_share(share, "freeze_layers")
    layers = [layer for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None]
    num_frozen = int(share * (len(layers) - 1))
    for layer in reversed(layers):
        for parameter in layer.parameters(recurse=False):
            if getattr(parameter, FROZEN_HERE, False):
                parameter.requires_grad_(True)
            is_frozen = parameter.requires_grad and layer in layers[:num_frozen]
            setattr(parameter, FROZEN_HERE, is_frozen)
            if is_frozen:
                parameter.requires_grad_(False)
                parameter.grad = None  # at a gradient of 0 momentum and weight decay would still move it
    return num_frozen


class LayerFreezing(Method):
    """Freezes layers before a step. Refuses several ranks, which all-reduce every gradient."""

    share = 0.0

    class Config(Strict):
        start: float = Field(
            default=0.5, ge=0, lt=1, description="fraction of the training before the first layer freezes"
        )
        level: float = Field(default=1.0, gt=0, le=1, description="share of layers frozen at the end")

    def phase_starts(self, num_steps: int) -> list[int]:
        return split_gradual(ceil(self.settings.start * num_steps), num_steps)

    def configure(self, config: RunConfig) -> RunConfig:
        refuse_compiled(config, self.name)
        return config

    def model(self, model: nn.Module) -> nn.Module:
        if ranks.read_rank_info().world_size > 1:
            self.refuse(
                "trains on one rank only: ranks exchange the gradients of every layer, frozen or not",
                hint="--nproc 1",
            )
        self.trained = model
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        if progress is not None:
            done = progress.step / progress.num_steps
            share = frozen_share(done, self.settings.start, self.settings.level)
            if share != self.share:
                freeze_layers(self.trained, share)
                self.share = share
        return batch
