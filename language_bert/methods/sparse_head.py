"""Compute the masked-LM head for masked tokens only.

What. Runs the transform and the product with the vocabulary on the M masked tokens alone.
Effect on quality. None: other positions have no label.
Effect on time. The head is a large part of a small model; at BERT-large it is 9 % of the baseline's
arithmetic.
Relieves. Forward pass, backward pass, evaluation: compute and memory (B x S x V logits are the baseline's
largest tensor).
When not. Never harmful; needs `unpad`.
Use. With the model after unpad: `read_masked_tokens(model)`.
Source. The MLPerf reference gathers the masked positions; MLPerf Training v2.1, MosaicML.
Unlike Composer. Composer 0.7 has no such method.
"""

from functools import partial

import torch.nn.functional as F
from pydantic import Field
from torch import nn

from common.config.schema import CountOrAuto, Strict
from common.training.method import Batch, Method, Progress
from language_bert.data.batches import IGNORED
from language_bert.methods.unpad import UnpaddedBert, check_packed, resolve_rounding


def keep_masked(batch: Batch, *, round_to: int = 1) -> Batch:
    """Return the batch with `labels` (M,) of masked tokens only; IGNORED labels round M up."""
    masked_tokens = batch.inputs["masked_tokens"]
    labels = batch.targets["labels"][masked_tokens]
    num_extra, last = -len(labels) % round_to, len(batch.inputs["input_ids"]) - 1  # ascending order is kept
    return Batch(
        inputs=batch.inputs | {"masked_tokens": F.pad(masked_tokens, (0, num_extra), value=last)},
        targets=batch.targets | {"labels": F.pad(labels, (0, num_extra), value=IGNORED)},
        num_samples=batch.num_samples,
    )


def read_masked_tokens(model: UnpaddedBert, round_to: int = 1) -> None:
    """Limit the head to masked tokens, in place; the logits are then (M, V)."""
    check_packed(model, "read_masked_tokens")
    model.masked_tokens_only, model.masked_round_to = True, round_to
    model.packing.append(partial(keep_masked, round_to=round_to))


class SparseHead(Method):
    is_exact = True

    class Config(Strict):
        round_to: CountOrAuto = Field(
            default=32,
            description="masked tokens of a micro-batch are rounded up to a multiple of this; auto: as unpad",
        )

    def model(self, model: nn.Module) -> nn.Module:
        encoder = check_packed(model, self)
        encoder.masked_tokens_only, encoder.masked_round_to = True, self.settings.round_to
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        return keep_masked(batch, round_to=resolve_rounding(self.settings.round_to, batch.num_samples))
