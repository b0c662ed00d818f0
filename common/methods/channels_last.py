"""Channels last.

What. Stores convolution weights, and with them activations, with the channels of a pixel next to each other.
The same numbers in another order of memory; results differ by rounding only.
Effect on quality. None.
Effect on time. The layout that matrix units read; without it, convolutions convert at every layer. Not
measured here.
Relieves. Forward pass, backward pass: memory traffic.
When not. Models without 2-d convolutions.
Use. With the model: `apply_channels_last(model)`.
Source. https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html; both published
configurations.
"""

import torch
from torch import nn

from common.errors import UserError
from common.training.method import Method


def apply_channels_last(model: nn.Module) -> int:
    """Convert the weights of 2-d convolutions in place; returns how many there are."""
    model.to(memory_format=torch.channels_last)
    return sum(parameter.ndim == 4 for parameter in model.parameters())


class ChannelsLast(Method):
    """Converts the model once; the loader of images delivers this layout anyway."""

    keeps_mathematics = True

    def model(self, model: nn.Module) -> nn.Module:
        """Raise UserError when the model has no 2-d convolution."""
        if apply_channels_last(model) == 0:
            raise UserError("no 2-d convolution in this model", where=f"methods.{self.name}")
        return model
