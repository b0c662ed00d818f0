"""Gated linear units: the formula, the number of parameters, packed and not."""

import pytest
import torch
import torch.nn.functional as F

from language_bert.methods.gated_linear_units import GatedUnit, apply_gated_linear_units, gated_width
from language_bert.methods.unpad import unpad
from tests.language_bert.test_parity import make_batch, make_model


def test_a_unit_is_the_papers_formula():
    torch.manual_seed(0)
    unit, biased = (GatedUnit(5, 7, torch.nn.GELU(), bias=bias).double() for bias in (False, True))
    x = torch.randn(3, 5, dtype=torch.float64)
    w, v = unit.dense.weight.chunk(2)
    torch.testing.assert_close(unit(x), F.gelu(x @ w.T) * (x @ v.T))
    (w, v), (b, c) = biased.dense.weight.chunk(2), biased.dense.bias.chunk(2)
    torch.testing.assert_close(biased(x), F.gelu(x @ w.T + b) * (x @ v.T + c))


@pytest.mark.parametrize(
    ("width", "factor", "round_to", "expected"),
    [(4096, 2 / 3, 8, 2728), (3072, 2 / 3, 8, 2048), (256, 2 / 3, 8, 168), (4, 0.1, 8, 8), (40, 1.0, 1, 40)],
)
def test_widths(width, factor, round_to, expected):
    assert gated_width(width, factor, round_to) == expected


def test_two_thirds_of_the_width_have_as_many_weights():
    plain, gated = make_model(False), make_model(False)
    assert apply_gated_linear_units(gated, round_to=1) == 3
    layer, other = plain.bert.encoder.layer[0], gated.bert.encoder.layer[0]
    weights = layer.intermediate.dense.weight.numel() + layer.output.dense.weight.numel()
    found = other.intermediate.dense.weight.numel() + other.output.dense.weight.numel()
    assert weights == 2 * 24 * 40 and found == 3 * 24 * 27  # 1,920 and 1,944: the width of 26.7 is rounded
    assert other.output.dense.weight.dtype == torch.float64
    assert other.intermediate.dense.weight.std().item() == pytest.approx(0.3, rel=0.1)
    assert other.intermediate.dense.bias is None and not other.output.dense.bias.any()


def test_a_layer_is_the_formula_with_its_norm_and_the_same_when_packed():
    model = make_model(False).eval()
    apply_gated_linear_units(model)
    layer = model.bert.encoder.layer[0]
    hidden = torch.randn(2, 3, 24, dtype=torch.float64)
    gate, value = layer.intermediate.dense(hidden).chunk(2, dim=-1)
    expected = layer.output.LayerNorm(layer.output.dense(F.gelu(gate) * value) + hidden)
    torch.testing.assert_close(layer.feed_forward_chunk(hidden), expected)
    batch = make_batch((9, 4, 20))
    tensors = batch.inputs | {"labels": batch.targets["labels"]}
    expected = model(**tensors).loss
    torch.testing.assert_close(unpad(model)(**tensors).loss, expected, rtol=1e-10, atol=1e-10)
