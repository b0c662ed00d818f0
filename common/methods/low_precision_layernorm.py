"""LayerNorm in low precision.

What. Under autocast LayerNorm takes and returns the 16-bit type of the matrix products around it, so that the
activations between them stay in 16 bits. Mean and variance are still summed in float32 inside the kernel.
Effect on quality. Rounding to 16 bits at every LayerNorm and in the residual stream. Published: none on the
final quality, occasional spikes of the loss (Composer's method card).
Effect on time. Half of the memory traffic of LayerNorm, residual additions and their gradients; as fast as a
fused kernel (Composer's method card).
Relieves. Forward pass, backward pass: memory traffic.
When not. Training in float32, where nothing changes; a loss that is unstable in 16 bits; together with a
compiler, which fuses LayerNorm with its neighbours anyway, the gain is smaller.
Use. With the model: `apply_low_precision_layernorm(model)`.
Source. MosaicML Composer, algorithms/low_precision_layernorm. Layer normalization: Ba, Kiros and Hinton 2016,
https://arxiv.org/abs/1607.06450.
Unlike Composer. Nothing: no settings there either (since 0.12; 0.7 has no such method).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.schema import RunConfig
from common.training.method import Method


class LowPrecisionLayerNorm(nn.LayerNorm):
    """A LayerNorm in the dtype of autocast; without autocast it is the plain one."""

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device)
        weight, bias = (None if x is None else x.to(dtype) for x in (self.weight, self.bias))
        with torch.autocast(device, enabled=False):
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


def apply_low_precision_layernorm(model: nn.Module) -> int:
    """Convert every LayerNorm in place, with its parameters; returns how many there are."""
    norms = [module for module in model.modules() if type(module) is nn.LayerNorm]
    for norm in norms:
        norm.__class__ = LowPrecisionLayerNorm
    return len(norms)


class LowPrecisionLayernorm(Method):
    """Converts the model."""

    def configure(self, config: RunConfig) -> RunConfig:
        if config.precision == "fp32":
            self.refuse("precision is fp32: there is no lower one")
        return config

    def model(self, model: nn.Module) -> nn.Module:
        if not apply_low_precision_layernorm(model):
            self.refuse("no LayerNorm in this model")
        return model
