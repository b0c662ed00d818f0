"""Products in 8 bits: their rounding, their scales, the parts that stay in 16 bits, and refusals."""

import numpy as np
import pytest
import torch
from torch import nn

from common.cli import dispatch
from common.errors import UserError
from common.training.load import load_config
from common.training.step import Training
from language_bert.benchmark import Benchmark
from language_bert.kernels.quantize import GRADIENTS, quantize
from language_bert.methods import fp8
from language_bert.methods.fp8 import DTYPES, HISTORY_STEPS, VALUES, Fp8Linear, State, to_8_bits
from language_bert.model import feed_forward
from language_bert.probes import Probes, fp8_pairs
from tests.command import run_interpreted
from tests.common.training import checkpointed
from tests.language_bert.configs import mini
from tests.language_bert.test_parity import apply_methods

SETTINGS = ("model.num_hidden_layers=3", "methods.chunked_head=false")  # three layers, and logits


def build(*settings):
    config = mini("optimized", "precision=bf16", *SETTINGS, *settings)
    benchmark = Benchmark(config, seed=0)
    torch.manual_seed(5)
    (batch,) = Probes(benchmark).bench_batches(8).values()
    model, batch, _ = apply_methods(config, benchmark.build_model(), batch)
    return config, model, batch


def loss_of(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**batch.inputs).prediction_logits
    labels = batch.targets["labels"].flatten()
    return nn.functional.cross_entropy(logits.float(), labels[labels >= 0])


def find_scales(model, batch):
    """Take the scales from the batch itself, as the first step does."""
    for _ in range(fp8.FIRST_PASSES):
        loss_of(model.train(), batch).backward()
        fp8.update_scales(model)
    model.zero_grad()


def scale_for(x, dtype):
    return x.detach().abs().max().float() / torch.finfo(dtype).max


def rounded(x, dtype):
    """Return x in float64 after rounding to 8 bits, scaled by its own largest value."""
    scale = scale_for(x, dtype)
    return quantize([x], scale, dtype).rows.double() * scale


@pytest.mark.parametrize("name", ["input", "gradient"])
def test_the_largest_value_stays_and_others_are_off_by_half_a_step_at_most(name):
    x, dtype = torch.linspace(-3e-7, 5e-7, 1001)[:, None], DTYPES[name]
    scale = scale_for(x, dtype)
    state = State(scale, scale, scale, *torch.zeros(3).unbind())
    current = getattr(state, f"{name}_current")

    def read(x, state):
        return to_8_bits(name, state, x).rows.float() * state.input_scale

    again = read(x, state)
    assert again.max() == pytest.approx(5e-7) and current == scale
    bound = x.abs() * torch.finfo(dtype).eps / 2 + scale * torch.finfo(dtype).smallest_normal
    assert (again - x).abs().le(bound).all()
    clamped = read(x, State(*[scale / 2] * 3, *state[3:]))
    assert clamped.max() == pytest.approx(2.5e-7) and clamped.min() == pytest.approx(-2.5e-7)
    to_8_bits(name, state, x / 8)
    assert current == scale, "a smaller tensor lowered what the larger one asks for"


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_product_and_its_gradients_are_those_of_the_rounded_factors(backend):
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 96), torch.randn(48, 64)
    weight = torch.linspace(-1, 1, 48 * 96).view(48, 96).bfloat16()
    layer = Fp8Linear(linear)
    factors = {"input": (x, VALUES), "weight": (linear.weight, VALUES), "gradient": (weight, GRADIENTS)}
    for name, factor in factors.items():
        layer.get_buffer(f"{name}_scale").copy_(scale_for(*factor))
    called = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = called(leaf)
    assert y.dtype == torch.bfloat16
    y.backward(weight)
    for name, factor in factors.items():
        assert layer.get_buffer(f"{name}_current") == pytest.approx(scale_for(*factor).item())
    x8, weight8, g8 = (rounded(*factor) for factor in factors.values())
    expected = [x8 @ weight8.T + linear.bias.detach(), g8 @ weight8, g8.T @ x8, weight.double().sum(dim=0)]
    for found, plain in zip((y, leaf.grad, linear.weight.grad, linear.bias.grad), expected, strict=True):
        error = (found.double() - plain).norm() / plain.norm()
        assert error < 0.01  # of bfloat16's rounding; that to 8 bits makes 0.04


