"""The central claim of the optimized BERT: fewer operations, the same numbers."""

import numpy as np
import pytest
import torch
from transformers import BertConfig

from common.config import load
from common.method import build_methods
from language_bert.attention import group_by_length, varlen_attention
from language_bert.benchmark import Benchmark
from language_bert.data.batches import padded_batch, random_record
from language_bert.methods.fused_qkv import fuse_qkv
from language_bert.methods.unpad import unpad_batch
from language_bert.model import PackedBert, build_bert, spread_positions

MAX_LENGTH, VOCAB_SIZE = 37, 61  # primes: no shape is a multiple of anything
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # float64; sums run in another order


def make_model(next_sentence: bool):
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )
    torch.manual_seed(5)
    return build_bert(config, next_sentence=next_sentence).double()


def make_batch(lengths):
    rng = np.random.default_rng(7)
    records = [
        random_record(rng, length=length, vocab_size=VOCAB_SIZE, num_masked=max(1, length // 6))
        for length in lengths
    ]
    return padded_batch(records, MAX_LENGTH)


def configuration(next_sentence, methods):
    settings = [f"model.next_sentence={str(next_sentence).lower()}"]
    off = {"unpad", "fused_qkv", "sparse_head", "last_layer_subset"} - set(methods)
    settings += [f"methods.{name}=false" for name in off]
    return load("language_bert", "optimized", size="mini", settings=settings).config


def gradients(model):
    """Return the gradients under Hugging Face's names, the fused projection split."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".qkv." in name:
            for part, gradient in zip(("query", "key", "value"), parameter.grad.chunk(3), strict=True):
                found[name.replace("qkv", part)] = gradient
        elif parameter.grad is not None:
            found[name] = parameter.grad
    return found


LENGTHS = [(37, 4, 5, 12, 23), (37,), (9, 9, 9), (4, 37, 4)]
METHODS = [
    ("unpad",),
    ("unpad", "fused_qkv"),
    ("unpad", "sparse_head"),
    ("unpad", "sparse_head", "last_layer_subset"),
    ("unpad", "fused_qkv", "sparse_head", "last_layer_subset"),
]


@pytest.mark.parametrize("methods", METHODS, ids="+".join)
@pytest.mark.parametrize("next_sentence", [False, True], ids=["mlm", "mlm+nsp"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_loss_and_every_gradient_equal_hugging_face_in_float64(lengths, next_sentence, methods):
    config = configuration(next_sentence, methods)
    benchmark = Benchmark(config, seed=0)
    plain, copied = make_model(next_sentence), make_model(next_sentence)
    batch = make_batch(lengths)
    expected = benchmark.loss(plain(**batch.inputs), batch.targets)
    expected.backward()
    model = copied
    for method in build_methods(config):
        model = method.model(model)
    for method in build_methods(config):
        batch = method.batch(batch, None)
    loss = benchmark.loss(model(**batch.inputs), batch.targets)
    loss.backward()
    # the loss itself is computed in float32, as in training
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    expected_gradients, found = gradients(plain), gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_logits_and_gradients_equal_hugging_face_to_float64_rounding(lengths):
    plain, packed = make_model(True), PackedBert(make_model(True))
    fuse_qkv(packed)
    packed.masked_tokens_only = packed.needed_tokens_only = True
    batch = make_batch(lengths)
    unpadded = unpad_batch(batch)
    expected = plain(**batch.inputs)
    found = packed(**unpadded.inputs)
    logits = expected.prediction_logits[batch.targets["labels"] != -100]
    torch.testing.assert_close(found.prediction_logits, logits, **EXACT)
    torch.testing.assert_close(found.seq_relationship_logits, expected.seq_relationship_logits, **EXACT)
    (logits.square().sum() + expected.seq_relationship_logits.square().sum()).backward()
    (found.prediction_logits.square().sum() + found.seq_relationship_logits.square().sum()).backward()
    expected_gradients, found_gradients = gradients(plain), gradients(packed)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("round_to", [1, 64])
def test_the_evaluation_counts_the_same_tokens_right(round_to):
    config = configuration(False, METHODS[-1])
    benchmark = Benchmark(config, seed=0)
    plain, batch = make_model(False), make_batch((37, 5, 20, 8))
    expected = benchmark.count_correct(plain(**batch.inputs), batch.targets)
    model = make_model(False)
    for method in build_methods(config):
        if method.name == "unpad":
            method.settings = method.Config(round_to=round_to)
        model, batch = method.model(model), method.batch(batch, None)
    assert benchmark.count_correct(model(**batch.inputs), batch.targets) == expected


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 2), (5, 1, 31, 8), (7,) * 11])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 20])
def test_attention_within_sequences_equals_scaled_dot_product_attention_on_each(lengths, num_groups):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), 3, 5, dtype=torch.float64, requires_grad=True) for _ in "qkv"
    )
    sequences = group_by_length(torch.tensor((0, *lengths)).cumsum(0), num_groups=num_groups)
    found = varlen_attention(query, key, value, sequences)
    parts = [x.split(lengths) for x in (query, key, value)]
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part)).transpose(
                0, 1
            )
            for part in zip(*parts, strict=True)
        ]
    )
    torch.testing.assert_close(found, expected, **EXACT)
    weight = torch.randn_like(found)
    found_gradients = torch.autograd.grad(found, (query, key, value), weight)
    for one, other in zip(
        found_gradients, torch.autograd.grad(expected, (query, key, value), weight), strict=True
    ):
        torch.testing.assert_close(one, other, **EXACT)


def test_packing_refuses_dropout():
    model = make_model(False)
    model.config.hidden_dropout_prob = 0.1
    with pytest.raises(Exception, match="dropout"):
        PackedBert(model)


def test_spread_positions_start_unequal_and_keys_equal_queries():
    model = make_model(False)
    spread_positions(model, 0.1)
    positions = model.bert.embeddings.position_embeddings.weight
    assert positions.abs().max() < 0.1001 and len(positions.unique(dim=0)) == MAX_LENGTH
    attention = model.bert.encoder.layer[0].attention.self
    assert torch.equal(attention.query.weight, attention.key.weight)
