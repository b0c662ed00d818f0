"""Multiply in 8 bits.

What. Computes the matrix products of the encoder's linear layers, forward and backward, in FP8: inputs and
weights become E4M3, gradients E5M2, each tensor scaled by its largest value in the last 16 steps; sums stay
in 32 bits. Embeddings, normalisation, attention, the last layer and the heads do not change, and neither does
evaluation.
Effect on quality. Rounding to 3 or 2 bits of mantissa. NVIDIA's submissions with FP8 and delayed scaling took
as many samples to 0.72 (2.4 to 2.55 M) as those in fp16 (2.4 to 2.7 M).
Effect on time. Twice the rate of 16-bit products on Hopper, less the time to round and to transpose. On an
H200 steps took three quarters of the time of those in 16 bits, but a fault in the transposes made every
product of the backward pass wrong. It is mended and was not timed again (common/measure/README.md).
Relieves. Forward pass, backward pass: compute; and the memory of activations saved for the backward pass.
When not. GPUs before compute capability 8.9; small models; fp16, whose overflows it would hide. With one
layer the configuration drops it. Needs `unpad` before it, with tokens rounded up to a multiple of 16, and
`fused_qkv` and `gated_linear_units`, where they are used.
Use. With the model: `model = use_fp8(unpad(model, round_to=16))`. After each step: `update_scales(model)`.
Source. https://arxiv.org/abs/2209.05433 (the formats); MLPerf Training v2.1 and v3.0, NVIDIA;
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html
(delayed scaling).
Unlike Composer. Composer 0.7 has no such method.
"""

# E4M3 has 3 bits of mantissa and values up to 448, E5M2 2 bits and values up to 57,344: gradients need the
# range, activations and weights the precision. A tensor is divided by a scale before it is rounded, so that
# its largest value becomes the largest of its format; the matmul kernel multiplies by the scales of both
# factors. Current scaling takes the largest value of the tensor itself, so it has to read the whole tensor
# before it can round the first value: two passes over memory where 16 bits need none, which costs most of
# what the faster product gains. Delayed scaling takes the largest value of the steps before: one pass
# rounds the tensor and notes its largest value for later steps (kernels/quantize.py). The price is state (a
# scale, a running largest value and a history for each input, weight and gradient), saved with the model's
# buffers; and a tensor that grows beyond the history loses its largest values, which are clamped, for one
# step. The scales of the first step come from its own batch, computed twice more. Largest values are those
# of all micro-batches and ranks, so that a global batch rounds alike however it is divided. The backward
# pass has two products: dX = dY W and dW = dY^T X. The kernels want the summed dimension contiguous in both
# factors, and all dimensions multiples of 16: the pass writes the transpose, too, and that of X and W is
# saved for the backward pass. Left out: scales per row or block, FP8 attention, FP8 all-reduce, weights
# kept in FP8 between steps.

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from common.config.schema import RunConfig
from common.errors import UserError
from common.training import distributed
from common.training.method import Method, Progress, autocast_dtype
from language_bert.kernels.quantize import GRADIENTS, Quantized, quantize
from language_bert.methods.unpad import check_packed, resolve_rounding
from language_bert.model import PackedBert, feed_forward

VALUES = torch.float8_e4m3fn
DTYPES = {"input": VALUES, "weight": VALUES, "gradient": GRADIENTS}
START = {"input": 16.0, "weight": 1.0, "gradient": 2.0**-10}  # largest values assumed before the first pass
LEAST = 2.0**-100  # of a largest value; below, the tensor counts as zeros and its scale stays
HISTORY_STEPS = 16  # the default of Transformer Engine is 1024; gradients shrink faster at BERT's start
FIRST_PASSES = 2  # the second corrects what rounding with the starting scales did to the first
MULTIPLE = 16  # of all dimensions, for the kernels
CAPABILITY = (8, 9)
GELU = "gelu_pytorch_tanh"  # the form that the kernel computes
LAYERS_FROM = ("fused_qkv", "gated_linear_units")  # methods that replace linear layers
Packed = TypeVar("Packed", bound=PackedBert)


class State(NamedTuple):
    """Scales, and the largest scales that tensors since `update_scales` needed: scalars in float32."""

    input_scale: Tensor
    weight_scale: Tensor
    gradient_scale: Tensor
    gradient_current: Tensor
    input_current: Tensor | None = None  # only the forward pass changes these two
    weight_current: Tensor | None = None

    @property
    def backward(self) -> tuple[Tensor | None, ...]:
        return self[:4]


NUM_STATES = len(State._fields)


