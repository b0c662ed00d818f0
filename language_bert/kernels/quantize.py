"""Round a tensor to 8 bits and compute everything else that FP8 products need of it, in one pass over memory.

Products on Hopper need both factors with the summed dimension contiguous, so activations, weights and
gradients are needed as they are and transposed; delayed scaling needs their largest value, and a bias the sum
of the gradient's rows. torch.compile writes a transpose value by value, and reduces in other kernels. Here a
tile is read once, GELU or its gradient is applied in registers, and shared memory transposes the tile.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GRADIENTS = torch.float8_e5m2


class Quantized(NamedTuple):
    """A matrix (M, N) in 8 bits and facts of it before it was rounded: float32, without gradients."""

    rows: Tensor  # (M, N), contiguous
    columns: Tensor  # (N, M), its transpose, contiguous
    largest: Tensor  # (), the largest magnitude
    sums: Tensor  # (N,), the sum over M; of gradients only, else (0,)


def quantize(parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, function: str = "copy") -> Quantized:
    """Divide a matrix by `scale` (), clamp it to the range of `dtype` and round it.

    `function` makes the matrix (M, N) of `parts`, each of whose rows is contiguous: "copy" joins P parts
    (M, N / P); "gelu" is GELU's tanh form of the only part; "gelu_backward" is the gradient of GELU's input,
    where the first part is the gradient of its output and the second its input. `dtype` is float8_e4m3fn, or
    GRADIENTS. On a GPU, or with TRITON_INTERPRET=1, it is one Triton kernel a part, which compilers see as
    one operator; torch's operators do the same where M is no multiple of 4.
    """
    has_kernel = parts[0].is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if has_kernel and len(parts[0]) % 4 == 0:
        rows, columns, maxima, sums = torch.ops.ttt.quantize(list(parts), scale, dtype, function)
        return Quantized(rows, columns, maxima.amax(), sums.sum(dim=0))
    x = compute(parts, function)
    limit = torch.finfo(dtype).max
    rows = (x * scale.reciprocal()).clamp(-limit, limit).to(dtype)
    sums = x.sum(dim=0) if dtype == GRADIENTS else x.new_empty(0)
    return Quantized(rows, rows.t().contiguous(), x.abs().amax(dim=-1).amax(), sums)


def compute(parts: Sequence[Tensor], function: str) -> Tensor:
    """Return `function` of the parts, in float32, by torch's operators."""
    if function == "copy":
        return torch.cat(list(parts), dim=-1).float()
    if function == "gelu":
        return F.gelu(parts[0].float(), approximate="tanh")
    gradient, x = (part.float() for part in parts)
    return torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")


@torch.library.custom_op("ttt::quantize", mutates_args=())
def quantize_operator(
    parts: list[Tensor], scale: Tensor, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from language_bert.kernels.quantize_triton import quantize_triton

    return quantize_triton(parts, scale, dtype, function)


@quantize_operator.register_fake
def allocate_quantized(
    parts: list[Tensor], scale: Tensor, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from language_bert.kernels.quantize_triton import allocate

    return allocate(parts, dtype, function)
