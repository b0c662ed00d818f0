"""What is compiled, counted."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import varlen

from language_bert import attention
from language_bert.data.batches import padded_batch, random_record
from language_bert.methods.compile_layers import compile_layers
from language_bert.methods.last_layer_subset import keep_needed
from language_bert.methods.sparse_head import keep_masked
from language_bert.methods.unpad import unpad_batch
from language_bert.model import PackedBert
from tests.language_bert.test_parity import MAX_LENGTH, VOCAB_SIZE, make_model

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
        lengths = rng.integers(4, MAX_LENGTH + 1, 8).tolist()
        records = [
            random_record(rng, length=length, vocab_size=VOCAB_SIZE, num_masked=length // 4)
            for length in lengths
        ]
        batch = unpad_batch(padded_batch(records, MAX_LENGTH), round_to=64)
        batch = keep_needed(keep_masked(batch, round_to=16), next_sentence=False)
        shapes.add((len(batch.inputs["input_ids"]), len(batch.targets["labels"])))
        model(**batch.inputs)
    tokens, masked = ({shape[place] for shape in shapes} for place in (0, 1))
    assert len(tokens) > 1 and len(shapes) > len(tokens)
    layers, embeddings, head = len(tokens) + len(shapes), len(tokens), len(masked)
    assert counter.frame_count == layers + embeddings + head