def test_scales_are_those_of_the_largest_values_of_the_last_steps():
    layers = nn.ModuleDict({name: Fp8Linear(nn.Linear(16, 32)) for name in ("one", "other")})
    layers.register_buffer("fp8_history", torch.zeros(HISTORY_STEPS, 2 * len(DTYPES)))
    one, other = layers["one"], layers["other"]
    before = [scale.item() for scale in other.buffers_of("scale")]

    def take_step(current):
        one.input_current.fill_(current)
        other.gradient_current.fill_(2 * current)
        fp8.update_scales(layers)
        assert not any(current.item() for layer in (one, other) for current in layer.buffers_of("current"))
        assert other.gradient_scale == 2 * one.input_scale
        return one.input_scale.item()

    assert take_step(3.0) == 3.0
    assert [take_step(current) for current in (1.0, float("inf"), 0.0, 4.0, float("nan"))] == [3, 3, 3, 4, 4]
    assert [take_step(0.5) for _ in range(HISTORY_STEPS - 2)] == [4.0] * (HISTORY_STEPS - 2)
    assert take_step(0.5) == 0.5
    assert [take_step(0.0) for _ in range(HISTORY_STEPS)][-1] == 0.5, "zeros say nothing about a scale"
    assert [scale.item() for scale in other.buffers_of("scale")][:2] == before[:2]


def multiply_plainly(a, b, scales, dtype, *, fast=False, bias=None):
    result = a.float() @ b.t().float() * (scales[0] * scales[1])
    return (result if bias is None else result + bias).to(dtype)


@pytest.fixture
def quick(monkeypatch, prepared_data):
    """Replace the product in 8 bits, which a CPU computes slowly."""
    monkeypatch.setattr(fp8, "multiply_scaled", multiply_plainly)


def train(seed, *settings, num_steps):
    """Train at size mini; returns the training and its losses."""
    config = mini("optimized_fp8", "precision=bf16", "model.num_hidden_layers=2", *settings)
    training = Training(config, Benchmark(config, seed=seed), seed=seed)
    training.initialize()
    batches = training.benchmark.train_batches()
    return training, [float(training.train_step(next(batches), step)) for step in range(num_steps)]


def test_the_first_step_rounds_with_the_scales_of_its_own_batch(quick):
    training, _ = train(3, num_steps=1)  # its learning rate is 0
    batch = next(training.benchmark.train_batches())
    layers = [module for module in training.model.modules() if isinstance(module, Fp8Linear)]
    training.forward_backward(batch, 0)
    for layer in layers:
        for scale, current in zip(layer.buffers_of("scale"), layer.buffers_of("current"), strict=True):
            assert 0.7 < scale / current < 1.4  # those of the passes before, rounded otherwise


def test_scales_and_their_history_are_resumed(quick, tmp_path):
    methods = ["methods.unpad={round_to: 64}", "methods.fused_qkv={}", "methods.fp8={}"]
    settings = ["precision=bf16", "global_batch_size=8", "model.num_hidden_layers=2", *methods]

    def start(folder, **source):
        folder.mkdir()
        return checkpointed.start("language_bert", folder, settings=settings, **source)

    whole = checkpointed.train(start(tmp_path / "whole"), keep=[3])
    assert (
        whole[0]["rank0.model.fp8_history"].count_nonzero(dim=0).tolist() == [checkpointed.NUM_STEPS + 2] * 12
    )
    source = tmp_path / "whole/3.safetensors"
    assert checkpointed.are_equal(checkpointed.train(start(tmp_path / "again", source=source)), whole)


@pytest.mark.on_demand
def test_a_fifth_of_a_mini_training_ends_where_that_in_16_bits_does(quick):
    """The mean loss of the last 40 of 360 steps, of three seeds in 16 bits and of two of them in 8."""

    def end_loss(seed, *settings):
        _, losses = train(seed, "budget=0.2", *settings, num_steps=360)
        assert losses[0] - np.mean(losses[-40:]) > 1, "nothing was learned"
        return float(np.mean(losses[-40:]))

    in_16_bits = [end_loss(seed, "methods.fp8=false") for seed in (1, 2, 3)]
    in_8_bits = [end_loss(seed) for seed in (1, 2)]
    spread = max(in_16_bits) - min(in_16_bits)
    differences = np.subtract(in_8_bits, in_16_bits[:2])
    print(f"16 bits {in_16_bits}, 8 bits {in_8_bits}, spread {spread}, differences {differences}")
    assert differences.any() and np.abs(differences).max() < spread


def test_every_layer_but_the_last_multiplies_in_8_bits_and_evaluation_does_not():
    _, plain, batch = build()
    _, model, _ = build("methods.fp8={}")
    names = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert len(names) == 2 * 4 and not any(".layer.2." in name for name in names)
    find_scales(model, batch)
    both = [loss_of(each.train(), batch) for each in (plain, model)]
    for each in both:
        each.backward()
    assert 0 < abs(both[0].item() - both[1].item()) < 0.01
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 0.2 * one.grad.norm(), name
    assert torch.equal(*(loss_of(each.eval(), batch) for each in (plain, model)))


def test_gated_units_without_a_bias_multiply_in_8_bits_too():
    _, model, batch = build("methods.gated_linear_units={round_to: 16}", "methods.fp8={}")
    loss_of(model.train(), batch).backward()
    replaced = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert len(replaced) > 2 * 3
    assert all(module.weight.grad.isfinite().all() and module.weight.grad.any() for module in replaced)


def test_the_pairs_of_the_preflight_agree():
    for pair in fp8_pairs(torch.device("cpu")):
        assert 0 < pair.error() < pair.tolerance, pair.name


