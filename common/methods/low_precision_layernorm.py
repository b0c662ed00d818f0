"""LayerNorm in low precision.

What. Under autocast LayerNorm takes and returns the 16-bit type of the matrix products around it, so that the
activations between them, residuals included, stay in 16 bits. Mean, variance and result are computed in
float32, with parameters in float32; only uncompiled training on a GPU rounds the parameters.
Effect on quality. Rounding to 16 bits at every LayerNorm and in the residual stream. Published: none on the
final quality, occasional spikes of the loss (Composer's method card).
Effect on time. Half of the memory traffic of LayerNorm, residual additions and their gradients, also where a
compiler fuses them. `ttt inspect compile` counts the bytes.
Relieves. Forward pass, backward pass: memory traffic.
When not. A loss that is unstable in 16 bits. In float32 nothing changes; the configuration drops it.
Use. With the model: `apply_low_precision_layernorm(model)`.
Source. MosaicML Composer, algorithms/low_precision_layernorm. Layer normalization: Ba, Kiros and Hinton 2016,
https://arxiv.org/abs/1607.06450.
Unlike Composer. There parameters are rounded in every pass, evaluation too; here only in uncompiled training
on a GPU. No settings there either (since 0.12; 0.7 has no such method).
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
        with torch.autocast(device, enabled=False):
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # compiled, it is one kernel
                return super().forward(input.float()).to(dtype)
            rounded = dtype if device == "cuda" else torch.float32  # torch's CUDA kernel takes one dtype
            weight, bias = (None if x is None else x.to(rounded) for x in (self.weight, self.bias))
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


def apply_low_precision_layernorm(model: nn.Module) -> int:
    """Convert every LayerNorm in place, with its parameters; returns how many there are."""
    norms = [module for module in model.modules() if type(module) is nn.LayerNorm]
    for norm in norms:
        norm.__class__ = LowPrecisionLayerNorm
    return len(norms)


class LowPrecisionLayernorm(Method):
    def configure(self, config: RunConfig) -> RunConfig:
        if config.precision != "fp32":
            return config
        return self.dropped_from(config)

    def model(self, model: nn.Module) -> nn.Module:
        if not apply_low_precision_layernorm(model):
            self.refuse("no LayerNorm in this model")
        return model