def to_8_bits(name: str, state: State, *parts: Tensor, function: str = "copy") -> Quantized:
    """Round `function` of the parts to the dtype of `name`, one of DTYPES, with its scale.

    The current scale of `name` is raised in place so that it would clamp no value of these.
    """
    scale, current = getattr(state, f"{name}_scale"), getattr(state, f"{name}_current")
    dtype = DTYPES[name]
    quantized = quantize(parts, scale, dtype, function)
    current.copy_(torch.maximum(current, quantized.largest / torch.finfo(dtype).max))
    return quantized


def multiply_scaled(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Return a (M, K) times the transpose of b (N, K), both in 8 bits, rescaled, plus bias (N,), in `dtype`.

    `fast` sums in Hopper's matrix units alone, with 14 bits: enough forward, not for gradients. torch.compile
    and CPUs support this private function earlier than `F.scaled_mm`.
    """
    scaled = {"scale_a": scales[0], "scale_b": scales[1]}
    bias = None if bias is None else bias.to(dtype)
    return torch._scaled_mm(a, b.t(), **scaled, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def multiply(
    x: Quantized, weight: Quantized, bias: Tensor | None, state: State, dtype: torch.dtype
) -> Tensor:
    """Return x (T, K) times the transpose of weight (N, K) plus bias (N,)."""
    scales = state.input_scale, state.weight_scale
    return multiply_scaled(x.rows, weight.rows, scales, dtype, fast=True, bias=bias)


def multiply_gradient(
    gradient: Quantized, x: Tensor, weight: Tensor, state: State, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (T, K) and weight (N, K), given their transposes and that of the product."""
    for_x = multiply_scaled(gradient.rows, weight, (state.gradient_scale, state.weight_scale), dtype)
    for_weight = multiply_scaled(gradient.columns, x, (state.gradient_scale, state.input_scale), dtype)
    return for_x, for_weight


class Fp8Product(torch.autograd.Function):
    """x (T, K) times the transpose of weight (N, K), plus bias (N,), in `dtype`, as equal parts of each row.

    Products are in 8 bits. `state` are the fields of State; the current scales are changed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        num_parts: int,
        *scales: Tensor,
    ) -> tuple[Tensor, ...]:
        state = State(*scales)
        x8, weight8 = to_8_bits("input", state, x), to_8_bits("weight", state, weight)
        ctx.save_for_backward(x8.columns, weight8.columns, *state.backward)
        return multiply(x8, weight8, bias, state, dtype).chunk(num_parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, *scales = ctx.saved_tensors
        state = State(*scales)
        gradient = to_8_bits("gradient", state, *gradients)
        for_bias = gradient.sums if ctx.needs_input_grad[2] else None
        return (
            *multiply_gradient(gradient, x, weight, state, gradients[0].dtype),
            for_bias,
            *[None] * (2 + NUM_STATES),
        )


class Fp8FeedForward(torch.autograd.Function):
    """Two linear layers on x (T, D), weights up (W, D) and down (D, W), with GELU's tanh form between them.

    The kernels that round the results of GELU and of its gradient to 8 bits also compute them; 16-bit copies
    are not written.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        dtype: torch.dtype,
        *scales: Tensor,
    ) -> Tensor:
        first, second = State(*scales[:NUM_STATES]), State(*scales[NUM_STATES:])
        x8, up8 = to_8_bits("input", first, x), to_8_bits("weight", first, up)
        wide = multiply(x8, up8, up_bias, first, dtype)
        wide8 = to_8_bits("input", second, wide, function="gelu")
        down8 = to_8_bits("weight", second, down)
        factors = x8.columns, up8.columns, wide, wide8.columns, down8.columns
        ctx.save_for_backward(*factors, *first.backward, *second.backward)
        return multiply(wide8, down8, down_bias, second, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, up, wide, activated, down, *scales = ctx.saved_tensors
        first, second, dtype = State(*scales[:4]), State(*scales[4:]), gradient.dtype
        gradient8 = to_8_bits("gradient", second, gradient)
        for_activated, for_down = multiply_gradient(gradient8, activated, down, second, dtype)
        wide8 = to_8_bits("gradient", first, for_activated, wide, function="gelu_backward")
        for_x, for_up = multiply_gradient(wide8, x, up, first, dtype)
        return for_x, for_up, wide8.sums, for_down, gradient8.sums, *[None] * (1 + 2 * NUM_STATES)


class Fp8Linear(nn.Linear):
    """A linear layer, with the parameters of a given one, that multiplies in FP8 in training mode.

    Its buffers are, for each of DTYPES, the scale, and the largest scale needed since `update_scales`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        for name, dtype in DTYPES.items():
            zero = torch.zeros((), device=linear.weight.device)
            self.register_buffer(f"{name}_scale", zero + START[name] / torch.finfo(dtype).max)
            self.register_buffer(f"{name}_current", zero)

    def buffers_of(self, kind: str) -> list[Tensor]:
        """Return the `scale` or the `current` of input, weight and gradient."""
        return [self.get_buffer(f"{name}_{kind}") for name in DTYPES]

    @property
    def state(self) -> list[Tensor]:
        return [self.get_buffer(name) for name in State._fields]

    def forward(self, x: Tensor) -> Tensor:
        """Return x (T, K) weight^T + bias, (T, N), in the dtype of autocast."""
        return self.split(x, 1)[0]

    def split(self, x: Tensor, num_parts: int) -> tuple[Tensor, ...]:
        """Return equal parts of each row of the product; backward joins their gradients as it rounds them."""
        if not self.training:
            return super().forward(x).chunk(num_parts, dim=-1)
        apply: Any = Fp8Product.apply
        parts: tuple[Tensor, ...] = apply(
            x, self.weight, self.bias, autocast_dtype(x), num_parts, *self.state
        )
        return parts


def feed_forward_in_fp8(layer: Any, hidden: Tensor) -> Tensor:
    """Compute `feed_forward` of model.py for a layer with two Fp8Linear and GELU between them."""
    if not layer.training:
        return feed_forward(layer, hidden)
    up, down, apply = layer.intermediate.dense, layer.output.dense, Fp8FeedForward.apply
    weights = up.weight, up.bias, down.weight, down.bias
    result: Tensor = apply(hidden, *weights, autocast_dtype(hidden), *up.state, *down.state)  # type: ignore[no-untyped-call]
    return result


def use_fp8(model: Packed) -> Packed:
    """Replace the linear layers of every encoder layer except the last, in place; returns the model.

    Raises UserError for sizes that are no multiples of 16.
    """
    check_packed(model, "use_fp8")
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
    for layer in layers:
        if model.config.hidden_act == GELU and hasattr(layer.intermediate, "intermediate_act_fn"):
            layer.feed_forward = feed_forward_in_fp8
    history = torch.zeros(HISTORY_STEPS, len(DTYPES) * len(linears), device=linears[0][2].weight.device)
    model.register_buffer("fp8_history", history)
    return model


@torch.no_grad()
def update_scales(model: nn.Module) -> None:
    """Take the scales of the next step from the largest values of the last HISTORY_STEPS, of all ranks.

    Collective, without a host sync. A largest value that is not finite counts as 0.
    """
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    scales, currents = (
        [value for layer in layers for value in layer.buffers_of(kind)] for kind in ("scale", "current")
    )
    history = model.get_buffer("fp8_history")
    latest = distributed.all_reduce_max(torch.stack(currents))
    history.copy_(torch.cat([latest.where(latest.isfinite(), 0.0)[None], history[:-1]]))
    largest = history.amax(dim=0)
    torch._foreach_copy_(scales, list(largest.where(largest > LEAST, torch.stack(scales)).unbind()))
    torch._foreach_zero_(currents)


class Fp8(Method):
    """Replaces linear layers. Refuses a model, an order of methods or a GPU on which FP8 cannot work."""

    is_approved = True
    has_started = False

    def configure(self, config: RunConfig) -> RunConfig:
        if config.model.num_hidden_layers == 1:  # type: ignore[attr-defined]  # the last one, which stays as it is
            return self.dropped_from(config)
        order = list(config.methods)
        for other in LAYERS_FROM:
            if other in order[order.index(self.name) :]:
                self.refuse(f"needs {other} before it, which makes layers anew")
        if resolve_rounding(config.methods.get("unpad", {}).get("round_to", MULTIPLE), 1) % MULTIPLE:
            raise UserError(f"not a multiple of {MULTIPLE}", where="methods.unpad.round_to")
        if config.precision != "bf16":
            what = f"8-bit products need the range of bf16 beside them, not {config.precision}"
            raise UserError(what, where="precision", hint="--set precision=bf16")
        self.check_hardware()
        return config

    def check_hardware(self) -> None:
        """Raise UserError on a GPU without 8-bit products; a CPU computes them slowly."""
        if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < CAPABILITY:
            has, needs = (".".join(map(str, version)) for version in (capability, CAPABILITY))
            what = f"this GPU has no 8-bit products: its compute capability is {has}, they need {needs}"
            self.refuse(what, hint=f"--set methods.{self.name}=false, or the configuration optimized")

    def model(self, model: nn.Module) -> nn.Module:
        self.check_hardware()
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default; unset, Triton 3.9 warns
        return use_fp8(check_packed(model, self))

    def gradients(self, model: nn.Module, progress: Progress, closure: Callable[[], Tensor]) -> None:
        if progress.step == 0 and not self.has_started:
            for _ in range(FIRST_PASSES):
                update_scales(model)
                closure()
        self.has_started = True

    def after_step(self, model: nn.Module, num_steps: int) -> None:
        update_scales(model)
