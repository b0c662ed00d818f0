"""Sequence-length warm-up.

What. Trains on short sequences first: the length grows linearly over a first part of the steps, up to that of
the batch. `truncate` cuts the end of each sequence off; `segment` also trains on what comes after, as further
rows. Evaluation sees whole sequences.
Effect on quality. Published for GPT-2: stabler training at larger learning rates and batches (Li 2021), and
equal loss with `duration` 0.3 (Composer's method card). For BERT it was not measured at full size here.
Truncated tokens, the final [SEP] among them, are lost; segments after the first have no [CLS]. With several
micro-batches or ranks each has the share of the loss that its masked tokens had before they were cut.
Effect on time. Published: GPT-2 about 1.5 times faster to the same loss. A step costs about its tokens: with
`duration` 0.3 and truncation from 8 to 512 tokens about 15 % less of all steps' work (calculated, on
sequences of full length); `segment` keeps the work but for the attention's.
Relieves. Forward pass, backward pass: shorter sequences.
When not. With a compiler or captured graphs: each length is another shape. A next-sentence loss with
`segment`.
Use. Each batch: `batch = shorten(batch, sequence_length(step, num_steps, 512))`.
Source. Li, Zhang and He 2021, https://arxiv.org/abs/2108.06084; MosaicML Composer,
algorithms/seq_length_warmup.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from common.config.schema import Fraction, RunConfig, Strict
from common.errors import UserError
from common.training.method import Batch, Method, Progress
from common.training.registry import build_methods
from language_bert.data.batches import IGNORED

TAKES_OVER = "unpad"  # from here on a batch has no rows to cut


def sequence_length(
    step: int,
    num_steps: int,
    full_length: int,
    *,
    duration: float = 0.3,
    min_length: int = 8,
    round_to: int = 8,
) -> int:
    """Return the length at a step (from 0): from `min_length` to `full_length`.

    It grows linearly over `duration` of the steps, in multiples of `round_to`, rounded down.
    """
    num_growing = duration * num_steps
    if step >= num_growing:
        return full_length
    length = min_length + (full_length - min_length) * step / num_growing
    return min(full_length, max(min_length, int(length) // round_to * round_to))


def shorten(batch: Mapping[str, Tensor], length: int, how: str = "truncate") -> Mapping[str, Tensor]:
    """Return the batch by `truncate` or `segment`; one that is no longer stays as it is.

    So does one that would lose all `labels`: the mean over none of them is no number.
    """
    if length >= batch["input_ids"].shape[1]:
        return batch
    short = {"truncate": truncate, "segment": segment}[how](batch, length)
    return short if (short["labels"] != IGNORED).any() else batch


def truncate(tensors: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """Return the first `length` places of each tensor (batch, seq); tensors (batch,) stay."""
    return {name: each[:, :length].contiguous() if each.ndim > 1 else each for name, each in tensors.items()}


def segment(tensors: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """Return rows of `length` places from tensors (batch, seq), one behind the other; the rest is dropped.

    Rows of padding alone, by `attention_mask`, are left out, and so are tensors (batch,), which say something
    of whole sequences.
    """
    is_used = cut(tensors["attention_mask"], length).any(dim=1)
    return {name: cut(each, length)[is_used] for name, each in tensors.items() if each.ndim > 1}


def cut(tensor: Tensor, length: int) -> Tensor:
    """Return (batch, seq) as (batch * (seq // length), length)."""
    num_segments = tensor.shape[1] // length
    return tensor[:, : num_segments * length].reshape(-1, length)


class SeqLengthWarmup(Method):
    """Shortens training batches while they have rows, each micro-batch within itself.

    It keeps its share of the loss, by the masked tokens that it had: the loss is the mean over the rest.
    """

    class Config(Strict):
        """How long, how short, and how."""

        duration: Fraction = Field(default=0.3, description="the part of all steps in which the length grows")
        min_length: int = Field(default=8, ge=8, description="tokens of a sequence at the first step")
        round_to: int = Field(default=8, gt=0, description="lengths on the way are multiples of this")
        how: Literal["truncate", "segment"] = Field(
            default="truncate", description="cut the rest of a sequence off, or make rows of it"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        """Move before `unpad`, which takes the rows away. Raises UserError where it cannot work."""
        where, task = f"methods.{self.name}", config.model_dump()
        if self.settings.min_length > task["data"]["max_seq_length"]:
            raise UserError("min_length is more than data.max_seq_length", where=where)
        if self.settings.how == "segment" and task["model"]["next_sentence"]:
            raise UserError("segments have no next sentence", where=where, hint="how: truncate")
        for method in build_methods(config):
            if method.compiles:
                what = f"{method.name} would compile every length while the clock runs"
                raise UserError(what, where=where, hint=f"--set methods.{method.name}=false")
        names = list(config.methods)
        if TAKES_OVER not in names or names.index(self.name) < names.index(TAKES_OVER):
            return config
        names.remove(self.name)
        names.insert(names.index(TAKES_OVER), self.name)
        return config.replaced(methods={name: config.methods[name] for name in names})

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        """Shorten a training batch; one that would lose all its masked tokens stays as it is."""
        if progress is None:
            return batch
        settings: dict[str, Any] = self.settings.model_dump()
        how, whole = settings.pop("how"), batch.inputs | batch.targets
        full_length = whole["input_ids"].shape[1]
        length = sequence_length(progress.step, progress.num_steps, full_length, **settings)
        short = shorten(whole, length, how)
        if short is whole:
            return batch
        inputs = {name: short[name] for name in batch.inputs}
        targets = {name: short[name] for name in batch.targets if name in short}
        return replace(batch, inputs=inputs, targets=targets, num_samples=len(inputs["input_ids"]))
