"""Exponential moving average of the weights.

What. Keeps a second copy of the model whose parameters and buffers follow the trained ones slowly, and
evaluates it. The trained weights are never touched.
Effect on quality. The average behaves like a lower learning rate, so accuracy is higher in the middle of
training and a target is reached earlier.
Effect on time. One pass over weights and average in every `every_steps`-th step; one more copy of the model
in memory.
Relieves. Number of steps.
When not. When the learning rate has decayed to zero anyway before the first evaluation that counts.
Use. With the model: `average = copy_model(model)  # evaluate it in the place of the model`.
After each step: `update_average(average, model, ema_smoothing(half_life_steps=100, every_steps=1))`.
Source. Polyak and Juditsky 1992, https://doi.org/10.1137/0330046; MosaicML Composer 0.7, algorithms/ema.
Unlike Composer. Both intervals are required here, in steps: the published runs had 100 and 20. In Composer
0.7 the half-life is required and the average moves every step; since 0.11 the half-life is 1000 steps by
default. Half-lives in epochs and training on the average are left out, both off by default there.
"""

# CUDA graphs (`compile` with reduce-overhead) read and write the trained parameters at fixed addresses. The
# average is never swapped into the model: it is a second module with its own storage. An update writes in
# place, between two replays. A model that was compiled as a whole has an eager copy; BERT's copy is called by
# the compiled pieces of the model.

import copy
import math

import torch
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import RunConfig, Strict
from common.errors import UserError, check_share
from common.training.method import Method


def ema_smoothing(half_life_steps: float, every_steps: int) -> float:
    """Return the factor of the old average in an update, so that it halves in `half_life_steps`."""
    if half_life_steps <= 0 or every_steps <= 0:
        what = f"a half-life of {half_life_steps:g} steps, every {every_steps:g}: expected positive numbers"
        raise UserError(what, where="ema_smoothing")
    return float(2 ** (-every_steps / half_life_steps))


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy with no gradients, for evaluation.

    Its parameters require gradients where the model's do: pieces compiled for the model then fit the copy.
    """
    copies: dict[int, Tensor] = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    return copy.deepcopy(model, copies)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, smoothing: float) -> None:
    """Set average <- smoothing * average + (1 - smoothing) * model, in place, for parameters and buffers.

    Integer buffers, such as counters, are copied.
    """
    check_share(smoothing, "update_average")
    averaged, trained = ([*module.parameters(), *module.buffers()] for module in (average, model))
    if [old.shape for old in averaged] != [new.shape for new in trained]:
        what = "the average is not of this model"
        raise UserError(what, where="update_average", hint="average = copy_model(model)")
    pairs = [*zip(averaged, trained, strict=True)]
    floats = [(old, new) for old, new in pairs if old.is_floating_point()]
    torch._foreach_lerp_([old for old, _ in floats], [new for _, new in floats], 1 - smoothing)
    for old, new in pairs:
        if not old.is_floating_point():
            old.copy_(new)


class Ema(Method):
    """Evaluates the average; before its first update, the model itself."""

    class Config(Strict):
        half_life_steps: float = Field(gt=0, description="after so many steps old weights count half")
        every_steps: int = Field(ge=1, description="steps from one update of the average to the next")
        first_step: int = Field(default=0, ge=0, description="the average starts here at the earliest")

    average: nn.Module | None = None

    def configure(self, config: RunConfig) -> RunConfig:
        num_steps, every = config.plan().num_steps, self.settings.every_steps
        start = math.ceil(max(1, self.settings.first_step) / every) * every
        if start >= num_steps:
            setting = "first_step" if self.settings.first_step else "every_steps"
            self.refuse(f"the average would start after step {start} of {num_steps}", setting=setting)
        return config

    @property
    def period(self) -> int:
        return int(self.settings.every_steps)

    def phase_starts(self, num_steps: int) -> list[int]:
        return [self.settings.first_step]

    def after_step(self, model: nn.Module, num_steps: int) -> None:
        if num_steps % self.settings.every_steps or num_steps < self.settings.first_step:
            return
        if self.average is None:
            self.init_extra_state(model)
        else:
            smoothing = ema_smoothing(self.settings.half_life_steps, self.settings.every_steps)
            update_average(self.average, model, smoothing)

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        return self.average or model

    def extra_state(self) -> nn.Module | None:
        return self.average

    def init_extra_state(self, model: nn.Module) -> None:
        self.average = copy_model(model)
