"""Products in 8 bits: what rounding does to them, what is left alone, and what is refused."""

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.training.load import load_config
from common.training.optim import build_optimizer
from language_bert.benchmark import Benchmark
from language_bert.methods.fp8 import GRADIENTS, VALUES, Fp8Linear, quantize
from language_bert.probes import Probes, fp8_pair
from tests.language_bert.test_parity import apply_methods

SETTINGS = ("model.num_hidden_layers=3", "methods.chunked_head=false")  # three layers, and logits


def build(*settings):
    config = load_config("language_bert", "optimized", size="mini", settings=[*SETTINGS, *settings]).config
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


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
def test_the_largest_value_stays_and_others_are_off_by_half_a_step_at_most(dtype):
    x = torch.linspace(-3e-7, 5e-7, 1001)
    values, scale = quantize(x, dtype)
    again = values.float() * scale
    assert again.max() == pytest.approx(5e-7)
    bound = x.abs() * torch.finfo(dtype).eps / 2 + scale * torch.finfo(dtype).smallest_normal
    assert (again - x).abs().le(bound).all()
    assert not quantize(torch.zeros(3), dtype)[0].float().any()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_product_and_its_gradients_are_those_of_the_rounded_factors(backend):
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 96), torch.randn(48, 64)
    weight = torch.linspace(-1, 1, 48 * 96).view(48, 96)
    layer = Fp8Linear(linear)
    layer = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(leaf)
    assert y.dtype == torch.bfloat16
    y.backward(weight.bfloat16())

    def rounded(tensor, dtype):
        values, scale = quantize(tensor, dtype)
        return values.double() * scale

    x8, weight8 = (rounded(factor.detach(), VALUES) for factor in (x, linear.weight))
    g8 = rounded(weight.bfloat16(), GRADIENTS)
    expected = [x8 @ weight8.T + linear.bias.detach(), g8 @ weight8, g8.T @ x8, weight.sum(dim=0)]
    for found, plain in zip((y, leaf.grad, linear.weight.grad, linear.bias.grad), expected, strict=True):
        error = (found.double() - plain).norm() / plain.norm()
        assert error < 0.01  # of bfloat16's rounding; that to 8 bits makes 0.04


def test_every_layer_but_the_last_multiplies_in_8_bits_and_evaluation_does_not():
    _, plain, batch = build()
    _, model, _ = build("methods.fp8={}")
    names = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert len(names) == 2 * 4 and not any(".layer.2." in name for name in names)
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


def test_a_small_model_learns_as_it_does_in_16_bits():
    ends = []
    for settings in ((), ("methods.fp8={}",)):
        config, model, batch = build(*settings)
        optimizer = build_optimizer(model, config.optimizer)
        for _ in range(10):
            optimizer.zero_grad()
            loss = loss_of(model.train(), batch)
            loss.backward()
            optimizer.step()
        ends.append(loss.item())
    assert max(ends) < 6 and abs(ends[0] - ends[1]) < 0.1


def test_the_pair_of_the_preflight_agrees():
    assert 0 < (pair := fp8_pair(torch.device("cpu"))).error() < pair.tolerance


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["methods.unpad.round_to=24"], "methods.unpad.round_to: not a multiple of 16"),
        (["precision=fp32"], "precision: 8-bit products give 16 bits"),
        (["model.intermediate_size=250"], "not 128 x 250"),
    ],
)
def test_what_8_bits_cannot_do_is_refused(settings, what):
    others = [f"methods.{each}=false" for each in ("fused_qkv", "sparse_head", "last_layer_subset")]
    with pytest.raises(UserError, match=what):
        build("methods.fp8={}", *settings, *others)
