"""Compute the last layer only for tokens that are read.

What. Computes queries of the last layer only for masked (and first) tokens: they attend to all keys, and
output projection and MLP run on them alone.
Effect on quality. None: the heads read no other token.
Effect on time. One layer's MLP, and the scores of its attention, on masked tokens alone: 2.5 % less
arithmetic at 24 layers, a third less at 2.
Relieves. Forward pass, backward pass, evaluation: compute.
When not. Never harmful; needs `unpad` and `sparse_head`.
Use. With the model after unpad, sparse_head: `compute_needed_tokens(model)`.
Source. MLPerf Training v2.1, MosaicML and HazyResearch; there attention stays whole.
Unlike Composer. Composer 0.7 has no such method.
"""

from typing import Any

import torch
from torch import nn

from common.training.method import Batch, Method, Progress
from language_bert.methods.unpad import UnpaddedBert, check_packed, resolve_rounding
from language_bert.model import PackedBert


def keep_needed(batch: Batch, *, next_sentence: bool, max_repeats: int = 0) -> Batch:
    """Return the packed batch with the tokens that the last layer computes, see PackedBert.forward.

    `max_repeats` is the largest number of masked tokens that rounding can have added.
    """
    needed, places = batch.inputs["masked_tokens"], None
    if next_sentence:
        needed, order = torch.cat([needed, batch.inputs["first_tokens"]]).sort(stable=True)
        places = order.argsort()
    sequences = batch.inputs["sequences"].select(needed, max_repeats=max_repeats)
    inputs = {"needed": needed, "needed_sequences": sequences}
    inputs |= {} if places is None else {"needed_places": places}
    return Batch(inputs=batch.inputs | inputs, targets=batch.targets, num_samples=batch.num_samples)


def arguments_for(model: PackedBert, batch: Batch) -> dict[str, Any]:
    most = resolve_rounding(model.masked_round_to, batch.num_samples) - 1
    return {"next_sentence": model.has_next_sentence, "max_repeats": most}


def compute_needed_tokens(model: UnpaddedBert) -> None:
    """Limit the last layer to what the heads read, in place; call it after `read_masked_tokens`."""
    check_packed(model, "compute_needed_tokens", has_sparse_head=True)
    model.packing.append(lambda batch: keep_needed(batch, **arguments_for(model, batch)))


class LastLayerSubset(Method):
    is_exact = True

    def model(self, model: nn.Module) -> nn.Module:
        self.encoder = check_packed(model, self, has_sparse_head=True)
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        return keep_needed(batch, **arguments_for(self.encoder, batch))