def test_with_one_layer_it_is_dropped_and_the_run_says_so():
    loaded = load_config("language_bert", "optimized_fp8", size="mini", settings=["precision=bf16"])
    assert "fp8" not in loaded.config.methods
    assert [change for change in loaded.changes if change.startswith("fp8: methods")]
    two = load_config(
        "language_bert",
        "optimized_fp8",
        size="mini",
        settings=["model.num_hidden_layers=2", "precision=bf16"],
    )
    assert "fp8" in two.config.methods and not two.changes


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["methods.unpad.round_to=24"], "methods.unpad.round_to: not a multiple of 16"),
        (["precision=fp32"], "precision: 8-bit products need the range of bf16"),
        (["precision=fp16"], "precision: 8-bit products need the range of bf16"),
        (["model.intermediate_size=250"], "not 128 x 250"),
    ],
)
def test_what_8_bits_cannot_do_is_refused(settings, what):
    others = [f"methods.{each}=false" for each in ("fused_qkv", "sparse_head", "last_layer_subset")]
    with pytest.raises(UserError, match=what):
        build("methods.fp8={}", *settings, *others)


def test_a_gpu_without_8_bits_is_refused_in_one_line_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(
        UserError, match=r"^methods\.fp8: this GPU has no .*is 8\.0, they need 8\.9"
    ) as refusal:
        dispatch(["run", "language_bert", "optimized_fp8", "--results", str(tmp_path / "results")])
    assert "\n" not in str(refusal.value) and "optimized" in refusal.value.hint
    assert list(tmp_path.iterdir()) == []


KERNEL_AGAINST_TORCH = """
import os
import torch
from language_bert.kernels.quantize import quantize

torch.manual_seed(0)
for shape in ((16, 16), (128, 256), (144, 272), (130, 5), (132, 5)):  # parts of a tile, a tile and two
    for function, num_parts in (("copy", 1), ("copy", 3), ("gelu", 1), ("gelu_backward", 2)):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            wide = torch.randn(shape[0], 2 * num_parts * shape[1])
            parts = wide.chunk(2 * num_parts, dim=-1)[::2]  # rows lie apart
            if function != "copy":
                parts = [part.bfloat16() for part in parts]
            scale = torch.tensor(3.0) / torch.finfo(dtype).max
            by_kernel = quantize(parts, scale, dtype, function)
            os.environ["TRITON_INTERPRET"] = "0"
            by_torch = quantize(parts, scale, dtype, function)
            os.environ["TRITON_INTERPRET"] = "1"
            for one, other in zip(by_kernel, by_torch, strict=True):
                assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()
            torch.testing.assert_close(by_kernel[2:], by_torch[2:], rtol=1e-4, atol=1e-4)
            assert torch.equal(by_kernel.columns.view(torch.uint8).t(), by_kernel.rows.view(torch.uint8))
            # Triton's interpreter loses the carry where a value is rounded up to a power of two.
            one, other = (each.rows.float() for each in (by_kernel, by_torch))
            bound = other.abs() / 2 + torch.finfo(dtype).smallest_normal
            assert ((one - other).abs() <= bound).all() and (one == other).float().mean() > 0.9
rows = torch.randn(16, 32)
torch.library.opcheck(torch.ops.ttt.quantize.default, ([rows], scale, torch.float8_e5m2, "copy"))
"""


def test_the_kernel_rounds_transposes_and_sums_every_tile():
    run_interpreted(KERNEL_AGAINST_TORCH)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_feed_forward_network_is_that_of_two_layers_with_gelu_between(quick, backend):
    """Between two layers GELU and its gradient are rounded to bfloat16 as well."""
    _, model, _ = build("methods.fp8={}")
    layer = model.bert.encoder.layer[0].train()
    up, down = layer.intermediate.dense, layer.output.dense
    hidden = torch.randn(32, up.in_features, requires_grad=True)

    def run(function):
        for each in (up, down):
            for name, state in each.named_buffers():
                state.fill_(0.01 if name.endswith("scale") else 0.0)
        called = torch.compile(function, fullgraph=True, backend=backend) if backend else function
        with torch.autocast("cpu", torch.bfloat16):
            y = called(layer, hidden)
        weight = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
        leaves = [hidden, up.weight, up.bias, down.weight, down.bias]
        gradients = torch.autograd.grad(y, leaves, weight)
        currents = [current.clone() for each in (up, down) for current in each.buffers_of("current")]
        return [y, *gradients, *currents]

    assert layer.feed_forward is not feed_forward
    for one, other in zip(run(layer.feed_forward), run(feed_forward), strict=True):
        one, other = one.double(), other.double()
        assert one.shape == other.shape and (one - other).norm() < 0.04 * other.norm()


def test_another_activation_is_computed_between_two_layers():
    _, model, batch = build("model.activation=gelu", "methods.fp8={}")
    assert not any("feed_forward" in vars(layer) for layer in model.bert.encoder.layer)
    assert loss_of(model.train(), batch).isfinite()
