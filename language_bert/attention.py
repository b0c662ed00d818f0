"""Attention over packed sequences: of different lengths, concatenated without padding.

Tokens of all sequences are the rows of one tensor (num_tokens, num_heads, head_size); sequence i has the rows
cu_seqlens[i] to cu_seqlens[i + 1]. Only attention needs these offsets. On a GPU one fused kernel takes them,
one of KERNELS, chosen by name. Queries have offsets of their own, because the last layer needs few queries
and all keys. Elsewhere sequences are sorted by length and split into groups; each group is padded to its
longest sequence and computed in batched matrix products, and the result is put back in order. The layout of
the groups depends on the lengths alone, so it is computed once a batch and shared by all layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError
from language_bert.kernels.attention import HEAD_SIZES, packed_attention, packed_self_attention

KERNELS = {  # the fused kernels by name, in the order of `auto`, and the modules whose version logs name
    "flash_attn_interface": "flash_attn_interface",  # FlashAttention 3, which torch calls in place of its own
    "triton": "triton",  # the suite's own, on an H200 faster than FlashAttention 2
    "flash_attn": "flash_attn",  # FlashAttention 2, the only one with ALiBi's biases
    "torch_flash": "torch",  # FlashAttention 2 inside torch
    "torch_cudnn": "torch",  # only by name: never run here on an empty sequence
}
CUDNN_VERSION = 91800  # the first with packed sequences that torch takes
CUDNN_MAJORS, HOPPER, AMPERE_OR_LATER = (9, 10), (9,), (8, 9, 10, 11, 12)  # of the compute capability
NUM_GROUPS = 2  # fastest of 1 to 6 at batch 16 on 2 cores: more groups have less padding and more calls
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
    further ones unwritten. `kernel`, one of KERNELS, computes attention on a GPU. Compiled code holds these
    three as constants. `groups` are in order of length;
    `places` (num_queries,) are the indices of the queries in the concatenated groups.
    """

    cu_seqlens: Tensor
    cu_queries: Tensor
    max_length: int
    max_queries: int
    kernel: str
    groups: tuple[Group, ...] = ()
    places: Tensor | None = None
    keys: list[Any] = field(default_factory=list)  # layout of the keys, shared with selections of this plan

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Sequences":
        if device.type == "cpu":
            return self.build_groups()
        keys, queries = (x.to(device, non_blocking=non_blocking) for x in (self.cu_seqlens, self.cu_queries))
        return replace(self, cu_seqlens=keys, cu_queries=queries, groups=(), places=None)

    def select(self, needed: Tensor, *, max_repeats: int = 0) -> "Sequences":
        """Return the plan in which only these tokens (num_queries,), in ascending order, are queries.

        At most `max_repeats` of them are there for rounding: they can repeat a token.
        """
        offsets = torch.searchsorted(needed, self.cu_seqlens.long())
        most = self.max_length + max_repeats
        return replace(self, cu_queries=offsets.int(), max_queries=most, groups=(), places=None)

    def build_groups(self) -> "Sequences":
        if self.places is not None:
            return self
        if not self.keys:
            lengths = self.cu_seqlens.diff().numpy()
            order = lengths.argsort(kind="stable")[(lengths == 0).sum() :]
            members = np.array_split(order, min(NUM_GROUPS, len(order)))
            self.keys.extend([members, *lay_out(self.cu_seqlens, members)])
        members, keys, places = self.keys
        queries = keys
        if self.cu_queries is not self.cu_seqlens:
            queries, places = lay_out(self.cu_queries, members)
        groups = tuple(
            Group(
                queries=rows,
                tokens=tokens,
                bias=torch.where(is_token, 0.0, float("-inf")),
            )
            for (tokens, is_token), (rows, _) in zip(keys, queries, strict=True)
        )
        return replace(self, groups=groups, places=places)


def plan_attention(lengths: Tensor, max_length: int, kernel: str) -> Sequences:
    """Plan the attention of a batch from its lengths (num_sequences,) int64; some may be 0.

    `kernel` is what `choose_kernel` has returned.
    """
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    return Sequences(
        cu_seqlens=offsets,
        cu_queries=offsets,
        max_length=max_length,
        max_queries=max_length,
        kernel=kernel,
    )


