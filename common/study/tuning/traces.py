"""The first steps of a training, and their distance from those of another."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The first steps from one start: losses, and the first one's gradients and changes of parameters.

    `buffers`: the changes of the buffers that it changed, such as the statistics of a batch norm.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    updates: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype


def distance(one: Trace, other: Trace) -> float:
    """Return the largest relative difference of losses, gradients and the first step; NaN for any NaN."""
    losses = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(one.losses, other.losses, strict=True)]
    tensors = [(getattr(one, name), getattr(other, name)) for name in ("gradients", "updates", "buffers")]
    return float(np.max([*losses, *(distance_of_tensors(*both) for both in tensors)]))


def distance_of_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all tensors over the norm of `other`.

    Tensors that one side names or joins differently (three projections in one) are compared as one sorted
    list of their values: whatever the layout, equal values are equal lists.
    """
    shared = [name for name in other if name in one and one[name].shape == other[name].shape]
    pairs = [(one[name], other[name]) for name in shared]
    rests = [[side[name].flatten() for name in side if name not in shared] for side in (one, other)]
    if any(rests):
        sizes = [sum(tensor.numel() for tensor in rest) for rest in rests]
        if sizes[0] != sizes[1]:
            return math.inf
        pairs.append((torch.cat(rests[0]).double().sort()[0], torch.cat(rests[1]).double().sort()[0]))
    above = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    below = sum(float(b.double().square().sum()) for _, b in pairs)
    return math.sqrt(above / below) if below else math.sqrt(above)


def take_trace(model: nn.Module, step: Callable[[int], float], num_steps: int, dtype: torch.dtype) -> Trace:
    """Return the losses of all steps, and gradients and changes of parameters and buffers of the first."""
    start = {name: value.detach().clone() for name, value in tensors_of(model).items()}
    losses = [step(0)]
    gradients = {
        name: torch.zeros_like(value) if value.grad is None else value.grad.detach().clone()
        for name, value in model.named_parameters()
    }
    updates = {name: value.detach() - start[name] for name, value in tensors_of(model).items()}
    buffers = {name: updates.pop(name) for name in updates.keys() - gradients.keys()}
    buffers = {name: change for name, change in buffers.items() if change.any()}
    losses += [step(number) for number in range(1, num_steps)]
    return Trace(losses=losses, gradients=gradients, updates=updates, buffers=buffers, dtype=dtype)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: value for name, value in named if value.is_floating_point()}
