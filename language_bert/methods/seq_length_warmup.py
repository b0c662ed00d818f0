"""Sequence-length warm-up.

What. Trains on short sequences first: the length grows linearly over the first part of the steps, up to that
of the batch. `truncate` cuts off the end of each sequence; `segment` also trains on the rest, as further
rows, so that no token is lost. Evaluation sees whole sequences.
Effect on quality. Published for GPT-2: stabler training at larger learning rates and batches (Li 2021), and
equal loss with `duration` 0.3 (Composer's method card). Truncated tokens, the final [SEP] among them, are
lost; segments after the first have no [CLS], and positions begin anew in each. With several micro-batches or
ranks each is weighted by the masked tokens that it had before the cut.
Effect on time. Published: GPT-2 about 1.5 times faster to the same loss. A step costs about its tokens: with
`duration` 0.3 and truncation from 8 to 512 tokens about 15 % less of all steps' work (calculated, on
sequences of full length). `segment` saves work in attention only, and needs `unpad` for that: the last
segment of each sequence is padded to the length of the others.
Relieves. Forward pass, backward pass: shorter sequences.
When not. With a compiler or CUDA graphs: each length is another shape. A next-sentence loss with `segment`.
`segment` without `unpad`: just below the full length a padded batch has nearly twice as many positions.
Use. Each batch: `batch = shorten(batch, sequence_length(step, num_steps, 512))`.
Source. Li, Zhang and He 2021, https://arxiv.org/abs/2108.06084; MosaicML Composer 0.7,
algorithms/seq_length_warmup.
Unlike Composer. Same defaults (0.3, 8, 8, truncation); the full length is that of the batch. The length is
linear in the steps, rounded down; there it grows by 8 after equal whole numbers of steps. Segments are cut
from each sequence by itself, the last padded; there from the batch laid out as one row, so that a segment can
hold the end of one sequence and the start of the next, and the end of the batch is dropped.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from common.config.schema import RunConfig, Strict
from common.errors import UserError
from common.training.method import Batch, Method, Progress, split_gradual
from common.training.registry import refuse_compiled
from language_bert.data.batches import IGNORED

PACKING = "unpad"  # after it a batch has no rows to cut


def sequence_length(
    step: int,
    num_steps: int,
    full_length: int,
    *,
    duration: float = 0.3,
    min_length: int = 8,
    round_to: int = 8,
) -> int:
    """Return the length at a step (from 0), from `min_length` to `full_length`.

    It grows linearly over the fraction `duration` of the steps, rounded down to multiples of `round_to`.
    """
    num_growing = duration * num_steps
    if step >= num_growing:
        return full_length
    length = min_length + (full_length - min_length) * step / num_growing
    return min(full_length, max(min_length, int(length) // round_to * round_to))


def shorten(batch: Mapping[str, Tensor], length: int, how: str = "truncate") -> Mapping[str, Tensor]:
    """Return the batch with `length` positions in its tensors (batch, seq).

    `truncate` keeps the first positions, and tensors (batch,). `segment` makes rows of all positions, the
    last of a sequence padded; it drops rows that hold only padding, by `attention_mask`, and tensors
    (batch,), which describe whole sequences. The same object is returned for a batch that is short enough,
    and for one that would lose all `labels`, over which the loss is a mean. Raises UserError for any other
    `how`.
    """
    if how not in ("truncate", "segment"):
        raise UserError(f"unknown way '{how}'", where="shorten", hint="truncate or segment")
    if length >= batch["input_ids"].shape[1]:
        return batch
    rows = {name: x for name, x in batch.items() if x.ndim > 1}
    if how == "truncate":
        short = {**batch, **{name: x[:, :length].contiguous() for name, x in rows.items()}}
    else:
        num_padding = -batch["input_ids"].shape[1] % length
        padding = dict.fromkeys(rows, 0) | {"labels": IGNORED}
        padded = {name: F.pad(x, (0, num_padding), value=padding[name]) for name, x in rows.items()}
        short = {name: x.reshape(-1, length) for name, x in padded.items()}
        is_used = short["attention_mask"].any(dim=1)
        short = {name: x[is_used] for name, x in short.items()}
    return short if (short["labels"] != IGNORED).any() else batch


def shorten_batch(batch: Batch, length: int, how: str) -> Batch:
    """Return the batch that `shorten` makes; the same object if it changes nothing."""
    whole = batch.inputs | batch.targets
    short = shorten(whole, length, how)
    if short is whole:
        return batch
    inputs = {name: short[name] for name in batch.inputs}
    targets = {name: short[name] for name in batch.targets if name in short}
    if "next_sentence_weight" in targets:  # of a loss that divides by the masked tokens that are left
        left, before = ((labels != IGNORED).sum() for labels in (short["labels"], whole["labels"]))
        targets["next_sentence_weight"] = targets["next_sentence_weight"] * (left / before)
    return replace(batch, inputs=inputs, targets=targets, num_samples=len(inputs["input_ids"]))


def move_before_packing(config: RunConfig, name: str) -> RunConfig:
    names = list(config.methods)
    if PACKING not in names or names.index(name) < names.index(PACKING):
        return config
    names.remove(name)
    names.insert(names.index(PACKING), name)
    return config.replaced(methods={name: config.methods[name] for name in names})


def refuse_next_sentence(config: RunConfig, method: Method, hint: str) -> None:
    if config.model_dump()["model"]["next_sentence"]:
        method.refuse("segments have no next sentence", hint=hint)


class SeqLengthWarmup(Method):
    """Shortens training batches, before `unpad` packs them.

    A micro-batch keeps the weight in the loss that it had with all of its masked tokens.
    """

    class Config(Strict):
        duration: float = Field(
            default=0.3, gt=0, le=1, description="the part of all steps in which the length grows"
        )
        min_length: int = Field(default=8, ge=8, description="tokens of a sequence at the first step")
        round_to: int = Field(default=8, gt=0, description="lengths on the way are multiples of this")
        how: Literal["truncate", "segment"] = Field(
            default="truncate", description="cut the rest of a sequence off, or make rows of it"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        """Move this method before `unpad`. Raises UserError where it cannot work."""
        task = config.model_dump()
        if self.settings.min_length >= (longest := task["data"]["max_seq_length"]):
            self.refuse(f"must be less than data.max_seq_length, {longest}", setting="min_length")
        if self.settings.how == "segment":
            refuse_next_sentence(config, self, hint="how: truncate")
        refuse_compiled(config, self.name)
        return move_before_packing(config, self.name)

    def phase_starts(self, num_steps: int) -> list[int]:
        return split_gradual(0, ceil(self.settings.duration * num_steps))

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        if progress is None:
            return batch
        growth, full_length = self.settings.model_dump(exclude={"how"}), batch.inputs["input_ids"].shape[1]
        length = sequence_length(progress.step, progress.num_steps, full_length, **growth)
        return shorten_batch(batch, length, self.settings.how)
