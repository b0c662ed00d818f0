"""ALiBi: the paper's slopes, its scores in float64, and the same model packed."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from common.training.load import load_config
from language_bert import attention
from language_bert.attention import plan_attention, varlen_attention
from language_bert.methods import alibi
from language_bert.methods.alibi import alibi_bias, alibi_slopes, apply_alibi
from language_bert.methods.fused_qkv import fuse_qkv
from language_bert.methods.last_layer_subset import compute_needed_tokens
from language_bert.methods.sparse_head import read_masked_tokens
from language_bert.methods.unpad import unpad
from tests.language_bert.test_parity import MAX_LENGTH, gradients, make_batch, make_model


def published_slopes(n):
    """The function of the paper's code (https://github.com/ofirpress/attention_with_linear_biases)."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return published_slopes(closest) + published_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 16, 20])
def test_slopes_are_the_papers(num_heads):
    found = alibi_slopes(num_heads)
    torch.testing.assert_close(found, torch.tensor(published_slopes(num_heads)))
    assert found.shape == (num_heads,)


def test_eight_heads_have_the_sequence_that_the_paper_prints():
    assert alibi_slopes(8).tolist() == [2.0**-power for power in range(1, 9)]


def test_biases_fall_with_the_distance_in_both_directions():
    bias = alibi_bias(alibi_slopes(2), 3)
    assert (bias / alibi_slopes(2)[:, None, None]).tolist() == [[[0, -1, -2], [-1, 0, -1], [-2, -1, 0]]] * 2


def plain_layer(layer, hidden, slopes):
    """One layer of one sequence (S, D), written out."""
    own = layer.attention.self
    heads = [
        each(hidden).unflatten(-1, (own.num_attention_heads, -1)).transpose(0, 1)
        for each in (own.query, own.key, own.value)
    ]
    scores = heads[0] @ heads[1].mT / math.sqrt(own.attention_head_size)
    for head, slope in enumerate(slopes):
        for i in range(len(hidden)):
            for j in range(len(hidden)):
                scores[head, i, j] = scores[head, i, j] - slope * abs(i - j)
    attended = (scores.softmax(-1) @ heads[2]).transpose(0, 1).flatten(1)
    hidden = layer.attention.output.LayerNorm(layer.attention.output.dense(attended) + hidden)
    return layer.output.LayerNorm(layer.output.dense(F.gelu(layer.intermediate.dense(hidden))) + hidden)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_that_of_the_formula(implementation):
    model = make_model(False).eval()
    model.set_attn_implementation(implementation)
    assert apply_alibi(model) == 3
    batch = make_batch((9, 4)).inputs
    found = model.bert(**batch)[0]
    slopes = alibi_slopes(3).double().tolist()
    embeddings = model.bert.embeddings
    assert not embeddings.position_embeddings.weight.any()
    for row, length in enumerate((9, 4)):
        words = embeddings.word_embeddings(batch["input_ids"][row, :length])
        kinds = embeddings.token_type_embeddings(batch["token_type_ids"][row, :length])
        hidden = embeddings.LayerNorm(words + kinds)
        for layer in model.bert.encoder.layer:
            hidden = plain_layer(layer, hidden, slopes)
        torch.testing.assert_close(found[row, :length], hidden, rtol=1e-6, atol=1e-7)  # float32 slopes


@pytest.mark.parametrize("applied", ["before", "after"])
def test_packed_it_is_the_same_model_whatever_is_left_out(applied):
    batch = make_batch((MAX_LENGTH, 4, 5, 12, 23))
    tensors = batch.inputs | {"labels": batch.targets["labels"]}
    plain, model = make_model(False), make_model(False)
    apply_alibi(plain)
    if applied == "before":
        apply_alibi(model)
    model = unpad(model)
    for step in (fuse_qkv, read_masked_tokens, compute_needed_tokens):
        step(model)
    if applied == "after":
        apply_alibi(model)
    expected, found = plain(**tensors).loss, model(**tensors).loss
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    expected.backward()
    found.backward()
    found_gradients = gradients(model)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-8, atol=1e-10)
    assert not any("position_embeddings" in name for name in found_gradients)


def test_flash_attention_gets_the_slopes(monkeypatch):
    seen = {}

    def kernel(query, *offsets, alibi_slopes):
        seen["slopes"] = alibi_slopes
        return query

    monkeypatch.setattr(attention, "gpu_kernel", lambda: kernel)
    monkeypatch.setattr(attention, "has_kernel", lambda device: True)
    plain = plan_attention(torch.tensor([5]), 8)
    query = torch.randn(5, 2, 4).bfloat16()
    varlen_attention(query, query, query, plain, alibi_slopes(2).bfloat16())
    assert seen["slopes"].dtype == torch.float32 and seen["slopes"].tolist() == [2**-4, 2**-8]


def configured(*settings, name="optimized", size="mini"):
    return load_config("language_bert", name, size=size, settings=["methods.alibi={}", *settings])


def test_a_gpu_kernel_without_biases_is_refused(monkeypatch):
    monkeypatch.setattr(alibi.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(alibi, "HAS_FLASH_ATTENTION", False)
    with pytest.raises(UserError, match="needs flash-attn on a GPU"):
        configured()
    configured(name="baseline")
    monkeypatch.setattr(alibi, "HAS_FLASH_ATTENTION", True)
    configured()
    assert "flash_attn" not in sys.modules
