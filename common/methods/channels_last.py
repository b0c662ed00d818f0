"""Channels last.

What. Stores convolution weights, and with them activations, with the channels of a pixel next to each other.
The numbers stay the same in another order of memory; results differ by rounding only.
Effect on quality. None.
Effect on time. Matrix units read this layout; without it every convolution converts its input.
Relieves. Forward pass, backward pass: memory traffic.
When not. Models without 2-d convolutions.
Use. With the model: `apply_channels_last(model)`.
Source. https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html; both published
configurations.
Unlike Composer. Nothing: no settings there either.
"""

import torch
from torch import nn

from common.training.method import Method


def apply_channels_last(model: nn.Module) -> int:
    """Convert the weights of all 2-d convolutions in place; returns how many parameters that are."""
    model.to(memory_format=torch.channels_last)
    return sum(parameter.ndim == 4 for parameter in model.parameters())


class ChannelsLast(Method):
    """Converts the model; the image loaders deliver this layout already."""

    is_exact = True

    def model(self, model: nn.Module) -> nn.Module:
        if not apply_channels_last(model):
            self.refuse("no 2-d convolution in this model")
        return model
