"""The central claim of the optimized BERT: fewer operations, the same numbers."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from transformers import BertConfig

from common.methods.compile import missing_compiler
from common.training.optim import build_optimizer
from common.training.registry import build_methods
from common.training.step import to_device
from language_bert import model as bert
from language_bert.attention import varlen_attention
from language_bert.benchmark import Benchmark
from language_bert.data.batches import IGNORED, random_batch, weigh_next_sentences
from language_bert.methods.unpad import unpad_batch
from language_bert.model import build_bert, masked_lm_loss, spread_positions
from tests.language_bert.configs import mini

CPU = torch.device("cpu")
MAX_LENGTH, VOCAB_SIZE = 37, 61  # primes: no shape is a multiple of anything
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40}
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # float64; sums run in another order
FURTHER = {"chunked_head": "{chunk_tokens: 3}", "compile_layers": "{backend: aot_eager}"}  # not of size mini
EVERY = ("unpad", "fused_qkv", "sparse_head", "last_layer_subset", "chunked_head")
METHODS = [
    ("unpad",),
    ("unpad", "fused_qkv"),
    ("unpad", "sparse_head"),
    ("unpad", "sparse_head", "last_layer_subset"),
    ("unpad", "fused_qkv", "sparse_head", "last_layer_subset"),
    ("unpad", "sparse_head", "chunked_head"),
    (*EVERY, "low_precision_layernorm"),
    (*EVERY, "low_precision_layernorm", "compile_layers"),
]


def random_lengths(seed):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(4, MAX_LENGTH + 1, rng.integers(2, 13)).tolist())


LENGTHS = [(37, 4, 5, 12, 23), (37,), (9, 9, 9), (4, 37, 4), *map(random_lengths, range(3))]
WITH_AND_WITHOUT_PAIRS = pytest.mark.parametrize("next_sentence", [False, True], ids=["mlm", "mlm+nsp"])


def make_model(next_sentence, attention="sdpa", **sizes):
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
        attn_implementation=attention,
        **SIZES | sizes,
    )
    torch.manual_seed(5)
    return build_bert(config, next_sentence=next_sentence).double()


def make_batch(lengths):
    counts = [max(1, length // 6) for length in lengths]
    return random_batch(np.random.default_rng(7), lengths, counts, VOCAB_SIZE, MAX_LENGTH)


def configuration(next_sentence, methods):
    settings = [f"model.next_sentence={str(next_sentence).lower()}"]
    off = {*EVERY, "low_precision_layernorm"} - set(methods)
    settings += [f"methods.{name}=false" for name in off]
    settings += [f"methods.{name}={FURTHER[name]}" for name in FURTHER.keys() & set(methods)]
    return mini("optimized", *settings)


def apply_methods(config, model, batch, **round_to):
    """Return model, batch and loss of a configuration; `round_to` replaces that of methods."""
    loss_of = Benchmark(config, seed=0).loss
    for method in build_methods(config):
        if method.name in round_to:
            method.settings = method.Config(round_to=round_to[method.name])
        model, batch, loss_of = method.model(model), method.batch(batch, None), method.loss(loss_of)
    return model, to_device(batch, CPU), loss_of


def split_projections(tensors):
    """Return tensors under Hugging Face's names, the fused projection split."""
    split = {}
    for name, values in tensors.items():
        parts = zip(("query", "key", "value"), values.chunk(3), strict=True)
        split |= (
            {name.replace("qkv", part): each for part, each in parts} if ".qkv." in name else {name: values}
        )
    return split


def gradients(model):
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return split_projections({name: gradient for name, gradient in named.items() if gradient is not None})


def trained(lengths, next_sentence, methods, *, bf16=False, num_steps=1):
    """Return loss, gradients and parameters after steps of the loop's kind, in float64 unless in bf16."""
    model, config = make_model(next_sentence), configuration(next_sentence, methods)
    model, batch, loss_of = apply_methods(config, model.float() if bf16 else model, make_batch(lengths))
    optimizer = build_optimizer(model, config.optimizer)
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outputs = model(**batch.inputs)
        loss = loss_of(outputs, batch.targets)
        loss.backward()
        optimizer.step()
    parameters = {name: values.detach() for name, values in model.named_parameters()}
    return {"loss": loss, "gradients": gradients(model), "parameters": split_projections(parameters)}


plainly_trained = cache(trained)  # what every combination of methods is compared with


@pytest.mark.parametrize("methods", METHODS, ids="+".join)
@WITH_AND_WITHOUT_PAIRS
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_loss_every_gradient_and_a_step_equal_hugging_face_in_float64(lengths, next_sentence, methods):
    expected = plainly_trained(lengths, next_sentence, ())
    torch.testing.assert_close(trained(lengths, next_sentence, methods), expected, **EXACT)


def test_queries_keys_and_values_in_one_tensor_give_the_same_gradients(monkeypatch):
    """With a CPU's attention in place of the kernel that takes one tensor."""
    monkeypatch.setattr(bert, "takes_qkv", lambda *_: True)
    monkeypatch.setattr(
        bert, "varlen_self_attention", lambda qkv, plan: varlen_attention(*qkv.unbind(1), plan)
    )
    monkeypatch.setattr(bert, "split_linear", None)  # of the other way
    expected = plainly_trained(LENGTHS[0], False, ())
    torch.testing.assert_close(trained(LENGTHS[0], False, ("unpad", "fused_qkv")), expected, **EXACT)


def test_the_configuration_eager_has_that_attention():
    assert Benchmark(mini("eager"), seed=0).build_model().config._attn_implementation == "eager"


