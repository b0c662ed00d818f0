"""The central claim of the optimized BERT: fewer operations, the same numbers."""

import inspect

import numpy as np
import pytest
import torch
from transformers import BertConfig

from common.errors import UserError
from common.methods.compile import missing_compiler
from common.training.load import load_config
from common.training.optim import build_optimizer
from common.training.registry import build_methods
from common.training.step import to_device
from language_bert import attention
from language_bert.attention import plan_attention, varlen_attention
from language_bert.benchmark import Benchmark
from language_bert.data.batches import random_batch
from language_bert.methods.fused_qkv import fuse_qkv
from language_bert.methods.last_layer_subset import keep_needed
from language_bert.methods.sparse_head import keep_masked
from language_bert.methods.unpad import unpad_batch
from language_bert.model import PackedBert, build_bert, spread_positions

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's compiler
CPU = torch.device("cpu")
MAX_LENGTH, VOCAB_SIZE = 37, 61  # primes: no shape is a multiple of anything
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # float64; sums run in another order

FURTHER = {"chunked_head": "{chunk_tokens: 3}", "compile_layers": "{backend: aot_eager}"}  # not of size mini


SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 40}


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
    sizes = {"vocab_size": VOCAB_SIZE, "max_seq_length": MAX_LENGTH}
    return random_batch(np.random.default_rng(7), lengths, counts, **sizes)


def configuration(next_sentence, methods):
    settings = [f"model.next_sentence={str(next_sentence).lower()}"]
    off = {"unpad", "fused_qkv", "sparse_head", "last_layer_subset", "chunked_head"} - set(methods)
    settings += [f"methods.{name}=false" for name in off]
    settings += [f"methods.{name}={FURTHER[name]}" for name in FURTHER.keys() & set(methods)]
    return load_config("language_bert", "optimized", size="mini", settings=settings).config


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


def random_lengths(seed):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(4, MAX_LENGTH + 1, rng.integers(2, 13)).tolist())


LENGTHS = [(37, 4, 5, 12, 23), (37,), (9, 9, 9), (4, 37, 4), *map(random_lengths, range(3))]
METHODS = [
    ("unpad",),
    ("unpad", "fused_qkv"),
    ("unpad", "sparse_head"),
    ("unpad", "sparse_head", "last_layer_subset"),
    ("unpad", "fused_qkv", "sparse_head", "last_layer_subset"),
    ("unpad", "sparse_head", "chunked_head"),
    ("unpad", "fused_qkv", "sparse_head", "last_layer_subset", "chunked_head", "compile_layers"),
]


