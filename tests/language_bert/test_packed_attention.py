"""The Triton kernels of attention, interpreted, against scaled_dot_product_attention of each sequence."""

import pytest

from tests.command import run_interpreted

KERNELS_AGAINST_TORCH = """
import itertools
import torch
import torch.nn.functional as F
from language_bert.kernels import attention_triton
from language_bert.kernels.attention import packed_attention, packed_self_attention

torch.manual_seed(0)
KEYS, QUERIES = (70, 1, 130, 0, 5, 64, 40), (70, 1, 5, 0, 8, 64, 0)

def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

def attend_each(query, key, value):
    parts = zip(query.split(QUERIES), key.split(KEYS), value.split(KEYS))
    return torch.cat([
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part)).transpose(0, 1)
        for part in parts if len(part[0])
    ])

def error(one, other):
    return ((one - other).norm() / other.norm()).item()

for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
    fused = torch.randn(sum(KEYS), 3, 2, 32, dtype=dtype)  # keys and values are not contiguous
    query = torch.randn(2, sum(QUERIES), 32, dtype=dtype).transpose(0, 1)  # nor are the heads of a query
    inputs = [x.detach().requires_grad_() for x in (query, fused[:, 1], fused[:, 2])]
    attended = packed_attention(*inputs, offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS))
    weight = torch.randn_like(attended)
    gradients = torch.autograd.grad(attended, inputs, weight)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = attend_each(*exact)
    references = (expected, *torch.autograd.grad(expected, exact, weight.double()))
    for one, other in zip((attended, *gradients), references, strict=True):
        assert one.dtype == dtype and one.is_contiguous() and one.isfinite().all()
        assert error(one.double(), other) < tolerance, (dtype, error(one.double(), other))
assert (gradients[1][-40:] == 0).all(), "the keys of a sequence without queries have no gradient"

# All scores are low: a key past the end, whose score is 0, must not count. 70 rows are a step and a part.
inputs = [torch.full((70, 2, 32), value).half().requires_grad_() for value in (3.0, -3.0, 1.0)]
attended = packed_attention(*inputs, offsets((70,)), offsets((70,)), 70, 70)
torch.testing.assert_close(attended, torch.ones_like(attended))
weight = torch.linspace(-1, 1, 70 * 64).view(70, 2, 32).half()
assert all(one.isfinite().all() for one in torch.autograd.grad(attended, inputs, weight))

inputs = [x.detach().requires_grad_() for x in (query, fused[:, 1], fused[:, 2])]
arguments = (*inputs, offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS))
torch.library.opcheck(torch.ops.ttt.attention.default, arguments, atol=1e-2, rtol=1e-2)

qkv, whole = fused.detach().requires_grad_(), (offsets(KEYS), max(KEYS))
results = packed_self_attention(qkv, *whole), packed_attention(*qkv.unbind(1), whole[0], *whole, whole[1])
weight = torch.randn_like(results[0])
assert torch.equal(*results)
assert torch.equal(*(torch.autograd.grad(result, qkv, weight)[0] for result in results))
torch.library.opcheck(torch.ops.ttt.self_attention.default, (qkv, *whole), atol=1e-2, rtol=1e-2)
"""


def test_kernels_equal_attention_of_each_sequence():
    if pytest.importorskip("triton").__version__.startswith("3.6."):
        pytest.skip("the interpreter of Triton 3.6 cannot count a loop with NumPy 2.4")
    run_interpreted(KERNELS_AGAINST_TORCH)
