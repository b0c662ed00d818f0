"""LayerNorm in low precision.

What. Under autocast LayerNorm takes and returns the 16-bit type of the matrix products around it, so that the
activations between them stay in 16 bits. Mean and variance are still summed in float32 inside the kernel.
Effect on quality. Rounding to 16 bits at every LayerNorm and in the residual stream. Published: none on the
final quality, occasional spikes of the loss (Composer's method card). Not measured at full size here.
Effect on time. Half of the memory traffic of LayerNorm, residual additions and their gradients; as fast as a
fused kernel (Composer's method card). Not measured on a GPU here.
Relieves. Forward pass, backward pass: memory traffic.
When not. Training in float32, where nothing changes; a loss that is unstable in 16 bits; together with a
compiler, which fuses LayerNorm with its neighbours anyway, the gain is smaller.
Use. With the model: `apply_low_precision_layernorm(model)`.
Source. MosaicML Composer, algorithms/low_precision_layernorm. Layer normalization: Ba, Kiros and Hinton 2016,
https://arxiv.org/abs/1607.06450.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.schema import RunConfig
from common.errors import UserError
from common.training.method import Method


class LowPrecisionLayerNorm(nn.LayerNorm):
    """A LayerNorm that computes in autocast's type; outside of autocast it is the plain one."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize, from and to the low-precision type."""
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device)
        weight, bias = (None if each is None else each.to(dtype) for each in (self.weight, self.bias))
        with torch.autocast(device, enabled=False):
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


def apply_low_precision_layernorm(model: nn.Module) -> int:
    """Convert every LayerNorm in place, parameters and names kept; returns how many there are."""
    found = [module for module in model.modules() if type(module) is nn.LayerNorm]
    for module in found:
        module.__class__ = LowPrecisionLayerNorm
    return len(found)


class LowPrecisionLayernorm(Method):
    """Converts the model once."""

    def configure(self, config: RunConfig) -> RunConfig:
        """Change nothing; raise UserError for float32."""
        if config.precision == "fp32":
            raise UserError("precision is fp32: there is no lower one", where=f"methods.{self.name}")
        return config

    def model(self, model: nn.Module) -> nn.Module:
        """Raise UserError when the model has no LayerNorm."""
        if apply_low_precision_layernorm(model) == 0:
            raise UserError("no LayerNorm in this model", where=f"methods.{self.name}")
        return model