@pytest.mark.parametrize("methods", METHODS, ids="+".join)
@pytest.mark.parametrize("next_sentence", [False, True], ids=["mlm", "mlm+nsp"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_loss_and_every_gradient_equal_hugging_face_in_float64(lengths, next_sentence, methods):
    check_equal(make_model(next_sentence), lengths, configuration(next_sentence, methods))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("next_sentence", [False, True], ids=["mlm", "mlm+nsp"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_either_attention_of_hugging_face_is_equalled(lengths, next_sentence, attention):
    plain = make_model(next_sentence, attention)
    assert plain.config._attn_implementation == attention
    check_equal(plain, lengths, configuration(next_sentence, METHODS[-2]))


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler() != "", reason="no C++ compiler")
@pytest.mark.parametrize("next_sentence", [False, True], ids=["mlm", "mlm+nsp"])
def test_code_of_inductor_equals_hugging_face_in_float64(next_sentence, monkeypatch):
    monkeypatch.setitem(FURTHER, "compile_layers", "{backend: inductor}")
    check_equal(make_model(next_sentence), LENGTHS[-1], configuration(next_sentence, METHODS[-1]))


def check_equal(plain, lengths, config):
    """Compare loss and every gradient of Hugging Face's model with those of a configuration."""
    benchmark, batch = Benchmark(config, seed=0), make_batch(lengths)
    expected = benchmark.loss(plain(**batch.inputs), batch.targets)
    expected.backward()
    model, loss_of = make_model(config.model.next_sentence), benchmark.loss
    for method in build_methods(config):
        model, batch, loss_of = method.model(model), method.batch(batch, None), method.loss(loss_of)
    batch = to_device(batch, CPU)
    loss = loss_of(model(**batch.inputs), batch.targets)
    loss.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    expected_gradients, found = gradients(plain), gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, **EXACT, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_logits_and_gradients_equal_hugging_face_to_float64_rounding(lengths):
    plain, packed = make_model(True), PackedBert(make_model(True))
    fuse_qkv(packed)
    packed.masked_tokens_only = True
    batch = make_batch(lengths)
    unpadded = keep_needed(keep_masked(unpad_batch(batch)), next_sentence=True)
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
        torch.testing.assert_close(found_gradients[name], gradient, **EXACT)


def trained(methods, batch, precision, num_steps, next_sentence=False):
    """Return loss, parameters and gradients after steps of the loop's kind, under Hugging Face's names."""
    config = configuration(next_sentence, methods)
    model, loss_of = make_model(next_sentence), Benchmark(config, seed=0).loss
    model = model if precision is None else model.float()
    for method in build_methods(config):
        model, batch, loss_of = method.model(model), method.batch(batch, None), method.loss(loss_of)
    batch = to_device(batch, CPU)
    optimizer = build_optimizer(model, config.optimizer)
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            outputs = model(**batch.inputs)
        loss = loss_of(outputs, batch.targets)
        loss.backward()
        optimizer.step()
    found = {}
    for name, values in model.named_parameters():
        parts = values.chunk(3) if ".qkv." in name else [values]
        names = [name.replace("qkv", part) for part in ("query", "key", "value")[: len(parts)]]
        found |= dict(zip(names, parts, strict=True))
    return loss, found, gradients(model)


@pytest.mark.parametrize("methods", METHODS[-3:], ids="+".join)
@pytest.mark.parametrize("next_sentence", [False, True], ids=["mlm", "mlm+nsp"])
@pytest.mark.parametrize("lengths", LENGTHS[-2:], ids=str)
def test_an_optimizer_step_equals_hugging_faces_in_float64(lengths, next_sentence, methods):
    _, expected, _ = trained((), make_batch(lengths), None, 1, next_sentence)
    _, found, _ = trained(methods, make_batch(lengths), None, 1, next_sentence)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, **EXACT)


@pytest.mark.parametrize("methods", METHODS[-3:], ids="+".join)
def test_losses_of_some_steps_in_bf16_stay_within_two_percent(methods):
    expected, *_ = trained((), make_batch((37, 5, 20, 8)), "bf16", 5)
    found, *_ = trained(methods, make_batch((37, 5, 20, 8)), "bf16", 5)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0)


@pytest.mark.parametrize("next_sentence", [False, True], ids=["mlm", "mlm+nsp"])
@pytest.mark.parametrize("lengths", LENGTHS[-3:], ids=str)
def test_bf16_is_as_near_to_float64_as_that_of_hugging_face(lengths, next_sentence):
    """Within 5 % of all gradients together, and 1.5 times as far as the plain model, after a step too."""

    def in_bf16(methods):
        return trained(methods, make_batch(lengths), "bf16", 1, next_sentence)

    exact = trained((), make_batch(lengths), None, 1, next_sentence)

    def distances(found):
        """Return how far parameters and gradients are from float64, as a share of all of these together."""
        shares = []
        for one, other in zip(found[1:], exact[1:], strict=True):
            near, true = (
                torch.cat([each[name].detach().double().flatten() for name in other]) for each in (one, other)
            )
            shares.append(float((near - true).norm() / true.norm()))
        return shares

    plain = distances(in_bf16(()))
    for methods in METHODS[-3:]:
        stepped, differentiated = distances(in_bf16(methods))
        assert differentiated < 0.05 and differentiated < 1.5 * plain[1]
        assert stepped < 1.5 * plain[0]


def test_a_gpu_kernel_gets_the_offsets_as_they_are(monkeypatch):
    """The dispatch, with a kernel of plain torch in the place of the fused one."""
    seen = []

    def kernel(query, key, value, offsets, key_offsets, longest, key_longest):
        seen.append((offsets.dtype, longest, key_longest))
        lengths = (offsets.diff().tolist(), *[key_offsets.diff().tolist()] * 2)
        parts = zip(
            *(x.split(each) for x, each in zip((query, key, value), lengths, strict=True)), strict=True
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attend(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts])

    monkeypatch.setattr(attention, "gpu_kernel", lambda: kernel)
    torch.manual_seed(0)
    query, key, value = (torch.randn(45, 3, 5).bfloat16() for _ in "qkv")
    plan = plan_attention(torch.tensor((5, 1, 0, 31, 8)), 37)
    expected = varlen_attention(query, key, value, plan)
    monkeypatch.setattr(attention, "has_kernel", lambda device: True)
    found = varlen_attention(query, key, value, plan)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
    needed = torch.tensor([0, 3, 5, 7, 44])
    some = varlen_attention(query[needed], key, value, plan.select(needed))
    torch.testing.assert_close(some, found[needed], rtol=0.05, atol=0.02)
    assert seen == [(torch.int32, 37, 37)] * 2
    with pytest.raises(UserError, match="take bf16 or fp16"):
        varlen_attention(query.float(), key.float(), value.float(), plan)


def test_torchs_own_kernel_has_the_arguments_that_it_is_called_with():
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)[:7]
    assert names == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


