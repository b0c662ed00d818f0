"""Attention within sequences: in groups on a CPU, by the fused kernels of GPUs, here one of plain torch."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from language_bert import attention
from language_bert.attention import plan_attention, varlen_attention
from language_bert.methods.alibi import alibi_slopes
from tests.language_bert.test_parity import (
    EXACT,
    MAX_LENGTH,
    METHODS,
    apply_methods,
    configuration,
    gradients,
    make_batch,
    make_model,
)


def attend_within_bounds(query, key, value, cu_q, cu_k, max_q, max_k):
    """Stand in for the fused kernel: rows beyond its grid are what the memory held."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    rows = torch.full_like(query, float("nan"))
    spans = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    for (first, last), (first_key, last_key) in spans:
        assert last_key - first_key <= max_k
        last = min(last, first + max_q)
        parts = query[first:last], key[first_key:last_key], value[first_key:last_key]
        attended = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts))
        rows = rows.index_copy(0, torch.arange(first, last), attended.transpose(0, 1))
    return rows


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function after which attention takes the path of GPUs, with this kernel."""

    def replace_kernel(kernel):
        monkeypatch.setattr(attention, "has_kernel", lambda device: True)
        monkeypatch.setattr(attention, "gpu_kernel", lambda: kernel)

    return replace_kernel


def random_heads(num_tokens, dtype):
    torch.manual_seed(0)
    return [torch.randn(num_tokens, 3, 5, dtype=dtype, requires_grad=True) for _ in "qkv"]


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 2), (5, 1, 31, 8), (7,) * 11])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 20])
def test_attention_equals_scaled_dot_product_attention_on_each_sequence(lengths, num_groups, monkeypatch):
    monkeypatch.setattr(attention, "NUM_GROUPS", num_groups)
    heads, plan = random_heads(sum(lengths), torch.float64), plan_attention(torch.tensor((*lengths, 0)), 37)
    attended = varlen_attention(*heads, plan)
    expected = attend_within_bounds(*heads, plan.cu_queries, plan.cu_seqlens, 37, 37)
    torch.testing.assert_close(attended, expected, **EXACT)
    weight = torch.randn_like(attended)
    one, other = (torch.autograd.grad(rows, heads, weight) for rows in (attended, expected))
    torch.testing.assert_close(one, other, **EXACT)


def test_a_gpu_kernel_gets_the_offsets_as_they_are(on_gpu):
    heads, plan = random_heads(45, torch.bfloat16), plan_attention(torch.tensor((5, 1, 0, 31, 8)), 37)
    expected = varlen_attention(*heads, plan)
    on_gpu(attend_within_bounds)
    attended = varlen_attention(*heads, plan)
    torch.testing.assert_close(attended, expected, rtol=0.05, atol=0.02)
    needed = torch.tensor([0, 3, 5, 7, 44])
    some = varlen_attention(heads[0][needed], *heads[1:], plan.select(needed))
    torch.testing.assert_close(some, attended[needed], rtol=0.05, atol=0.02)
    with pytest.raises(UserError, match="take bf16 or fp16"):
        varlen_attention(*(x.float() for x in heads), plan)


def test_flash_attention_gets_the_slopes(on_gpu):
    seen = []

    def kernel(query, *offsets, alibi_slopes):
        seen.append(alibi_slopes)
        return query

    on_gpu(kernel)
    heads, slopes = random_heads(5, torch.bfloat16), alibi_slopes(2).bfloat16()
    varlen_attention(*heads, plan_attention(torch.tensor([5]), 8), slopes)
    assert seen[0].dtype == torch.float32 and seen[0].tolist() == [2**-4, 2**-8]


def test_torchs_own_kernel_has_the_arguments_that_it_is_called_with():
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)[:7]
    assert names == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


def test_every_query_is_computed_where_padding_gives_a_sequence_more_than_its_longest(on_gpu):
    lengths = (MAX_LENGTH,) * 6 + (12,)  # 38 masked tokens, two of them in the last sequence
    round_to = {"unpad": 2, "sparse_head": 37}  # 36 masked tokens are added, all to the last sequence

    def compute_gradients():
        model, config = make_model(False).bfloat16(), configuration(False, METHODS[4])
        model, batch, loss_of = apply_methods(config, model, make_batch(lengths), **round_to)
        assert len(batch.inputs["input_ids"]) == sum(lengths), "no padding takes the added tokens"
        assert batch.inputs["needed_sequences"].cu_queries.diff().max() > MAX_LENGTH
        loss_of(model.train()(**batch.inputs), batch.targets).backward()
        return torch.cat([gradient.float().flatten() for _, gradient in sorted(gradients(model).items())])

    expected = compute_gradients()
    on_gpu(attend_within_bounds)
    computed = compute_gradients()
    assert (computed - expected).norm() / expected.norm() < 0.05  # not a number where a row is unwritten
