"""The graphs that are compiled, by their number."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import varlen

from common.methods.ema import copy_model
from common.methods.swa import start_average
from common.training import distributed
from common.training.step import to_device
from language_bert import attention
from language_bert.benchmark import NUM_EVALUATION_FORMS
from language_bert.data.batches import random_batch
from language_bert.methods.compile_layers import compile_layers
from language_bert.methods.last_layer_subset import keep_needed
from language_bert.methods.sparse_head import keep_masked
from language_bert.methods.unpad import unpad_batch
from language_bert.model import PackedBert
from tests.language_bert.test_parity import CPU, MAX_LENGTH, VOCAB_SIZE, make_batch, make_model


@pytest.fixture
def fused(monkeypatch):
    """A kernel in the place of the fused one, which has no form of its own; nothing is compiled yet."""

    def kernel(query, key, value, *offsets):
        return query + (key + value).mean(dim=0)

    monkeypatch.setattr(attention, "has_kernel", lambda device: True)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    torch._dynamo.reset()


def make_packed(rng, num_samples, round_to):
    """Return a batch of random lengths, packed for the methods of `optimized`."""
    lengths = rng.integers(4, MAX_LENGTH + 1, num_samples)
    batch = random_batch(rng, lengths, lengths // 4, VOCAB_SIZE, MAX_LENGTH)
    batch = keep_masked(unpad_batch(batch, round_to=4 * round_to), round_to=round_to)
    return to_device(keep_needed(batch, next_sentence=False, max_repeats=round_to - 1), CPU)


def test_layers_share_a_form_for_each_number_of_tokens_and_the_last_has_one_for_each_pair(fused):
    model, counter = PackedBert(make_model(False).bfloat16()), CompileCounter()
    model.masked_tokens_only = model.transform_only = True
    compile_layers(model, backend=counter)
    rng, shapes = np.random.default_rng(0), set()
    for _ in range(12):
        batch = make_packed(rng, 8, 16)
        shapes.add((len(batch.inputs["input_ids"]), len(batch.targets["labels"])))
        model(**batch.inputs)
    tokens, masked = ({shape[place] for shape in shapes} for place in (0, 1))
    assert len(tokens) > 1 and len(shapes) > len(tokens)
    layers, embeddings, head = len(tokens) + len(shapes), len(tokens), len(masked)
    assert counter.frame_count == layers + embeddings + head


@torch.no_grad()
def test_one_form_of_each_piece_evaluates_every_shape_and_averages_too(fused):
    model, counter = PackedBert(make_model(False).bfloat16()), CompileCounter()
    model.masked_tokens_only = model.transform_only = True
    compile_layers(model, backend=counter)
    rng, shapes, mean = np.random.default_rng(0), set(), start_average(model)
    for number in range(12):
        batch = make_packed(rng, int(rng.integers(5, 12)), 16 * int(rng.integers(1, 4)))
        shapes.add(tuple(len(batch.inputs[name]) for name in ("input_ids", "needed", "first_tokens")))
        evaluated = (model, copy_model(model), mean.module)[number % 3]
        evaluated.eval()(**batch.inputs)
    assert len(shapes) > 6
    assert counter.frame_count == 4  # embeddings, layer, last layer, head
    assert NUM_EVALUATION_FORMS == 2  # of the layer


@torch.no_grad()
def test_a_compiled_evaluation_is_the_eager_one_of_the_same_weights():
    torch._dynamo.reset()
    model, plain = (PackedBert(make_model(False)) for _ in range(2))
    model.masked_tokens_only = plain.masked_tokens_only = model.transform_only = True
    compile_layers(model, backend="eager")
    average, rng = copy_model(model), np.random.default_rng(0)
    for weight in model.parameters():
        weight.add_(1)  # pieces of the average must not read these
    inputs = make_packed(rng, 4, 16).inputs
    model.eval()(**inputs)  # compiles them
    logits = average.eval()(**inputs).prediction_logits
    torch.testing.assert_close(logits, plain.eval()(**inputs).prediction_logits)


def test_evaluation_alone_can_stay_eager():
    model = PackedBert(make_model(False))
    compile_layers(model, backend="aot_eager", evaluation=False)
    assert model.compiled and not model.compiled_for_evaluation


@pytest.fixture
def group():
    """A group of this process alone; what compilers do for it is put back."""
    optimize_ddp = torch._dynamo.config.optimize_ddp
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.config.optimize_ddp = optimize_ddp


def test_pieces_stay_whole_where_ranks_exchange_gradients(group):
    """A layer of 3 MB: DDP's first bucket ends after 1 MB, where torch would cut a graph."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 2}
    batch = to_device(keep_masked(unpad_batch(make_batch((8, 12, 16, 20)), round_to=64), round_to=16), CPU)
    for is_replicated in (False, True):
        torch._dynamo.reset()
        model, counter = PackedBert(make_model(False, **sizes).float()), CompileCounter()
        model.masked_tokens_only = True
        compile_layers(model, backend=counter)
        called = model
        if is_replicated:
            called = distributed.wrap_ddp(model, compression="none", is_static=False)
        called(**batch.inputs).prediction_logits.sum().backward()
        assert counter.frame_count == 3  # embeddings, layer, head
