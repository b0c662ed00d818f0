"""The Triton kernels of attention.py, in a module of their own: they are imported only where they run."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Blocks(NamedTuple):
    """The rows of a program's own block, the rows that it reads in each step, and its warps and stages.

    The values were the fastest of eight to ten each on an H200, for sequences of Wikipedia's lengths.
    """

    block_rows: int
    step_rows: int
    num_warps: int
    num_stages: int


FORWARD = Blocks(block_rows=64, step_rows=64, num_warps=4, num_stages=3)
BACKWARD_QUERIES = Blocks(block_rows=64, step_rows=32, num_warps=4, num_stages=3)
BACKWARD_KEYS = Blocks(block_rows=64, step_rows=32, num_warps=4, num_stages=3)
LOG2_E = math.log2(math.e)


def attention_triton(
    query: Tensor, key: Tensor, value: Tensor, cu_queries: Tensor, cu_keys: Tensor, max_q: int
) -> tuple[Tensor, Tensor]:
    """Compute `attention`."""
    num_queries, num_heads, head_size = query.shape
    attended = query.new_empty(query.shape)
    log_sums = query.new_empty((num_heads, num_queries), dtype=torch.float32)
    query, key, value = (make_rows_contiguous(x) for x in (query, key, value))
    grid = (triton.cdiv(max_q, FORWARD.block_rows), num_heads, len(cu_keys) - 1)
    with torch.cuda.device_of(query):
        attention_kernel[grid](
            *(query, key, value, attended, log_sums, cu_queries, cu_keys),
            *(query.stride(0), key.stride(0), value.stride(0)),
            num_queries,
            LOG2_E / math.sqrt(head_size),
            NUM_HEADS=num_heads,
            HEAD_SIZE=head_size,
            **settings(FORWARD),
        )
    return attended, log_sums


def attention_backward_triton(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    log_sums: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_q: int,
    max_k: int,
    gradients: Sequence[Tensor],
) -> None:
    """Write the gradients of query, key and value; the first kernel writes `deltas` for the second.

    In memory the heads of a row of `gradients` are neighbours, and the rows of all three equally far apart.
    """
    num_queries, num_heads, head_size = query.shape
    gradient, query, key, value = (make_rows_contiguous(x) for x in (gradient, query, key, value))
    deltas = torch.empty_like(log_sums)
    strides = (*(x.stride(0) for x in (query, key, value, gradient, gradients[0])), num_queries)
    scales = (LOG2_E / math.sqrt(head_size), 1 / math.sqrt(head_size))
    sizes = {"NUM_HEADS": num_heads, "HEAD_SIZE": head_size}
    num_sequences = len(cu_keys) - 1
    with torch.cuda.device_of(query):
        attention_backward_queries_kernel[
            (triton.cdiv(max_q, BACKWARD_QUERIES.block_rows), num_heads, num_sequences)
        ](
            *(query, key, value, attended, gradient, log_sums, deltas, gradients[0], cu_queries, cu_keys),
            *(*strides, *scales),
            **sizes,
            **settings(BACKWARD_QUERIES),
        )
        attention_backward_keys_kernel[
            (triton.cdiv(max_k, BACKWARD_KEYS.block_rows), num_heads, num_sequences)
        ](
            *(query, key, value, gradient, log_sums, deltas, *gradients[1:], cu_queries, cu_keys),
            *(*strides, *scales),
            **sizes,
            **settings(BACKWARD_KEYS),
        )


def make_rows_contiguous(x: Tensor) -> Tensor:
    # (tokens, heads, size), with the heads of a token next to each other in memory
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def settings(blocks: Blocks) -> dict[str, int | bool]:
    return {
        "BLOCK_ROWS": blocks.block_rows,
        "STEP_ROWS": blocks.step_rows,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
        "enable_fp_fusion": True,  # multiply and add in one instruction: not Triton's default from 3.10 on
    }


@triton.jit
def locate_sequence(cu_seqlens):
    # The first row of this program's sequence, for offsets in memory, and the number of its rows.
    first = tl.load(cu_seqlens + tl.program_id(2))
    return first.to(tl.int64), tl.load(cu_seqlens + tl.program_id(2) + 1) - first


@triton.jit
def load_rows(x, rows, num_rows, stride, HEAD_SIZE: tl.constexpr, IS_LAST: tl.constexpr):
    # (rows, head size); in a last block, zeros past the end of the sequence.
    places = x + rows[:, None] * stride + tl.arange(0, HEAD_SIZE)[None, :]
    if IS_LAST:
        return tl.load(places, mask=(rows < num_rows)[:, None], other=0.0)
    return tl.load(places)


@triton.jit
def load_step(
    x, y, start, num_rows, x_stride, y_stride, block, STEP_ROWS: tl.constexpr, IS_LAST: tl.constexpr
):
    # The numbers of the rows of a step, and the rows of x and of y, as wide as those of the program's block.
    rows = start + tl.arange(0, STEP_ROWS)
    x_rows = load_rows(x, rows, num_rows, x_stride, block.shape[1], IS_LAST)
    return rows, x_rows, load_rows(y, rows, num_rows, y_stride, block.shape[1], IS_LAST)


@triton.jit
def store_rows(x, values, rows, num_rows, stride, HEAD_SIZE: tl.constexpr):
    places = x + rows[:, None] * stride + tl.arange(0, HEAD_SIZE)[None, :]
    tl.store(places, values.to(x.dtype.element_ty), mask=(rows < num_rows)[:, None])


@triton.jit
def attention_kernel(
    query,
    key,
    value,
    attended,
    log_sums,
    cu_queries,
    cu_keys,
    query_stride,
    key_stride,
    value_stride,
    num_queries,
    scale,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP_ROWS: tl.constexpr,
):
    """Compute a block of queries of one head. Sums are rescaled whenever a larger score appears."""
    head = tl.program_id(1)
    first, length = locate_sequence(cu_queries)
    if tl.program_id(0) * BLOCK_ROWS >= length:
        return
    first_key, num_keys = locate_sequence(cu_keys)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query += first * query_stride + head * HEAD_SIZE
    key += first_key * key_stride + head * HEAD_SIZE
    value += first_key * value_stride + head * HEAD_SIZE
    q = load_rows(query, rows, length, query_stride, HEAD_SIZE, True)
    state = (  # the weighted sums of values, the sums of weights, and the largest scores
        tl.zeros((BLOCK_ROWS, HEAD_SIZE), tl.float32),
        tl.zeros((BLOCK_ROWS,), tl.float32),
        tl.full((BLOCK_ROWS,), -float("inf"), tl.float32),
    )
    last = num_keys // STEP_ROWS * STEP_ROWS
    for start in range(0, last, STEP_ROWS):
        state = attend(
            state, q, key, value, start, num_keys, key_stride, value_stride, scale, STEP_ROWS, False
        )
    if last < num_keys:
        state = attend(state, q, key, value, last, num_keys, key_stride, value_stride, scale, STEP_ROWS, True)
    totals, sums, largest = state
    tl.store(log_sums + head * num_queries + first + rows, largest + tl.log2(sums), mask=rows < length)
    attended += (first * NUM_HEADS + head) * HEAD_SIZE
    store_rows(attended, totals / sums[:, None], rows, length, NUM_HEADS * HEAD_SIZE, HEAD_SIZE)


@triton.jit
def attend(
    state,
    q,
    key,
    value,
    start,
    num_keys,
    key_stride,
    value_stride,
    scale,
    STEP_ROWS: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    """Add one block of keys and values to the state."""
    totals, sums, largest = state
    rows, k, v = load_step(key, value, start, num_keys, key_stride, value_stride, q, STEP_ROWS, IS_LAST)
    scores = tl.dot(q, tl.trans(k)) * scale
    if IS_LAST:
        scores = tl.where((rows < num_keys)[None, :], scores, -float("inf"))
    larger = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - larger[:, None])
    shrink = tl.exp2(largest - larger)
    sums = sums * shrink + tl.sum(weights, axis=1)
    totals = tl.dot(weights.to(v.dtype), v, totals * shrink[:, None])
    return totals, sums, larger


@triton.jit
def attention_backward_queries_kernel(
    query,
    key,
    value,
    attended,
    gradient,
    log_sums,
    deltas,
    query_gradient,
    cu_queries,
    cu_keys,
    query_stride,
    key_stride,
    value_stride,
    gradient_stride,
    result_stride,
    num_queries,
    scale,
    factor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP_ROWS: tl.constexpr,
):
    """Compute the gradient of a block of queries, and of each output row the dot product with its gradient.

    These products are `deltas`. Keys past the end of the sequence have weight 0.
    """
    head = tl.program_id(1)
    first, length = locate_sequence(cu_queries)
    if tl.program_id(0) * BLOCK_ROWS >= length:
        return
    first_key, num_keys = locate_sequence(cu_keys)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query += first * query_stride + head * HEAD_SIZE
    gradient += first * gradient_stride + head * HEAD_SIZE
    key += first_key * key_stride + head * HEAD_SIZE
    value += first_key * value_stride + head * HEAD_SIZE
    offset = (first * NUM_HEADS + head) * HEAD_SIZE
    q = load_rows(query, rows, length, query_stride, HEAD_SIZE, True)
    g = load_rows(gradient, rows, length, gradient_stride, HEAD_SIZE, True)
    output = load_rows(attended + offset, rows, length, NUM_HEADS * HEAD_SIZE, HEAD_SIZE, True)
    delta = tl.sum(output.to(tl.float32) * g.to(tl.float32), axis=1)
    places = head * num_queries + first + rows
    tl.store(deltas + places, delta, mask=rows < length)
    log_sum = tl.load(log_sums + places, mask=rows < length, other=0.0)
    total = tl.zeros((BLOCK_ROWS, HEAD_SIZE), tl.float32)
    last = num_keys // STEP_ROWS * STEP_ROWS
    for start in range(0, last, STEP_ROWS):
        keys, k, v = load_step(key, value, start, num_keys, key_stride, value_stride, q, STEP_ROWS, False)
        total = add_query_gradient(total, q, g, k, v, log_sum, delta, scale, keys, num_keys, False)
    if last < num_keys:
        keys, k, v = load_step(key, value, last, num_keys, key_stride, value_stride, q, STEP_ROWS, True)
        total = add_query_gradient(total, q, g, k, v, log_sum, delta, scale, keys, num_keys, True)
    query_gradient += first * result_stride + head * HEAD_SIZE
    store_rows(query_gradient, total * factor, rows, length, result_stride, HEAD_SIZE)


@triton.jit
def add_query_gradient(total, q, g, k, v, log_sum, delta, scale, keys, num_keys, IS_LAST: tl.constexpr):
    weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - log_sum[:, None])
    if IS_LAST:  # past the end exp2 may overflow, and infinity times zero is no number
        weights = tl.where((keys < num_keys)[None, :], weights, 0.0)
    score_gradient = weights * (tl.dot(g, tl.trans(v)) - delta[:, None])
    return tl.dot(score_gradient.to(k.dtype), k, total)


@triton.jit
def attention_backward_keys_kernel(
    query,
    key,
    value,
    gradient,
    log_sums,
    deltas,
    key_gradient,
    value_gradient,
    cu_queries,
    cu_keys,
    query_stride,
    key_stride,
    value_stride,
    gradient_stride,
    result_stride,
    num_queries,
    scale,
    factor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP_ROWS: tl.constexpr,
):
    """Compute the gradients of a block of keys and values, from transposed scores.

    Queries past the end of the sequence are zeros, and so are their gradients and deltas: they add nothing.
    """
    head = tl.program_id(1)
    first_key, num_keys = locate_sequence(cu_keys)
    if tl.program_id(0) * BLOCK_ROWS >= num_keys:
        return
    first, length = locate_sequence(cu_queries)
    keys = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query += first * query_stride + head * HEAD_SIZE
    gradient += first * gradient_stride + head * HEAD_SIZE
    key += first_key * key_stride + head * HEAD_SIZE
    value += first_key * value_stride + head * HEAD_SIZE
    k = load_rows(key, keys, num_keys, key_stride, HEAD_SIZE, True)
    v = load_rows(value, keys, num_keys, value_stride, HEAD_SIZE, True)
    log_sums += head * num_queries + first
    deltas += head * num_queries + first
    key_sums = tl.zeros((BLOCK_ROWS, HEAD_SIZE), tl.float32)
    value_sums = tl.zeros((BLOCK_ROWS, HEAD_SIZE), tl.float32)
    last = length // STEP_ROWS * STEP_ROWS
    for start in range(0, last, STEP_ROWS):
        rows, q, g = load_step(
            query, gradient, start, length, query_stride, gradient_stride, k, STEP_ROWS, False
        )
        log_sum, delta = tl.load(log_sums + rows), tl.load(deltas + rows)
        key_sums, value_sums = add_key_gradients(key_sums, value_sums, q, g, k, v, log_sum, delta, scale)
    if last < length:
        rows, q, g = load_step(
            query, gradient, last, length, query_stride, gradient_stride, k, STEP_ROWS, True
        )
        log_sum = tl.load(log_sums + rows, mask=rows < length, other=0.0)
        delta = tl.load(deltas + rows, mask=rows < length, other=0.0)
        key_sums, value_sums = add_key_gradients(key_sums, value_sums, q, g, k, v, log_sum, delta, scale)
    offset = first_key * result_stride + head * HEAD_SIZE
    store_rows(key_gradient + offset, key_sums * factor, keys, num_keys, result_stride, HEAD_SIZE)
    store_rows(value_gradient + offset, value_sums, keys, num_keys, result_stride, HEAD_SIZE)


@triton.jit
def add_key_gradients(key_sums, value_sums, q, g, k, v, log_sum, delta, scale):
    weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - log_sum[None, :])
    score_gradient = weights * (tl.dot(v, tl.trans(g)) - delta[None, :])
    return tl.dot(score_gradient.to(q.dtype), q, key_sums), tl.dot(weights.to(g.dtype), g, value_sums)
