"""The fused kernels of GPUs compute `max_q` queries of a sequence and leave the rows of others unwritten."""

import itertools

import torch
import torch.nn.functional as F

from common.training.registry import build_methods
from common.training.step import to_device
from language_bert import attention
from language_bert.model import masked_lm_loss
from tests.language_bert.test_parity import (
    CPU,
    MAX_LENGTH,
    METHODS,
    configuration,
    make_batch,
    make_model,
)

LENGTHS = (MAX_LENGTH,) * 6 + (12,)  # 38 masked tokens, two of them in the last sequence
ROUND_TO = 37  # of masked tokens: 36 are added, all to the last sequence


def attend_within_bounds(query, key, value, cu_q, cu_k, max_q, max_k):
    """Stand in for the fused kernel: rows beyond its grid are what the memory held."""
    rows = torch.full_like(query, float("nan"))
    spans = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    for (first, last), (first_key, last_key) in spans:
        assert last_key - first_key <= max_k
        last = min(last, first + max_q)
        parts = query[first:last], key[first_key:last_key], value[first_key:last_key]
        attended = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts))
        rows = rows.index_copy(0, torch.arange(first, last), attended.transpose(0, 1))
    return rows


def compute_gradients():
    """Return the gradients of the optimized model, and the most queries that a sequence has."""
    model, batch = make_model(False).bfloat16(), make_batch(LENGTHS)
    for method in build_methods(configuration(False, METHODS[4])):
        if method.name in ("unpad", "sparse_head"):
            method.settings = method.Config(round_to=ROUND_TO if method.name == "sparse_head" else 2)
        model, batch = method.model(model), method.batch(batch, None)
    assert len(batch.inputs["input_ids"]) == sum(LENGTHS), "no padding takes the added tokens"
    most = int(batch.inputs["needed_sequences"].cu_queries.diff().max())
    batch = to_device(batch, CPU)
    masked_lm_loss(model.train()(**batch.inputs), batch.targets).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}, most


def test_every_query_is_computed_where_padding_gives_a_sequence_more_than_its_longest(monkeypatch):
    expected, most = compute_gradients()
    assert most > MAX_LENGTH
    monkeypatch.setattr(attention, "has_kernel", lambda device: True)
    monkeypatch.setattr(attention, "gpu_kernel", lambda: attend_within_bounds)
    computed, _ = compute_gradients()
    assert computed.keys() == expected.keys()
    one, other = (
        torch.cat([gradient.flatten().float() for gradient in gradients.values()])
        for gradients in (computed, expected)
    )
    assert (one - other).norm() / other.norm() < 0.05  # bfloat16; not a number where a row is unwritten