@pytest.mark.parametrize("round_to", [1, 2, 36, 37, 38, 64, 200])
def test_padding_tokens_lie_in_sequences_that_are_not_too_long(round_to):
    numbers = set()
    for lengths in LENGTHS:
        plan = unpad_batch(make_batch(lengths), round_to=round_to).inputs["sequences"]
        found = plan.cu_seqlens.diff().tolist()
        assert tuple(found[: len(lengths)]) == lengths and max(found) <= MAX_LENGTH
        assert sum(found) % round_to == 0
        numbers.add(len(found) - len(lengths))
    assert len(numbers) == 1  # as many in every batch


def test_eager_attention_is_the_same_model():
    one, other = (
        Benchmark(load_config("language_bert", name, size="mini", settings=[]).config, seed=0)
        for name in ("baseline", "eager")
    )
    batch = next(one.synthetic_batches())
    outputs = []
    for each in (one, other):
        torch.manual_seed(1)
        model = each.build_model().eval()
        with torch.no_grad():
            outputs.append(model(**batch.inputs)[0][batch.inputs["attention_mask"].bool()])
    assert other.build_model().config._attn_implementation == "eager"
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("round_to", [1, 64])
def test_the_evaluation_counts_the_same_tokens_right(round_to):
    config = configuration(False, METHODS[-1])
    benchmark = Benchmark(config, seed=0)
    plain, batch = make_model(False), make_batch((37, 5, 20, 8))
    labels = batch.targets["labels"]
    predicted = plain(**batch.inputs)[0].argmax(dim=-1)
    is_right = (labels >= 0) & (torch.arange(labels.numel()).view_as(labels) % 3 > 0)
    batch.targets["labels"] = labels.where(~is_right, predicted)
    expected = benchmark.count_correct(plain(**batch.inputs), batch.targets)
    assert 0 < expected[0] < expected[1]
    model = make_model(False)
    for method in build_methods(config):
        if method.name == "unpad":
            method.settings = method.Config(round_to=round_to)
        model, batch = method.model(model), method.batch(batch, None)
    batch = to_device(batch, CPU)
    outputs = model.eval()(**batch.inputs)
    assert benchmark.count_correct(outputs, batch.targets) == expected
    answers = outputs[0].argmax(dim=-1)[batch.targets["labels"] >= 0]
    assert torch.equal(answers, predicted[labels >= 0])


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 2), (5, 1, 31, 8), (7,) * 11])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 20])
def test_attention_within_sequences_equals_scaled_dot_product_attention_on_each(lengths, num_groups):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), 3, 5, dtype=torch.float64, requires_grad=True) for _ in "qkv"
    )
    sequences = plan_attention(torch.tensor((*lengths, 0)), 37, num_groups=num_groups)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernels run on GPUs only")
def test_the_fused_kernel_equals_scaled_dot_product_attention_on_each_sequence():
    torch.manual_seed(0)
    lengths = (5, 1, 300, 512, 64)
    query, key, value = (
        torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    )
    plan = plan_attention(torch.tensor((*lengths, 0)), 512).to(torch.device("cuda"))
    found = varlen_attention(query, key, value, plan)
    parts = zip(*(x.float().split(lengths) for x in (query, key, value)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = torch.cat([attend(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts])
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    weight = torch.randn_like(expected)
    one, other = (
        torch.autograd.grad(output, (query, key, value), weight.to(output.dtype))
        for output in (found, expected)
    )
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.05)


def test_the_chunked_head_multiplies_in_16_bits_also_where_layer_norm_gives_32():
    config = configuration(False, METHODS[-1])
    model, batch = make_model(False).float(), make_batch((37, 5, 20, 8))
    for method in build_methods(config):
        model, batch = method.model(model), method.batch(batch, None)
    batch = to_device(batch, CPU)
    norm = model.cls.predictions.transform.LayerNorm
    norm.register_forward_hook(lambda *called: called[2].float())  # as autocast does on a GPU
    with torch.autocast("cpu", torch.bfloat16):
        assert model.train()(**batch.inputs).prediction_logits.dtype == torch.bfloat16
