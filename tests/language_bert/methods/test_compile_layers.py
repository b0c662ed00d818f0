"""What is compiled, counted."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import varlen

from common.training import distributed
from common.training.step import to_device
from language_bert import attention
from language_bert.data.batches import random_batch
from language_bert.methods.compile_layers import compile_layers
from language_bert.methods.last_layer_subset import keep_needed
from language_bert.methods.sparse_head import keep_masked
from language_bert.methods.unpad import unpad_batch
from language_bert.model import PackedBert
from tests.language_bert.test_parity import CPU, MAX_LENGTH, VOCAB_SIZE, make_batch, make_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's compiler


def test_layers_share_a_form_for_each_number_of_tokens_and_the_last_has_one_for_each_pair(monkeypatch):
    def kernel(query, key, value, *offsets):  # in the place of the fused one, which has no form of its own
        return query + (key + value).mean(dim=0)

    monkeypatch.setattr(attention, "has_kernel", lambda device: True)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    torch._dynamo.reset()
    model, counter = PackedBert(make_model(False).bfloat16()), CompileCounter()
    model.masked_tokens_only = model.transform_only = True
    compile_layers(model, backend=counter)
    rng, shapes = np.random.default_rng(0), set()
    for _ in range(12):
        lengths = rng.integers(4, MAX_LENGTH + 1, 8)
        batch = random_batch(rng, lengths, lengths // 4, VOCAB_SIZE, MAX_LENGTH)
        batch = keep_masked(unpad_batch(batch, round_to=64), round_to=16)
        shapes.add((len(batch.inputs["input_ids"]), len(batch.targets["labels"])))
        model(**keep_needed(batch, next_sentence=False).inputs)
    tokens, masked = ({shape[place] for shape in shapes} for place in (0, 1))
    assert len(tokens) > 1 and len(shapes) > len(tokens)
    layers, embeddings, head = len(tokens) + len(shapes), len(tokens), len(masked)
    assert counter.frame_count == layers + embeddings + head


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
