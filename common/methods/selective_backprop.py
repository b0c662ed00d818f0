"""Selective backprop.

What. In the middle of training, runs a forward pass over each batch first and trains on only a part of it,
preferring samples of large loss.
Effect on quality. Published: 76.46 % top-1 of ResNet-50 with and without it (Composer's method card).
Effect on time. Published: 6 % less for the whole training (Composer's method card). A step that keeps half of
its samples costs 0.83 of a whole one if a backward pass takes as long as two forward passes (calculated).
Relieves. Backward pass.
When not. Short trainings; noisy labels, whose loss is always large; a compiled model, and `sam` in a
selecting step, whose second pass would select other samples (both refused).
Use. Each batch: `chosen = 0.5 <= step / num_steps < 0.9 and step % 2 == 0`, `if chosen: kept =
select_samples(sample_losses(model, {"x": images}, labels)); images, labels = images[kept], labels[kept]`.
Source. Jiang et al. 2019, https://arxiv.org/abs/1910.00762; MosaicML Composer 0.7,
algorithms/selective_backprop (the probability of a sample grows with the rank of its loss).
Unlike Composer. Same defaults (keeps 0.5 between 0.5 and 0.9 of training, every second step whole). The first
forward pass is in evaluation mode, so that batch norm counts no sample twice, and ranks samples by the
cross-entropy, whatever the training loss; there it is in training mode and by the training loss. Whole steps
are counted from the start of training, there of the epoch. Smaller images for that pass, off there, are left
out.
"""

from dataclasses import replace
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import Fraction, RunConfig, Strict
from common.methods.sam import Sam
from common.training.method import Batch, Method, Progress
from common.training.registry import build_methods, refuse_compiled
from common.training.step import autocast


def select_samples(losses: Tensor, keep: float = 0.5) -> Tensor:
    """Draw a share `keep` of the samples with `losses` (batch,); returns their indices on the same device.

    The draw is without replacement, by torch's random numbers on the CPU; the weight of a sample is
    r ** (1 / keep - 1), where r in (0, 1) is the relative rank of its loss.
    """
    num_samples = len(losses)
    ranks = (torch.arange(num_samples) + 0.5) / num_samples
    drawn = torch.multinomial(ranks ** (1 / keep - 1), max(1, int(keep * num_samples)))
    return losses.argsort()[drawn.to(losses.device, non_blocking=True)]


@torch.no_grad()
def sample_losses(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """Return the cross-entropy (batch,) of a classifier in evaluation mode; each module keeps its own mode.

    `inputs` are the arguments of the model's forward, by name; `labels` are indices (batch,) or probabilities
    (batch, classes).
    """
    modes = [(module, module.training) for module in model.modules()]
    outputs = model.eval()(**inputs)
    for module, mode in modes:
        module.training = mode
    return F.cross_entropy(outputs.float(), labels.to(outputs.device), reduction="none")


class SelectiveBackprop(Method):
    """Selects samples of each training micro-batch.

    A micro-batch keeps the weight in the loss that it had with all of its samples.
    """

    class Config(Strict):
        start: Fraction = Field(default=0.5, description="the part of the training before selection begins")
        end: Fraction = Field(
            default=0.9, description="the part of the training after which all samples count again"
        )
        keep: float = Field(
            default=0.5, ge=0.01, lt=1, description="the part of the samples that is trained on"
        )
        whole_every: int = Field(
            default=2, ge=0, description="one step in so many trains on all samples; 0: none"
        )

    @property
    def period(self) -> int:
        return int(self.settings.whole_every or 1)

    def phase_starts(self, num_steps: int) -> list[int]:
        return [ceil(self.settings.start * num_steps), ceil(self.settings.end * num_steps)]

    def configure(self, config: RunConfig) -> RunConfig:
        refuse_compiled(config, self.name)
        if self.settings.start >= self.settings.end:
            self.refuse("must lie before end", setting="start")
        if self.settings.whole_every == 1:
            self.refuse("1 leaves no step to select in", setting="whole_every")
        every = self.settings.whole_every
        for method in build_methods(config):
            if isinstance(method, Sam) and (not every or method.settings.every_steps % every):
                method.refuse(
                    "its second pass would be over other samples than the first in steps that are not whole",
                    hint="make every_steps a multiple of methods.selective_backprop.whole_every",
                )
        return config

    def model(self, model: nn.Module) -> nn.Module:
        self.trained = model
        return model

    def is_selecting(self, progress: Progress) -> bool:
        settings, done = self.settings, progress.step / progress.num_steps
        is_whole = settings.whole_every and (progress.step + 1) % settings.whole_every == 0
        return bool(settings.start <= done < settings.end and not is_whole)

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        if progress is None:
            return batch
        labels = batch.targets.get("labels", torch.empty(0))
        if len(labels) != batch.num_samples or (labels.ndim > 1 and not labels.is_floating_point()):
            self.refuse("this benchmark has no label for each sample")
        if not self.is_selecting(progress):
            return batch
        device = next(self.trained.parameters()).device
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
        with autocast(device, self.config.precision):
            losses = sample_losses(self.trained, inputs, labels)
        with progress.randomness(self.name):
            chosen = select_samples(losses, self.settings.keep)
        targets = {name: value.to(device, non_blocking=True)[chosen] for name, value in batch.targets.items()}
        return replace(
            batch,
            inputs={name: value[chosen] for name, value in inputs.items()},
            targets=targets,
            num_samples=len(chosen),
        )
