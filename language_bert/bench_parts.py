"""The pieces of a BERT training step that `ttt bench` times alone, on packed tokens of typical lengths."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.training.benchmark import Part
from common.training.optim import build_optimizer
from language_bert.attention import plan_attention, varlen_attention
from language_bert.data.batches import typical_lengths
from language_bert.methods.chunked_head import chunked_cross_entropy

CHUNK_TOKENS = 4096


def bench_parts(config: Any, device: torch.device) -> Iterator[Part]:
    """Yield forward and backward of all layers by kind of operation, head with loss, and optimizer."""
    model, data, num = config.model, config.data, config.global_batch_size
    lengths = torch.from_numpy(typical_lengths(num, data.max_seq_length))
    num_tokens, num_layers = int(lengths.sum()), model.num_hidden_layers
    num_masked = int(num_tokens * data.masked_fraction)
    size, wide, num_heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    dtype = torch.float16 if config.precision == "fp16" else torch.bfloat16
    sequences = plan_attention(lengths, data.max_seq_length).to(device)

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
    """Return a step of the optimizer on as many parameters as the model has."""
    model = config.model
    layer = 4 * model.hidden_size**2 + 2 * model.hidden_size * model.intermediate_size
    count = model.vocab_size * model.hidden_size + model.num_hidden_layers * layer
    weights = nn.ParameterList(
        nn.Parameter(torch.zeros(size, device=device))
        for size in (count // 16,) * 16  # a few large tensors, as in the model
    )
    for parameter in weights:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(weights, config.optimizer)
    return Part(name="optimizer", call=optimizer.step, num_samples=num_samples)
