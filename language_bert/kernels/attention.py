"""Attention over packed sequences on Hopper: one Triton kernel forward, and two backward.

FlashAttention 2 was written for the A100's matrix instructions; on an H200 it reached a fifth of the rate of
a large matrix product. Triton compiles these kernels to Hopper's own instructions. A program keeps a block of
rows in registers and reads its sequence step by step, so scores never lie in memory. The backward pass has
one kernel for queries and one for keys with their values. Programs add nothing to each other's results, which
therefore do not depend on their order.
"""

from typing import Any

import torch
from torch import Tensor

HEAD_SIZES = (16, 32, 64, 128)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_queries: Tensor, cu_keys: Tensor, max_q: int, max_k: int
) -> Tensor:
    """Return softmax(query key^T / sqrt(head_size)) value, every sequence seeing only itself.

    Queries and the result are (num_queries, num_heads, head_size), keys and values (num_keys, num_heads,
    head_size), with one of HEAD_SIZES. Sequence i has the rows cu_queries[i] to cu_queries[i + 1], int32, and
    at most `max_q` of them, likewise for keys. All are bf16 or fp16: a GPU would multiply float32 as TF32.
    On a GPU, or with TRITON_INTERPRET=1.
    """
    attended: Tensor = torch.ops.ttt.attention(query, key, value, cu_queries, cu_keys, max_q, max_k)[0]
    return attended


@torch.library.custom_op("ttt::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, cu_queries: Tensor, cu_keys: Tensor, max_q: int, max_k: int
) -> tuple[Tensor, Tensor]:
    """Compute `packed_attention`, and log2 of the sums of its softmax (num_heads, num_queries)."""
    from language_bert.kernels.attention_triton import attention_triton

    return attention_triton(query, key, value, cu_queries, cu_keys, max_q)


@torch.library.custom_op("ttt::attention_backward", mutates_args=())
def attention_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `attention` by query, key and value: their gradients, each contiguous."""
    from language_bert.kernels.attention_triton import attention_backward_triton

    gradients = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    saved = (query, key, value, attended, log_sums)
    attention_backward_triton(gradient, *saved, cu_queries, cu_keys, max_q, max_k, gradients)
    return gradients


@attention.register_fake
def allocate_attended(
    query: Tensor, key: Tensor, value: Tensor, cu_queries: Tensor, cu_keys: Tensor, max_q: int, max_k: int
) -> tuple[Tensor, Tensor]:
    log_sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return query.new_empty(query.shape), log_sums


@attention_backward.register_fake
def allocate_gradients(
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
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_queries, cu_keys, ctx.max_q, ctx.max_k = inputs
    ctx.save_for_backward(query, key, value, *output, cu_queries, cu_keys)
    ctx.set_materialize_grads(False)


def differentiate(ctx: Any, gradient: Tensor | None, of_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients: tuple[Tensor | None, ...] = (None, None, None)
    if gradient is not None:
        gradients = attention_backward(gradient, *ctx.saved_tensors, ctx.max_q, ctx.max_k)
    return *gradients, None, None, None, None


attention.register_autograd(differentiate, setup_context=keep)


def packed_self_attention(qkv: Tensor, cu_seqlens: Tensor, max_length: int) -> Tensor:
    """Return `packed_attention` of the queries, keys and values of the same tokens, (num_tokens, 3, N, H).

    Their gradients then lie in memory as they do, ready for one matrix product: to join three tensors takes
    longer than the larger product saves.
    """
    attended: Tensor = torch.ops.ttt.self_attention(qkv, cu_seqlens, max_length)[0]
    return attended


@torch.library.custom_op("ttt::self_attention", mutates_args=())
def self_attention(qkv: Tensor, cu_seqlens: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    from language_bert.kernels.attention_triton import attention_triton

    return attention_triton(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_length)


@torch.library.custom_op("ttt::self_attention_backward", mutates_args=())
def self_attention_backward(
    gradient: Tensor, qkv: Tensor, attended: Tensor, log_sums: Tensor, cu_seqlens: Tensor, max_length: int
) -> Tensor:
    from language_bert.kernels.attention_triton import attention_backward_triton

    result, offsets, longest = qkv.new_empty(qkv.shape), (cu_seqlens, cu_seqlens), (max_length, max_length)
    saved = (*qkv.unbind(1), attended, log_sums)
    attention_backward_triton(gradient, *saved, *offsets, *longest, result.unbind(1))
    return result


@self_attention.register_fake
def allocate_self_attended(qkv: Tensor, cu_seqlens: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    query = qkv[:, 0]
    return allocate_attended(query, query, query, cu_seqlens, cu_seqlens, max_length, max_length)


@self_attention_backward.register_fake
def allocate_gradient(
    gradient: Tensor, qkv: Tensor, attended: Tensor, log_sums: Tensor, cu_seqlens: Tensor, max_length: int
) -> Tensor:
    return qkv.new_empty(qkv.shape)


def keep_qkv(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, cu_seqlens, ctx.max_length = inputs
    ctx.save_for_backward(qkv, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def differentiate_qkv(
    ctx: Any, gradient: Tensor | None, of_log_sums: Tensor | None
) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None
    return self_attention_backward(gradient, *ctx.saved_tensors, ctx.max_length), None, None


self_attention.register_autograd(differentiate_qkv, setup_context=keep_qkv)
