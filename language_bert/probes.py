"""Answers of BERT to the measuring tools: batches, parts and kernels to time, and the work of a sequence."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.training import probes
from common.training.method import Batch
from common.training.optim import build_optimizer
from common.training.probes import KernelPair, Part, Spread, Work
from common.training.step import DTYPES as TRAINING_DTYPES
from language_bert.attention import choose_kernel, has_kernel, head_size, plan_attention, varlen_attention
from language_bert.benchmark import Benchmark
from language_bert.data.batches import IGNORED, typical_lengths
from language_bert.methods.chunked_head import chunked_cross_entropy
from language_bert.methods.fp8 import CAPABILITY, DTYPES, Fp8FeedForward, Fp8Product, State
from language_bert.methods.unpad import Unpad

CHUNK_TOKENS = 4096
LENGTHS = (128, 7, 61, 100)  # tokens
NUM_HEADS, HEAD_SIZE = 4, 64
NUM_MASKED, VOCAB_SIZE, PAIR_CHUNK_TOKENS = 50, 5001, 16
NUM_ROWS = 128
LOSS_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # TF32 may be allowed; 8 bits of logits near 8


class Probes(probes.Probes):
    """All batches have one shape, the longest sequence: "512 tokens"."""

    benchmark: Benchmark

    def equal_settings(self) -> list[list[str]]:
        return [
            [f"model.attention={name}"] for name in ("sdpa", "eager") if name != self.config.model.attention
        ]

    def bench_batches(self, num_samples: int) -> dict[str, Batch]:
        """Return a batch of random tokens with lengths like Wikipedia's, in the order of a loader."""
        longest = self.config.data.max_seq_length
        lengths = typical_lengths(num_samples, longest)
        lengths = self.benchmark.rank_part(lengths, lengths)
        return {f"{longest} tokens": self.benchmark.noise(lengths, self.benchmark.num_masked(lengths))}

    def bench_parts(self) -> Iterator[Part]:
        return bench_parts(self.config, self.benchmark.device, self.kernel)

    @property
    def kernel(self) -> str:
        """The attention kernel of this run; for padded batches, the kernel that `auto` chooses."""
        unpad = self.benchmark.methods.get("unpad")
        return (
            unpad.choose_kernel(self.benchmark.device)
            if isinstance(unpad, Unpad)
            else choose_kernel("auto", head_size=head_size(self.config.model))
        )

    def kernel_pairs(self) -> Iterator[KernelPair]:
        device = self.benchmark.device
        yield attention_pair(device, self.kernel)
        yield loss_pair(device, torch.float32)
        yield loss_pair(device, torch.bfloat16)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY:
            yield from fp8_pairs(device)

    def work(self, shape: str) -> Work:
        """Count the FLOPs of matrix products on the real tokens of a sample; backward has twice forward's."""
        model, data = self.config.model, self.config.data
        lengths = typical_lengths(1000, data.max_seq_length)
        size, wide = model.hidden_size, model.intermediate_size
        layer = lengths * (8 * size**2 + 4 * size * wide) + 4 * lengths**2 * size
        head = lengths * data.masked_fraction * 2 * size * (size + model.vocab_size)
        return Work(
            flops=3 * float((model.num_hidden_layers * layer + head).mean()), num_tokens=float(lengths.mean())
        )

    def shape_shares(self) -> dict[str, float]:
        return {f"{self.config.data.max_seq_length} tokens": 1.0}

    def work_spread(self) -> Spread:
        """Without padding the work of a sample is about proportional to its length."""
        if "unpad" not in self.config.methods:
            return super().work_spread()
        lengths = typical_lengths(1000, self.config.data.max_seq_length)
        return Spread(
            deviation=float(lengths.std() / lengths.mean()),
            longest=float(lengths.max() / lengths.mean()),
            is_balanced=self.benchmark.balances_parts,
        )


