"""ALiBi: the paper's slopes, its scores in float64, and the same model packed."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from common.training.method import Progress
from common.training.registry import build_methods
from language_bert import attention
from language_bert.benchmark import Benchmark
from language_bert.methods.alibi import alibi_slopes, apply_alibi
from language_bert.methods.fused_qkv import fuse_qkv
from language_bert.methods.last_layer_subset import compute_needed_tokens
from language_bert.methods.sparse_head import read_masked_tokens
from language_bert.methods.unpad import unpad
from tests.language_bert.configs import mini
from tests.language_bert.test_parity import EXACT, MAX_LENGTH, gradients, make_batch, make_model

HALF, WHOLE = (f"methods.alibi={{train_sequence_length_scaling: {share}}}" for share in ("0.5", "1"))


@pytest.mark.parametrize(
    "halvings",
    [[8], [4, 8], [4, 8, 2], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]],
)
def test_slopes_are_those_of_the_papers_code(halvings):
    """Source: get_slopes in https://github.com/ofirpress/attention_with_linear_biases."""
    torch.testing.assert_close(alibi_slopes(len(halvings)), 0.5 ** torch.tensor(halvings))


def plain_layer(layer, hidden, slopes):
    """One layer of one sequence (S, D), written out."""
    attention = layer.attention.self
    projections = (attention.query, attention.key, attention.value)
    query, key, value = (
        part(hidden).unflatten(-1, (len(slopes), -1)).transpose(0, 1) for part in projections
    )
    distance = torch.tensor([[abs(i - j) for j in range(len(hidden))] for i in range(len(hidden))])
    scores = query @ key.mT / math.sqrt(attention.attention_head_size) - slopes[:, None, None] * distance
    attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    hidden = layer.attention.output.LayerNorm(layer.attention.output.dense(attended) + hidden)
    return layer.output.LayerNorm(layer.output.dense(F.gelu(layer.intermediate.dense(hidden))) + hidden)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_that_of_the_formula(implementation):
    model, batch = make_model(False, implementation).eval(), make_batch((9, 4)).inputs
    assert apply_alibi(model) == 3
    computed = model.bert(**batch)[0]
    embeddings = model.bert.embeddings
    assert not embeddings.position_embeddings.weight.any()
    for row, length in enumerate((9, 4)):
        words = embeddings.word_embeddings(batch["input_ids"][row, :length])
        kinds = embeddings.token_type_embeddings(batch["token_type_ids"][row, :length])
        hidden = embeddings.LayerNorm(words + kinds)
        for layer in model.bert.encoder.layer:
            hidden = plain_layer(layer, hidden, alibi_slopes(3).double())
        torch.testing.assert_close(computed[row, :length], hidden, rtol=1e-6, atol=1e-7)  # float32 slopes


@pytest.mark.parametrize("place", [0, 4], ids=["before", "after"])
def test_packed_it_is_the_same_model_whatever_is_left_out(place):
    batch = make_batch((MAX_LENGTH, 4, 5, 12, 23))
    tensors = batch.inputs | {"labels": batch.targets["labels"]}
    plain, model = make_model(False), make_model(False)
    apply_alibi(plain)
    steps = [unpad, fuse_qkv, read_masked_tokens, compute_needed_tokens]
    for step in (*steps[:place], apply_alibi, *steps[place:]):
        changed = step(model)
        model = changed if step is unpad else model
    losses = [used(**tensors).loss for used in (plain, model)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], **EXACT)
    assert not any("position_embeddings" in name for name in gradients(plain))
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-8, atol=1e-10)


def configured(name="optimized", *settings):
    return mini(name, "methods.alibi={}", *settings)


@pytest.mark.parametrize(("settings", "length"), [((), 40), ((HALF,), 80), ((WHOLE,), 160)])
def test_training_sees_segments_of_a_share_of_the_length_and_evaluation_none(settings, length):
    """Composer 0.7: (batch, length) becomes (batch / 0.25, length * 0.25); here by sequence."""
    config = configured("baseline", *settings)
    (method,) = (used for used in build_methods(config) if used.name == "alibi")
    batch = next(Benchmark(config, seed=0).synthetic_batches())
    short = method.batch(batch, Progress(step=0, num_steps=10, epoch=0, num_epochs=1))
    assert short.inputs["input_ids"].shape[1] == length and method.batch(batch, None) is batch
    assert short.inputs["attention_mask"].sum() == batch.inputs["attention_mask"].sum()
    assert short.num_samples == len(short.inputs["input_ids"]) == len(short.targets["labels"])
    order = list(configured("optimized", *settings).methods)
    assert order[0 if length < 160 else -1] == "alibi"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.next_sentence=true", "segments have no next sentence"),
        ("methods.compile={backend: aot_eager}", "cannot be compiled"),
        ("methods.alibi={train_sequence_length_scaling: 0.04}", "leaves less than 8 tokens"),
    ],
)
def test_what_segments_do_not_have_is_refused(setting, message):
    with pytest.raises(UserError, match=message):
        configured("baseline", setting)
    if "alibi" not in setting:
        configured("baseline", setting, WHOLE)


def test_a_gpu_kernel_without_biases_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs flash-attn on a GPU"):
        configured()
    configured("baseline")
    monkeypatch.setattr(attention, "find_spec", lambda name: True)
    configured()
    assert "flash_attn" not in sys.modules
