"""Compute the last layer only for tokens that are read.

What. In the last layer only masked (and first) tokens ask: their queries attend to all keys, and output
projection and MLP run on them alone.
Effect on quality. None: nothing reads the others.
Effect on time. One layer's MLP, and the scores of its attention, on 15 % of the tokens; 2.5 % of the
arithmetic at 24 layers, a third at 2.
Relieves. Forward pass, backward pass, evaluation: compute.
When not. Never harmful; needs `unpad` and `sparse_head`.
Use. With the model after unpad, sparse_head: `compute_needed_tokens(model)`.
Source. MLPerf Training v2.1, MosaicML and HazyResearch; there attention stays whole.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from common.errors import UserError
from common.training.method import Batch, Method, Progress
from language_bert.methods.fused_qkv import packed
from language_bert.methods.unpad import UnpaddedBert
from language_bert.model import PackedBert


def keep_needed(batch: Batch, *, next_sentence: bool, max_repeats: int = 0) -> Batch:
    """Return the packed batch with the tokens that the last layer computes, see PackedBert.forward.

    At most `max_repeats` of the masked tokens were added to round their number up.
    """
    needed, places = batch.inputs["masked_tokens"], None
    if next_sentence:
        needed, order = torch.cat([needed, batch.inputs["first_tokens"]]).sort(stable=True)
        places = order.argsort()
    sequences = batch.inputs["sequences"].select(needed, max_repeats=max_repeats)
    inputs = {"needed": needed, "needed_sequences": sequences}
    inputs |= {} if places is None else {"needed_places": places}
    return Batch(inputs=batch.inputs | inputs, targets=batch.targets, num_samples=batch.num_samples)


def needs(model: PackedBert) -> dict[str, Any]:
    """Return the arguments of `keep_needed` for this model."""
    return {"next_sentence": model.has_next_sentence, "max_repeats": model.masked_round_to - 1}


def compute_needed_tokens(model: UnpaddedBert) -> None:
    """Let the last layer compute what the heads read, in place; `read_masked_tokens` comes before."""
    model.packing.append(partial(keep_needed, **needs(model)))


class LastLayerSubset(Method):
    """The last layer on needed tokens."""

    is_exact = True

    def model(self, model: nn.Module) -> nn.Module:
        """Check that the head reads masked tokens only."""
        self.encoder = packed(model, self.name)
        if not self.encoder.masked_tokens_only:
            raise UserError("needs sparse_head before it", where=f"methods.{self.name}")
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        """Say which tokens are needed."""
        return keep_needed(batch, **needs(self.encoder))
