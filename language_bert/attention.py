"""Attention over packed sequences: of different lengths, concatenated without padding.

Tokens of all sequences are the rows of one tensor (num_tokens, num_heads, head_size); sequence i has the rows
cu_seqlens[i] to cu_seqlens[i + 1]. Only attention needs these offsets. On a GPU one fused kernel takes them:
the one of the `flash-attn` package where it is installed, else torch's own. Queries have offsets of their
own, because the last layer needs few queries and all keys. Elsewhere sequences are sorted by length and split
into groups; each group is padded to its longest sequence and computed in batched matrix products, and the
result is put back in order. The layout of the groups depends on the lengths alone, so it is computed once a
batch and shared by all layers.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from common.training.benchmark import Backend

NUM_GROUPS = 2  # fastest of 1 to 6 at batch 16 on 2 cores: more groups have less padding and more calls
HAS_FLASH_ATTENTION = importlib.util.find_spec("flash_attn") is not None  # compiled code cannot look it up
ROUND_TO = 16  # few distinct shapes, so that libraries reuse their kernels
Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences of similar length, padded to the longest of them.

    `tokens` and `queries` (num_sequences, longest) are the rows of keys and queries at each place, row 0 at
    padding; `bias` (num_sequences, longest) is 0 for a key and -inf for padding.
    """

    queries: Tensor
    tokens: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The offsets of the sequences of a batch, and on a CPU their groups.

    `cu_seqlens` and `cu_queries` (num_sequences + 1,) int32 are the offsets of keys and queries. No sequence
    has more than `max_length` keys or more than `max_queries` queries: a GPU's kernel leaves the rows of
    further ones unwritten. Compiled code holds both numbers as constants. `groups` are in order of length;
    `places` (num_queries,) are the indices of the queries in the concatenated groups.
    """

    cu_seqlens: Tensor
    cu_queries: Tensor
    max_length: int
    max_queries: int
    groups: tuple[Group, ...] = ()
    places: Tensor | None = None
    keys: list[Any] = field(default_factory=list)  # layout of the keys, shared with selections of this plan

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Sequences":
        if device.type == "cpu":
            return self.grouped()
        keys, queries = (x.to(device, non_blocking=non_blocking) for x in (self.cu_seqlens, self.cu_queries))
        return replace(self, cu_seqlens=keys, cu_queries=queries, groups=(), places=None)

    def select(self, needed: Tensor, *, max_repeats: int = 0) -> "Sequences":
        """Return the plan in which only these tokens (num_queries,), in ascending order, are queries.

        At most `max_repeats` of them are there for rounding: they can repeat a token.
        """
        offsets = torch.searchsorted(needed, self.cu_seqlens.long())
        most = self.max_length + max_repeats
        return replace(self, cu_queries=offsets.int(), max_queries=most, groups=(), places=None)

    def grouped(self) -> "Sequences":
        if self.places is not None:
            return self
        if not self.keys:
            offsets = self.cu_seqlens.long()
            lengths = offsets.diff()
            order = lengths.argsort(stable=True)[int((lengths == 0).sum()) :]
            members = order.tensor_split(min(NUM_GROUPS, len(order)))
            self.keys.extend([members, *lay_out(offsets, members)])
        members, keys, places = self.keys
        queries = keys
        if self.cu_queries is not self.cu_seqlens:
            queries, places = lay_out(self.cu_queries.long(), members)
        groups = tuple(
            Group(
                queries=rows,
                tokens=tokens,
                bias=torch.zeros(is_token.shape).masked_fill(~is_token, float("-inf")),
            )
            for (tokens, is_token), (rows, _) in zip(keys, queries, strict=True)
        )
        return replace(self, groups=groups, places=places)


def plan_attention(lengths: Tensor, max_length: int) -> Sequences:
    """Plan the attention of a batch from its lengths (num_sequences,) int64; some may be 0."""
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    return Sequences(cu_seqlens=offsets, cu_queries=offsets, max_length=max_length, max_queries=max_length)


def lay_out(offsets: Tensor, members: Sequence[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Pad each group of sequences; `longest` is a multiple of ROUND_TO.

    Returns for each group its tokens and which of them are real, both (num_sequences, longest); then the
    index of each token (num_tokens,) in the concatenated groups.
    """
    places = torch.zeros(int(offsets[-1]), dtype=torch.int64)
    groups, first_place = [], 0
    for group in members:
        lengths = offsets.diff()[group]
        place = torch.arange(-(-max(1, int(lengths.max())) // ROUND_TO) * ROUND_TO)
        is_token = place < lengths[:, None]
        tokens = (offsets[:-1][group, None] + place).where(is_token, 0)
        places[tokens[is_token]] = is_token.flatten().nonzero()[:, 0] + first_place
        groups.append((tokens, is_token))
        first_place += tokens.numel()
    return groups, places


def has_kernel(device: torch.device) -> bool:
    return device.type != "cpu"


def kernel_backend(device: torch.device) -> Backend:
    if not has_kernel(device):
        return Backend("batched products", "torch")
    name = "flash_attn" if HAS_FLASH_ATTENTION else "torch.nn.attention.varlen"
    return Backend(name, name)


def gpu_kernel() -> Kernel:
    if HAS_FLASH_ATTENTION:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return flash_attn_varlen_func  # type: ignore[no-any-return]
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn  # type: ignore[return-value]


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, slopes: Tensor | None = None
) -> Tensor:
    """Return softmax(query key^T / sqrt(head_size)) value, every sequence seeing only itself.

    Keys and values are (num_tokens, num_heads, head_size), queries and the result (num_queries, ...). With
    `slopes` (num_heads,) a score is less by slope times distance, and every token must be a query. Raises
    UserError for float32 on a GPU, which no fused kernel takes.
    """
    if not has_kernel(query.device):
        return grouped_attention(query, key, value, sequences.grouped(), slopes)
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise UserError("the attention kernels of GPUs take bf16 or fp16", where="precision")
    offsets = (sequences.cu_queries, sequences.cu_seqlens)
    longest = (sequences.max_queries, sequences.max_length)
    biased = {} if slopes is None else {"alibi_slopes": slopes.float()}  # an argument of flash-attn alone
    return gpu_kernel()(query, key, value, *offsets, *longest, **biased)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, slopes: Tensor | None = None
) -> Tensor:
    """Compute `varlen_attention` group by group, in batched matrix products.

    On a CPU this takes a fifth of the time of scaled_dot_product_attention on the padded batch (it has no
    bf16 kernel for short rows).
    """
    num_heads, head_size = query.shape[1:]

    def padded(x: Tensor, tokens: Tensor) -> Tensor:  # (num_sequences * num_heads, longest, head_size)
        rows = x.index_select(0, tokens.flatten()).view(*tokens.shape, num_heads, head_size)
        return rows.transpose(1, 2).flatten(0, 1)

    attended = []
    for group in sequences.groups:
        q, k, v = padded(query, group.queries), padded(key, group.tokens), padded(value, group.tokens)
        bias = group.bias.to(q.dtype).repeat_interleave(num_heads, dim=0)[:, None]
        if slopes is not None:
            place = torch.arange(group.bias.shape[1])
            distance = (place[:, None] - place).abs()
            bias = bias - (slopes[:, None, None] * distance).to(q.dtype).repeat(len(group.bias), 1, 1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=head_size**-0.5)
        output = torch.softmax(scores, dim=-1) @ v
        attended.append(output.unflatten(0, (-1, num_heads)).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended).index_select(0, sequences.places)
