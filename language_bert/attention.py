"""Attention over sequences of different lengths that lie one behind the other, without padding.

On a GPU one fused kernel takes the offsets as they are: that of the `flash-attn` package where it is
installed, else torch's own. Elsewhere groups of similar length are padded and computed in batched products.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from common.errors import UserError

NUM_GROUPS = 2  # fastest of 1 to 6 at batch 16 on 2 cores: more waste less padding and cost more calls
Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences of similar length, padded to the longest of them.

    `tokens` (num_sequences * longest,) is the token in each place, padding places hold the first token;
    `bias` (num_sequences, 1, 1, longest) is 0 for a token and -inf for padding.
    """

    tokens: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Where the sequences of a batch lie, computed once and reused by every layer.

    `cu_seqlens` (num_sequences + 1,) int32 are their offsets, none is longer than `max_length`; on a CPU
    `groups` hold them in order of length, and `places` (num_tokens,) says where each token stands in the
    groups laid one behind the other.
    """

    cu_seqlens: Tensor
    max_length: int
    groups: tuple[Group, ...]
    places: Tensor | None

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Sequences":
        """Return what a kernel on this device needs."""
        if device.type == "cpu":
            return self
        moved = self.cu_seqlens.to(device, non_blocking=non_blocking)
        return replace(self, cu_seqlens=moved, groups=(), places=None)


def plan_attention(lengths: Tensor, max_length: int, *, num_groups: int = NUM_GROUPS) -> Sequences:
    """Plan the attention of a batch from its lengths (num_sequences,) int64 on the host; some may be 0."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    found = Sequences(cu_seqlens=offsets.int(), max_length=max_length, groups=(), places=None)
    return found if torch.cuda.is_available() else group_by_length(found, num_groups)


def group_by_length(sequences: Sequences, num_groups: int) -> Sequences:
    """Return the plan with its groups."""
    offsets = sequences.cu_seqlens.long()
    lengths = offsets.diff()
    groups, kept, first_place = [], [], 0
    order = lengths.argsort(stable=True)[int((lengths == 0).sum()) :]
    for group in order.tensor_split(min(num_groups, len(order))):
        place = torch.arange(int(lengths[group].max()))
        is_token = place < lengths[group, None]
        tokens = (offsets[:-1][group, None] + place).where(is_token, 0).flatten()
        bias = torch.zeros(is_token.shape).masked_fill(~is_token, float("-inf"))[:, None, None]
        groups.append(Group(tokens=tokens, bias=bias))
        real = is_token.flatten().nonzero()[:, 0]
        kept.append(torch.stack([tokens[real], real + first_place]))
        first_place += len(tokens)
    token, place = torch.cat(kept, dim=1)
    places = torch.empty_like(place)
    places[token] = place
    return replace(sequences, groups=tuple(groups), places=places)


@cache
def gpu_kernel() -> Kernel:
    """Return the fused kernel: (query, key, value, cu_q, cu_k, max_q, max_k) -> attended, all (T, N, H)."""
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return flash_attn_varlen_func  # type: ignore[no-any-return]
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn  # type: ignore[return-value]


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Return softmax(query key^T / sqrt(head_size)) value, every sequence seeing only itself.

    All tensors are (num_tokens, num_heads, head_size). Raises UserError for float32 on a GPU, which no fused
    kernel takes.
    """
    if sequences.places is not None:
        return grouped_attention(query, key, value, sequences)
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise UserError("the attention kernels of GPUs take bf16 or fp16", where="precision")
    offsets, longest = sequences.cu_seqlens, sequences.max_length
    return gpu_kernel()(query, key, value, offsets, offsets, longest, longest)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Return the same, group by group in batched matrix products.

    On a CPU these take a fifth of the time of scaled_dot_product_attention on the padded batch (it has no
    bf16 kernel for short rows).
    """
    num_heads, head_size = query.shape[1:]
    attended = []
    for group in sequences.groups:
        num, _, _, longest = group.bias.shape
        shape = (num, longest, num_heads, head_size)
        q, k, v = (
            x.index_select(0, group.tokens).view(shape).transpose(1, 2).reshape(-1, longest, head_size)
            for x in (query, key, value)
        )
        bias = group.bias.to(q.dtype).expand(num, num_heads, longest, longest).reshape(-1, longest, longest)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=head_size**-0.5)
        output = torch.softmax(scores, dim=-1) @ v
        attended.append(output.view(num, num_heads, longest, head_size).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).index_select(0, sequences.places)
