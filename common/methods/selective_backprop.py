"""Selective backprop.

What. In the middle of training, looks at each batch with a forward pass first and trains on a part of it
only, preferring samples of large loss.
Effect on quality. Published: a small loss of accuracy for fewer backward passes. Not measured here.
Effect on time. A step that keeps half of its samples costs 1 forward pass and half a training step, 0.83 of a
whole one if the backward pass takes twice the forward (calculated).
Relieves. Backward pass.
When not. Short trainings; noisy labels, whose loss is always large; a compiled model, whose steps have one
graph (refused); `sam` in a step that selects, whose second pass would keep other samples (refused).
Use. Each batch: `chosen = 0.5 <= step / num_steps < 0.9 and step % 2 == 0`, `if chosen: kept =
select_samples(sample_losses(model, {"x": images}, labels)); images, labels = images[kept], labels[kept]`.
Source. Jiang et al. 2019, https://arxiv.org/abs/1910.00762; MosaicML Composer 0.7,
algorithms/selective_backprop (keeps 0.5 between 0.5 and 0.9 of training, every second step whole; chances
grow with the rank of the loss). Here the look is in evaluation mode, so that batch norm counts no sample
twice, and ranks by the cross-entropy whatever the loss of the training.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import Fraction, RunConfig, Strict
from common.errors import UserError
from common.methods.sam import Sam
from common.training.method import Batch, Method, Progress
from common.training.registry import build_methods, refuse_compiled

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def select_samples(losses: Tensor, keep: float = 0.5) -> Tensor:
    """Return the indices (num_kept,) of a part of the samples with `losses` (batch,), on the same device.

    A sample of relative rank r in (0, 1), by its loss, has a weight of r ** (1 / keep - 1) in a draw without
    replacement from torch's random numbers on the CPU.
    """
    num_samples = len(losses)
    ranks = (torch.arange(num_samples) + 0.5) / num_samples
    drawn = torch.multinomial(ranks ** (1 / keep - 1), max(1, int(keep * num_samples)))
    return losses.argsort()[drawn.to(losses.device, non_blocking=True)]


@torch.no_grad()
def sample_losses(model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """Return the cross-entropy (batch,) of a classifier in evaluation mode; each module keeps its own mode.

    `labels` are indices (batch,) or probabilities (batch, classes).
    """
    modes = [(module, module.training) for module in model.modules()]
    outputs = model.eval()(**inputs)
    for module, mode in modes:
        module.training = mode
    return F.cross_entropy(outputs.float(), labels.to(outputs.device), reduction="none")


class SelectiveBackprop(Method):
    """Thins out training batches, each micro-batch within itself.

    It keeps its share of the loss, by the number of samples that it had: the loss is the mean over the kept.
    """

    class Config(Strict):
        """Fractions of the training and of a batch; every `whole_every`-th step has all samples, 0: none."""

        start: Fraction = Field(default=0.5, description="the part of the training before it begins")
        end: Fraction = Field(
            default=0.9, description="the part of the training after which all samples count again"
        )
        keep: float = Field(default=0.5, gt=0, lt=1, description="the part of the samples that is trained on")
        whole_every: int = Field(
            default=2, ge=0, description="every so many steps one has all samples; 0: none"
        )

    @property
    def period(self) -> int:
        """How often a step has all samples."""
        return int(self.settings.whole_every or 1)

    def configure(self, config: RunConfig) -> RunConfig:
        """Change nothing; refuse a compiled model, an empty range, and SAM in a step that selects."""
        refuse_compiled(config, self.name)
        if self.settings.start >= self.settings.end:
            raise UserError("must lie before end", where=f"methods.{self.name}.start")
        if self.settings.whole_every == 1:
            raise UserError("1 leaves no step to select in", where=f"methods.{self.name}.whole_every")
        every = self.settings.whole_every
        for method in build_methods(config):
            if isinstance(method, Sam) and (not every or method.settings.every_steps % every):
                raise UserError(
                    "its second pass would be over other samples than the first in steps that are not whole",
                    where="methods.sam",
                    hint="make every_steps a multiple of methods.selective_backprop.whole_every",
                )
        return config

    def model(self, model: nn.Module) -> nn.Module:
        """Remember it."""
        self.trained = model
        return model

    def is_selecting(self, progress: Progress) -> bool:
        """Whether this step trains on a part of its batch."""
        settings, done = self.settings, progress.step / progress.num_steps
        is_whole = settings.whole_every and (progress.step + 1) % settings.whole_every == 0
        return bool(settings.start <= done < settings.end and not is_whole)

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        """Keep a part of a training batch. Raises UserError where a sample has no class."""
        if progress is None or not self.is_selecting(progress):
            return batch
        if "labels" not in batch.targets or len(batch.targets["labels"]) != batch.num_samples:
            raise UserError("this benchmark has no label for each sample", where=f"methods.{self.name}")
        device = next(self.trained.parameters()).device
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
        dtype = DTYPES[self.config.precision]
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            losses = sample_losses(self.trained, inputs, batch.targets["labels"])
        with progress.randomness(self.name):
            kept = select_samples(losses, self.settings.keep)
        targets = {name: value.to(device, non_blocking=True)[kept] for name, value in batch.targets.items()}
        return replace(
            batch,
            inputs={name: value[kept] for name, value in inputs.items()},
            targets=targets,
            num_samples=len(kept),
        )