def lay_out(cu_seqlens: Tensor, members: Sequence[np.ndarray]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Pad each group of sequences, whose numbers are in `members`; `longest` is a multiple of ROUND_TO.

    Returns for each group its tokens and which of them are real, both (num_sequences, longest); then the
    index of each token (num_tokens,) in the concatenated groups.
    """
    offsets = cu_seqlens.long().numpy()  # numpy takes a third of the time of torch
    lengths = np.diff(offsets)
    places = np.zeros(offsets[-1], np.int64)
    groups, first_place = [], 0
    for group in members:
        longest = -(-max(1, lengths[group].max()) // ROUND_TO) * ROUND_TO
        place = np.arange(longest)
        is_token = place < lengths[group, None]
        tokens = np.where(is_token, offsets[group, None] + place, 0)
        places[tokens[is_token]] = np.flatnonzero(is_token) + first_place
        groups.append((torch.from_numpy(tokens), torch.from_numpy(is_token)))
        first_place += tokens.size
    return groups, torch.from_numpy(places)


def has_kernel(device: torch.device) -> bool:
    return device.type != "cpu"


def head_size(model: Any) -> int:
    """Return the size of a head, from this suite's settings or Hugging Face's configuration of a model."""
    return int(model.hidden_size // model.num_attention_heads)


def has_capability(majors: tuple[int, ...]) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in majors


def why_absent(kernel: str, *, needs_bias: bool = False, head_size: int = 64) -> str:
    """Return why this machine has no such kernel for heads of this size, "" if it has it."""
    if needs_bias and kernel != "flash_attn":
        return "it takes no ALiBi"
    if find_spec(KERNELS[kernel]) is None:
        return "it is not installed"
    if kernel == "flash_attn_interface" and not has_capability(HOPPER):
        return "it needs a GPU of compute capability 9.0"
    if kernel == "triton" and not has_capability(AMPERE_OR_LATER):
        return "it needs a GPU of compute capability 8.0 or higher"
    if kernel == "triton" and head_size not in HEAD_SIZES:
        return f"it takes heads of {', '.join(map(str, HEAD_SIZES))} values, not of {head_size}"
    if kernel == "torch_cudnn":
        from torch.nn.attention import varlen  # noqa: F401  # defines the operator

        arguments = torch.ops.torch_attn._varlen_attn.default._schema.arguments
        if "backend" not in {argument.name for argument in arguments}:
            return f"torch {torch.__version__} has it for padded sequences only"
        if (torch.backends.cudnn.version() or 0) < CUDNN_VERSION or not has_capability(CUDNN_MAJORS):
            return "it needs cuDNN 9.18 and a GPU of compute capability 9 or 10"
    return ""


def is_preferred(kernel: str) -> bool:
    return kernel != "torch_cudnn" and (kernel != "triton" or has_capability(HOPPER))


def choose_kernel(name: str, *, needs_bias: bool = False, head_size: int = 64) -> str:
    """Return the kernel of this name, for `auto` the first usable one, and make torch's operator call it.

    Raises UserError, without a `where`, for a kernel that this machine lacks, or that takes no ALiBi.
    """
    needs: dict[str, Any] = {"needs_bias": needs_bias, "head_size": head_size}
    usable = (kernel for kernel in KERNELS if not why_absent(kernel, **needs))
    if name == "auto":
        name = next((kernel for kernel in usable if is_preferred(kernel)), "torch_flash")
    elif reason := why_absent(name, **needs):
        raise UserError(f"{name} cannot be used: {reason}", hint=f"there is {', '.join(['auto', *usable])}")
    activate_flash_attention_3(name == "flash_attn_interface")
    return name


def activate_flash_attention_3(is_chosen: bool) -> None:
    """Let FlashAttention 3 take the place of torch's own flash kernel, in the whole process, or not."""
    from torch.nn import attention as of_torch

    is_active = of_torch.current_flash_attention_impl() == "FA3"
    if is_active and not is_chosen:
        of_torch.restore_flash_attention_impl()
    if is_active or not is_chosen:
        return
    try:
        of_torch.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        raise UserError(f"flash_attn_interface cannot be used ({error})", hint="name another") from error


def gpu_kernel(name: str) -> Kernel:
    """Get a kernel by its name, without checks, so that compiled code can do so too."""
    if name == "triton":
        return packed_attention
    if name == "flash_attn":
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return flash_attn_varlen_func  # type: ignore[no-any-return]
    return partial(call_torch_kernel, "CUDNN_ATTENTION" if name == "torch_cudnn" else "FLASH_ATTENTION")


def call_torch_kernel(backend: str, *arguments: Any) -> Tensor:
    """Call one kernel of torch's operator; left alone, torch 2.15 prefers cuDNN's on Hopper."""
    from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return varlen.varlen_attn(*arguments)  # type: ignore[return-value]


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, slopes: Tensor | None = None
) -> Tensor:
    """Return softmax(query key^T / sqrt(head_size)) value, every sequence seeing only itself.

    Keys and values are (num_tokens, num_heads, head_size), queries and the result (num_queries, ...). With
    `slopes` (num_heads,) a score is less by slope times distance, and every token must be a query. Raises
    UserError for float32 on a GPU, which no fused kernel takes.
    """
    if not has_kernel(query.device):
        return grouped_attention(query, key, value, sequences.build_groups(), slopes)
    check_dtype(query.dtype)
    offsets = (sequences.cu_queries, sequences.cu_seqlens)
    longest = (sequences.max_queries, sequences.max_length)
    if slopes is not None and sequences.kernel != "flash_attn":
        hint = "install it, and call apply_alibi before unpad"
        raise UserError("ALiBi needs flash-attn on a GPU", where="unpad", hint=hint)
    biased = {} if slopes is None else {"alibi_slopes": slopes.float()}  # an argument of flash-attn alone
    return gpu_kernel(sequences.kernel)(query, key, value, *offsets, *longest, **biased)


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        raise UserError("the attention kernels of GPUs take bf16 or fp16", where="precision")


def takes_qkv(sequences: Sequences, device: torch.device) -> bool:
    """Return whether `varlen_self_attention` is there: the suite's own kernel computes attention."""
    return has_kernel(device) and sequences.kernel == "triton"


def varlen_self_attention(qkv: Tensor, sequences: Sequences) -> Tensor:
    """Return `varlen_attention` of queries, keys and values in one tensor.

    It is (num_tokens, 3, num_heads, head_size).
    """
    check_dtype(qkv.dtype)
    return packed_self_attention(qkv, sequences.cu_seqlens, sequences.max_length)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, slopes: Tensor | None = None
) -> Tensor:
    """Compute `varlen_attention` group by group, in batched matrix products.

    On a CPU this takes a fifth of the time of scaled_dot_product_attention on the padded batch: torch has no
    bf16 kernel for short rows.
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
