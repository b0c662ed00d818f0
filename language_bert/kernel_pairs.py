"""The kernels of BERT's methods beside their plain forms, on random values, for `ttt doctor`."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from common.training.benchmark import KernelPair
from language_bert.attention import plan_attention, varlen_attention
from language_bert.methods.chunked_head import chunked_cross_entropy
from language_bert.methods.fp8 import CAPABILITY, Fp8Product

LENGTHS = (128, 7, 61, 100)  # tokens
NUM_HEADS, HEAD_SIZE = 4, 64
NUM_MASKED, VOCAB_SIZE, CHUNK_TOKENS = 50, 301, 16
NUM_ROWS = 128


def kernel_pairs(device: torch.device) -> Iterator[KernelPair]:
    """Yield those that this device computes, each with its gradients."""
    yield attention_pair(device)
    yield loss_pair(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY:
        yield fp8_pair(device)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return a result and the gradients of its inputs, all weighted differently."""
    result = function(*inputs)
    weight = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result).to(result.dtype)
    return [result, *torch.autograd.grad(result, inputs, weight if result.ndim else None)]


def attention_pair(device: torch.device) -> KernelPair:
    """Return attention over packed sequences in bfloat16, and over one after another in float32."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(LENGTHS), NUM_HEADS, HEAD_SIZE)
    heads = [torch.randn(*shape, generator=generator).bfloat16().to(device) for _ in "qkv"]
    sequences = plan_attention(torch.tensor(LENGTHS), max(LENGTHS)).to(device)

    def one_by_one(*heads: Tensor) -> Tensor:
        rows = zip(*(each.split(LENGTHS) for each in heads), strict=True)
        attended = [
            F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in row)).transpose(0, 1)
            for row in rows
        ]
        return torch.cat(attended)

    packed = [each.clone().requires_grad_() for each in heads]
    plain = [each.float().requires_grad_() for each in heads]
    return KernelPair(
        name="attention",
        kernel=lambda: with_gradients(lambda *qkv: varlen_attention(*qkv, sequences), packed),
        plain=lambda: with_gradients(one_by_one, plain),
        tolerance=0.02,  # bfloat16 keeps 8 bits
    )


def loss_pair(device: torch.device) -> KernelPair:
    """Return the loss of the head in chunks, and of the whole product, in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_MASKED, HEAD_SIZE), (VOCAB_SIZE, HEAD_SIZE), (VOCAB_SIZE,))
    inputs = [torch.randn(*shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    labels = torch.randint(VOCAB_SIZE, (NUM_MASKED,), generator=generator).to(device)

    def whole(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias), labels)

    def chunked(*inputs: Tensor) -> Tensor:
        return chunked_cross_entropy(*inputs, labels, CHUNK_TOKENS)

    return KernelPair(
        name="loss in chunks",
        kernel=lambda: with_gradients(chunked, inputs),
        plain=lambda: with_gradients(whole, inputs),
        tolerance=1e-3,  # where TF32 is allowed; 1e-6 without
    )


def fp8_pair(device: torch.device) -> KernelPair:
    """Return a product in 8 bits, and in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_ROWS, 2 * HEAD_SIZE), (HEAD_SIZE, 2 * HEAD_SIZE))
    inputs = [torch.randn(*shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    return KernelPair(
        name="8-bit product",
        kernel=lambda: with_gradients(lambda *xw: Fp8Product.apply(*xw, torch.bfloat16), inputs),
        plain=lambda: with_gradients(F.linear, inputs),
        tolerance=0.1,  # E4M3 keeps 4 bits
    )
