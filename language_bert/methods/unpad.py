"""Compute real tokens only: the sequences of a batch lie one behind the other, without padding.

What. The encoder runs on T tokens instead of B x S; attention stays within each sequence.
Effect on quality. None: loss and gradients equal the padded model's up to rounding.
Effect on time. Padding is about half of the tokens (0.50 in the Wikipedia set and in size mini).
Relieves. Compute and memory traffic.
When not. Batches of equal length; models with dropout (the random numbers would meet other tokens).
Source. https://arxiv.org/abs/2208.08124 (ByteTransformer); MLPerf Training v2.1, NVIDIA and MosaicML.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from common.config import Strict
from common.method import Batch, Method, Progress
from language_bert.attention import plan_attention
from language_bert.data.batches import IGNORED
from language_bert.model import PackedBert


def unpad_batch(batch: Batch, *, round_to: int = 1) -> Batch:
    """Return a padded batch (B, S) as the packed batch that PackedBert takes, targets included.

    T is rounded up to a multiple of `round_to` by sequences of padding tokens, as many in every batch, some
    of length 0: few distinct shapes, so that kernels and compiled graphs are used again. `labels` becomes
    (T,).
    """
    is_token = batch.inputs["attention_mask"].bool()
    max_length = is_token.shape[1]
    lengths = is_token.sum(dim=1)
    first_tokens = lengths.cumsum(0) - lengths
    place = is_token.flatten().nonzero()[:, 0]
    labels = batch.targets["labels"].flatten()[place]
    num_padding = -len(place) % round_to
    ends = torch.arange(1, -(-(round_to - 1) // max_length) + 1) * max_length
    padding = (num_padding - (ends - max_length)).clamp(0, max_length)
    position_ids = place % max_length
    masked_tokens = (labels != IGNORED).nonzero()[:, 0]
    return Batch(
        inputs={
            "input_ids": F.pad(batch.inputs["input_ids"].flatten()[place], (0, num_padding)),
            "token_type_ids": F.pad(batch.inputs["token_type_ids"].flatten()[place], (0, num_padding)),
            "position_ids": F.pad(position_ids, (0, num_padding)),
            "masked_tokens": masked_tokens,
            "first_tokens": first_tokens,
            "sequences": plan_attention(torch.cat([lengths, padding]), max_length),
        },
        targets=batch.targets | {"labels": F.pad(labels, (0, num_padding), value=IGNORED)},
        num_samples=batch.num_samples,
    )


class Unpad(Method):
    """The packed encoder in place of Hugging Face's, on the same parameters."""

    keeps_mathematics = True

    class Config(Strict):
        """Tokens are rounded up to a multiple of this."""

        round_to: int = Field(default=64, gt=0)

    def model(self, model: nn.Module) -> nn.Module:
        """Take over the parameters."""
        return PackedBert(model)

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        """Remove the padding."""
        return unpad_batch(batch, round_to=self.settings.round_to)