def bench_parts(config: Any, device: torch.device, kernel: str) -> Iterator[Part]:
    """Yield the operations of all layers, head and loss, each forward and backward, and the optimizer."""
    model, data, num = config.model, config.data, config.global_batch_size
    lengths = torch.from_numpy(typical_lengths(num, data.max_seq_length))
    num_tokens, num_layers = int(lengths.sum()), model.num_hidden_layers
    num_masked = int(num_tokens * data.masked_fraction)
    size, wide, num_heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    is_wide_on_gpu = config.precision == "fp32" and has_kernel(device)  # attention takes 16 bits there
    dtype = TRAINING_DTYPES["bf16" if is_wide_on_gpu else config.precision]
    sequences = plan_attention(lengths, data.max_seq_length, kernel).to(device)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    def part(name: str, function: Callable[..., Tensor], inputs: list[Tensor], repeats: int) -> Part:
        def call() -> None:
            for _ in range(repeats):
                output = function(*inputs)
                torch.autograd.grad(output, inputs, torch.ones_like(output))

        return Part(name=name, call=call, num_samples=num)

    tokens, wide_tokens = noise(num_tokens, size), noise(num_tokens, wide)
    heads = [noise(num_tokens, num_heads, size // num_heads) for _ in "qkv"]
    yield part("attention", lambda *qkv: varlen_attention(*qkv, sequences), heads, num_layers)
    shapes = {
        "projection": (3 * size, size),
        "output": (size, size),
        "up": (wide, size),
        "down": (size, wide),
    }
    for name, shape in shapes.items():
        source = wide_tokens if shape[1] == wide else tokens
        yield part(f"matrix product: {name}", F.linear, [source, noise(*shape)], num_layers)
    scale, shift = noise(size), noise(size)
    yield part(
        "addition and LayerNorm",
        lambda x, y, a, b: F.layer_norm(x + y, (size,), a, b),
        [tokens, noise(num_tokens, size), scale, shift],
        2 * num_layers,
    )
    yield part(
        "bias and GELU",
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        [wide_tokens, noise(wide)],
        num_layers,
    )
    labels = torch.randint(model.vocab_size, (num_masked,), device=device)
    bias = torch.zeros(model.vocab_size, device=device, requires_grad=True)
    weight = torch.randn(model.vocab_size, size, device=device, requires_grad=True)

    def head(*inputs: Tensor) -> Tensor:
        return chunked_cross_entropy(*inputs, labels, CHUNK_TOKENS)

    yield part("head and loss", head, [noise(num_masked, size), weight, bias], 1)
    yield optimizer_part(config, num, device)


def optimizer_part(config: Any, num_samples: int, device: torch.device) -> Part:
    """Build the part of an optimizer's step on about as many parameters as the model has."""
    size = config.num_weights // 16  # a few large tensors, as in the model
    weights = nn.ParameterList(nn.Parameter(torch.zeros(size, device=device)) for _ in range(16))
    for parameter in weights:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(weights, config.optimizer)
    return Part(name="optimizer", call=optimizer.step, num_samples=num_samples)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    result = function(*inputs)
    weight = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result).to(result.dtype)
    return [result, *torch.autograd.grad(result, inputs, weight if result.ndim else None)]


def attention_pair(device: torch.device, kernel: str) -> KernelPair:
    """Pair attention over packed sequences in bfloat16 with attention sequence by sequence in float32."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(LENGTHS), NUM_HEADS, HEAD_SIZE)
    heads = [torch.randn(*shape, generator=generator).bfloat16().to(device) for _ in "qkv"]
    sequences = plan_attention(torch.tensor(LENGTHS), max(LENGTHS), kernel).to(device)

    def one_by_one(*heads: Tensor) -> Tensor:
        rows = zip(*(head.split(LENGTHS) for head in heads), strict=True)
        attended = [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in row)).transpose(0, 1) for row in rows
        ]
        return torch.cat(attended)

    packed = [head.clone().requires_grad_() for head in heads]
    plain = [head.float().requires_grad_() for head in heads]
    return KernelPair(
        name="attention",
        kernel=lambda: with_gradients(lambda *qkv: varlen_attention(*qkv, sequences), packed),
        plain=lambda: with_gradients(one_by_one, plain),
        tolerance=0.02,  # bfloat16 keeps 8 bits
    )


def loss_pair(device: torch.device, dtype: torch.dtype) -> KernelPair:
    """Pair the chunked loss of hidden states in `dtype` with the plain loss in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_MASKED, HEAD_SIZE), (VOCAB_SIZE, HEAD_SIZE), (VOCAB_SIZE,))
    hidden, *rest = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes)
    inputs = [hidden.requires_grad_(), *(value.float().requires_grad_() for value in rest)]
    labels = torch.randint(VOCAB_SIZE, (NUM_MASKED,), generator=generator)
    labels[::5] = IGNORED
    labels = labels.to(device)

    def whole(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden.float(), weight, bias), labels, ignore_index=IGNORED)

    def chunked(*inputs: Tensor) -> Tensor:
        return chunked_cross_entropy(*inputs, labels, PAIR_CHUNK_TOKENS)

    return KernelPair(
        name=f"loss in chunks, {str(dtype).removeprefix('torch.')}",
        kernel=lambda: with_gradients(chunked, inputs),
        plain=lambda: with_gradients(whole, inputs),
        tolerance=LOSS_TOLERANCES[dtype],
    )


def fp8_pairs(device: torch.device) -> Iterator[KernelPair]:
    """Pair a product and a feed-forward network in 8 bits with those in float32."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    def build_state(*largest: float) -> list[Tensor]:
        zero = torch.zeros((), device=device)
        kinds = zip(DTYPES.items(), largest, strict=True)
        scales = {f"{name}_scale": zero + most / torch.finfo(dtype).max for (name, dtype), most in kinds}
        return [scales.get(name, zero.clone()) for name in State._fields]

    size, wide = HEAD_SIZE, 2 * HEAD_SIZE
    inputs, state = [draw(NUM_ROWS, wide), draw(size, wide)], build_state(8, 8, 8)
    yield KernelPair(
        name="8-bit product",
        kernel=lambda: with_gradients(
            lambda *xw: Fp8Product.apply(*xw, None, torch.bfloat16, 1, *state)[0], inputs
        ),
        plain=lambda: with_gradients(F.linear, inputs),
        tolerance=0.1,  # E4M3 keeps 4 bits
    )
    shapes = (NUM_ROWS, size), (wide, size), (wide,), (size, wide), (size,)
    network, states = [draw(*shape) for shape in shapes], [*build_state(8, 8, 64), *build_state(64, 8, 2)]

    def compute_plainly(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh"), down, down_bias)

    yield KernelPair(
        name="8-bit feed-forward",
        kernel=lambda: with_gradients(
            lambda *xw: Fp8FeedForward.apply(*xw, torch.bfloat16, *states), network
        ),
        plain=lambda: with_gradients(compute_plainly, network),
        tolerance=0.2,  # two products after each other
    )
