"""Gated linear units: the formula, the number of parameters, packed and not."""

import pytest
import torch
import torch.nn.functional as F

from language_bert.methods.gated_linear_units import GatedUnit, apply_gated_linear_units, gated_width
from language_bert.methods.unpad import unpad
from tests.language_bert.test_parity import EXACT, SIZES, make_batch, make_model


def test_a_unit_is_the_papers_formula():
    torch.manual_seed(0)
    plain, biased = (GatedUnit(5, 7, torch.nn.GELU(), bias=bias).double() for bias in (False, True))
    x, (w, v) = torch.randn(3, 5, dtype=torch.float64), plain.dense.weight.chunk(2)
    torch.testing.assert_close(plain(x), F.gelu(x @ w.T) * (x @ v.T))
    (w, v), (b, c) = biased.dense.weight.chunk(2), biased.dense.bias.chunk(2)
    torch.testing.assert_close(biased(x), F.gelu(x @ w.T + b) * (x @ v.T + c))


@pytest.mark.parametrize(
    ("width", "factor", "round_to", "expected"),
    [(4096, 2 / 3, 8, 2728), (3072, 2 / 3, 8, 2048), (256, 2 / 3, 8, 168), (4, 0.1, 8, 8), (40, 1.0, 1, 40)],
)
def test_widths(width, factor, round_to, expected):
    assert gated_width(width, factor, round_to) == expected


def test_a_layer_has_weights_drawn_as_the_models_and_is_the_same_when_packed():
    model = make_model(False).eval()
    assert apply_gated_linear_units(model, round_to=1) == SIZES["num_hidden_layers"]
    layer = model.bert.encoder.layer[0]
    dense, output = layer.intermediate.dense, layer.output.dense
    assert dense.weight.shape == (2 * 27, 24) and output.weight.shape == (24, 27)  # 2/3 of 40
    assert output.weight.dtype == torch.float64
    assert dense.weight.std().item() == pytest.approx(0.3, rel=0.1)
    assert dense.bias is None and not output.bias.any()
    hidden = torch.randn(2, 3, 24, dtype=torch.float64)
    gate, value = dense(hidden).chunk(2, dim=-1)
    expected = layer.output.LayerNorm(output(F.gelu(gate) * value) + hidden)
    torch.testing.assert_close(layer.feed_forward_chunk(hidden), expected)
    batch = make_batch((9, 4, 20))
    tensors = batch.inputs | {"labels": batch.targets["labels"]}
    expected = model(**tensors).loss
    torch.testing.assert_close(unpad(model)(**tensors).loss, expected, **EXACT)
