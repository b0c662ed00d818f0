"""Multiply in 8 bits.

What. Computes the matrix products of the encoder's linear layers, forward and backward, in FP8: inputs and
weights become E4M3, gradients E5M2, each tensor scaled by its current largest value; sums stay in 32 bits.
Embeddings, normalisation, attention, the last layer and the heads do not change, and neither does evaluation.
Effect on quality. Rounding to 3 or 2 bits of mantissa. NVIDIA's submissions with FP8 took as many samples to
0.72 (2.4 to 2.55 M) as those in fp16 (2.4 to 2.7 M), with scales of earlier steps.
Effect on time. Twice the rate of 16-bit products on Hopper, less the time to find the largest values and to
round: 1.15 to 1.3 times in all is an estimate for BERT-large.
Relieves. Forward pass, backward pass: compute; and the memory of activations saved for the backward pass.
When not. GPUs before compute capability 8.9; small models. Needs `unpad` before it, with tokens rounded up to
a multiple of 16, and after `fused_qkv` and `gated_linear_units` where they are used.
Use. With the model: `model = unpad(model, round_to=16)`, `use_fp8(model)`.
Source. https://arxiv.org/abs/2209.05433 (the formats); MLPerf Training v2.1 and v3.0, NVIDIA.
Unlike Composer. Composer 0.7 has no such method.
"""

# E4M3 has 3 bits of mantissa and values up to 448, E5M2 2 bits and values up to 57,344: gradients need the
# range, activations and weights the precision. A scale per tensor (largest value / largest FP8 value) makes
# use of the whole range. It is computed when the tensor is quantized, on the device, so that there is no
# state to checkpoint or to warm up; NVIDIA's Transformer Engine can take it from earlier steps instead, which
# saves one pass over the tensor. The kernels want the second factor column-major and all dimensions multiples
# of 16. The backward pass has two products: dX = dY W and dW = dY^T X. It reuses the quantized X and W, so
# they are saved in 8 bits. Left out: scales per row or block, FP8 attention, FP8 all-reduce, weights kept in
# FP8 between steps.

from typing import Any

import torch
from torch import Tensor, nn

from common.config.schema import RunConfig
from common.errors import UserError
from common.training.method import Method
from language_bert.methods.unpad import require_packed
from language_bert.model import PackedBert, autocast_dtype

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 2.0**-100  # of a largest value, so that the scale of a tensor of zeros is not 0
MULTIPLE = 16  # of all dimensions, for the kernels
CAPABILITY = (8, 9)
LAYERS_FROM = ("fused_qkv", "gated_linear_units")


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale in 8 bits and the scale, a scalar float32."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=LEAST) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def product(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a (M, K) times b (K, N), both in 8 bits, rescaled, in `dtype`; b is column-major.

    torch.compile and CPUs support this private function earlier than the public `F.scaled_mm`.
    """
    return torch._scaled_mm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)


def to_column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


class Fp8Product(torch.autograd.Function):
    """x (T, K) times the transpose of weight (N, K) in `dtype`, and both gradients, all in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        (x8, x_scale), (weight8, weight_scale) = quantize(x, VALUES), quantize(weight, VALUES)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        return product(x8, weight8.t(), (x_scale, weight_scale), dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        g8, scale = quantize(gradient, GRADIENTS)
        for_x = product(g8, to_column_major(weight8), (scale, weight_scale), gradient.dtype)
        for_weight = product(g8.t().contiguous(), to_column_major(x8), (scale, x_scale), gradient.dtype)
        return for_x, for_weight, None


class Fp8Linear(nn.Linear):
    """A linear layer, with the parameters of a given one, that multiplies in FP8 in training mode."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x (T, K) weight^T + bias, (T, N), in the dtype of autocast."""
        if not self.training:
            return super().forward(x)
        dtype = autocast_dtype(x)
        y: Tensor = Fp8Product.apply(x, self.weight, dtype)
        return y if self.bias is None else y + self.bias.to(dtype)


def use_fp8(model: PackedBert) -> int:
    """Replace the linear layers of every encoder layer except the last, in place; returns how many.

    Raises UserError for sizes that are no multiples of 16.
    """
    layers = nn.ModuleList(list(model.bert.encoder.layer)[:-1])
    linears = [
        (owner, name, child)
        for owner in layers.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.Linear)
    ]
    for owner, name, linear in linears:
        if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
            sizes = f"{linear.in_features} x {linear.out_features}"
            raise UserError(f"8-bit products need sizes that are multiples of {MULTIPLE}, not {sizes}")
        setattr(owner, name, Fp8Linear(linear))
    return len(linears)


class Fp8(Method):
    """Replaces linear layers. Refuses a model, an order of methods or a GPU on which FP8 cannot work."""

    def configure(self, config: RunConfig) -> RunConfig:
        order = list(config.methods)
        for other in LAYERS_FROM:
            if other in order[order.index(self.name) :]:
                self.refuse(f"needs {other} before it, which makes layers anew")
        if config.methods.get("unpad", {}).get("round_to", MULTIPLE) % MULTIPLE:
            raise UserError(f"not a multiple of {MULTIPLE}", where="methods.unpad.round_to")
        if config.precision == "fp32":
            raise UserError("8-bit products give 16 bits", where="precision", hint="bf16")
        if config.model.num_hidden_layers == 1:  # type: ignore[attr-defined]
            self.refuse("the only layer is the last, which stays as it is")
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY:
            self.refuse("this GPU has no 8-bit products", hint="leave it out")
        return config

    def model(self, model: nn.Module) -> nn.Module:
        use_fp8(require_packed(model, self))
        return model