@pytest.mark.on_demand
@pytest.mark.skipif(missing_compiler() != "", reason="no C++ compiler")
@WITH_AND_WITHOUT_PAIRS
def test_code_of_inductor_equals_hugging_face_in_float64(next_sentence, monkeypatch):
    monkeypatch.setitem(FURTHER, "compile_layers", "{backend: inductor}")
    expected = plainly_trained(LENGTHS[-1], next_sentence, ())
    torch.testing.assert_close(trained(LENGTHS[-1], next_sentence, METHODS[-1]), expected, **EXACT)


@pytest.mark.parametrize("methods", METHODS[-4:], ids="+".join)
def test_losses_of_some_steps_in_bf16_stay_within_two_percent(methods):
    some, plain = (trained((37, 5, 20, 8), False, used, bf16=True, num_steps=5) for used in (methods, ()))
    torch.testing.assert_close(some["loss"].float(), plain["loss"].float(), rtol=0.02, atol=0)


@WITH_AND_WITHOUT_PAIRS
@pytest.mark.parametrize("lengths", LENGTHS[-3:], ids=str)
def test_bf16_is_as_near_to_float64_as_that_of_hugging_face(lengths, next_sentence):
    """Within 5 % of all gradients together, and 1.5 times the plain model's distance, also after a step."""
    exact = plainly_trained(lengths, next_sentence, ())

    def distances(methods):
        """Return how far gradients and parameters are from float64, as a share of all of these together."""
        near = trained(lengths, next_sentence, methods, bf16=True)
        for kind in ("gradients", "parameters"):
            one, other = (
                torch.cat([side[kind][name].double().flatten() for name in exact[kind]])
                for side in (near, exact)
            )
            yield float((one - other).norm() / other.norm())

    plain_gradients, plain_parameters = distances(())
    for methods in METHODS[-4:]:
        of_gradients, of_parameters = distances(methods)
        assert of_gradients < 0.05 and of_gradients < 1.5 * plain_gradients
        assert of_parameters < 1.5 * plain_parameters


@pytest.mark.parametrize("round_to", [1, 2, 36, 37, 38, 64, 200])
def test_padding_tokens_lie_in_sequences_that_are_not_too_long(round_to):
    numbers = set()
    for lengths in LENGTHS:
        plan = unpad_batch(make_batch(lengths), round_to=round_to).inputs["sequences"]
        packed = plan.cu_seqlens.diff().tolist()
        assert tuple(packed[: len(lengths)]) == lengths and max(packed) <= MAX_LENGTH
        assert sum(packed) % round_to == 0
        numbers.add(len(packed) - len(lengths))
    assert len(numbers) == 1  # as many in every batch


@pytest.mark.parametrize("round_to", [1, 64])
def test_the_evaluation_counts_the_same_tokens_right(round_to):
    config = configuration(False, METHODS[-1])
    count_correct = Benchmark(config, seed=0).count_correct
    plain, batch = make_model(False), make_batch((37, 5, 20, 8))
    labels, outputs = batch.targets["labels"], plain(**batch.inputs)
    predicted = outputs[0].argmax(dim=-1)
    is_right = (labels >= 0) & (torch.arange(labels.numel()).view_as(labels) % 3 > 0)
    batch.targets["labels"] = labels.where(~is_right, predicted)
    expected = count_correct(outputs, batch.targets)
    assert 0 < expected[0] < expected[1]
    model, packed, _ = apply_methods(config, make_model(False), batch, unpad=round_to)
    outputs = model.eval()(**packed.inputs)
    assert count_correct(outputs, packed.targets) == expected
    answers = outputs[0].argmax(dim=-1)[packed.targets["labels"] >= 0]
    assert torch.equal(answers, predicted[labels >= 0])


def test_spread_positions_start_unequal_and_keys_equal_queries():
    model = make_model(False)
    spread_positions(model, 0.1)
    positions = model.bert.embeddings.position_embeddings.weight
    assert positions.abs().max() < 0.1001 and len(positions.unique(dim=0)) == MAX_LENGTH
    attention = model.bert.encoder.layer[0].attention.self
    assert torch.equal(attention.query.weight, attention.key.weight)


def test_the_chunked_head_multiplies_in_16_bits_also_where_layer_norm_gives_32():
    config = configuration(False, METHODS[-1])
    model, batch, _ = apply_methods(config, make_model(False).float(), make_batch((37, 5, 20, 8)))
    norm = model.cls.predictions.transform.LayerNorm
    norm.register_forward_hook(lambda *called: called[2].float())  # as autocast does on a GPU
    with torch.autocast("cpu", torch.bfloat16):
        assert model.train()(**batch.inputs).prediction_logits.dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("methods", [(), METHODS[-2]], ids=["padded", "packed"])
def test_weighted_next_sentences_are_the_mean_of_the_whole_batch_and_of_its_parts(methods):
    model, config = make_model(True), configuration(True, methods)
    whole = make_batch(LENGTHS[0])
    num_masked, size = int((whole.targets["labels"] != IGNORED).sum()), whole.num_samples
    expected = masked_lm_loss(model(**whole.inputs), whole.targets)
    weighted = weigh_next_sentences(whole, num_masked, size)
    assert size > 2
    for num_parts in (1, 2, size):
        total = 0.0
        for part in weighted.parts(num_parts):
            count = int((part.targets["labels"] != IGNORED).sum())
            changed, batch, loss_of = apply_methods(config, copy.deepcopy(model), part)
            total += float(loss_of(changed(**batch.inputs), batch.targets)) * count / num_masked
        assert total == pytest.approx(float(expected), rel=1e-6)  # weights are float32
