"""One projection for queries, keys and values.

What. Three matrix products of (T, D) by (D, D) become one by (D, 3D) in the forward pass and, where the
suite's own kernel computes attention, in the backward pass. With other kernels the backward pass keeps three,
because a copy that joins their gradients is predicted to cost more than one product saves.
Effect on quality. None with sgd and adamw: the same numbers. `lars` and `lamb` take one trust ratio for all
three, and the method `muon` orthogonalizes all three as one matrix.
Effect on time. Small; fewer, larger matrix products and one read of the activations.
Relieves. Forward pass, backward pass: memory traffic and launch overhead.
When not. With `lamb`, if each projection is to have its own trust ratio, as in MLPerf. Needs `unpad`.
Use. With the model after unpad: `fuse_qkv(model)`.
Source. https://arxiv.org/abs/2205.14135 (qkvpacked); MLPerf Training v2.1.
Unlike Composer. Composer 0.7 has no such method.
"""

import torch
from torch import nn

from common.errors import refuse_twice
from common.training.method import Method
from language_bert.methods.unpad import check_packed
from language_bert.model import PackedBert


@torch.no_grad()
def fuse_qkv(model: PackedBert) -> int:
    """Replace query, key and value (D, D) of every layer by one `qkv` (3D, D); returns their number."""
    check_packed(model, "fuse_qkv")
    refuse_twice(hasattr(model.bert.encoder.layer[0].attention.self, "qkv"), "fuse_qkv")
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        parts = [attention.query, attention.key, attention.value]
        fused = nn.Linear(parts[0].in_features, 3 * parts[0].out_features)
        fused.weight.copy_(torch.cat([part.weight for part in parts]))
        fused.bias.copy_(torch.cat([part.bias for part in parts]))
        attention.qkv = fused.to(parts[0].weight)
        del attention.query, attention.key, attention.value
    return len(model.bert.encoder.layer)


class FusedQkv(Method):
    is_exact = True

    def model(self, model: nn.Module) -> nn.Module:
        fuse_qkv(check_packed(model, self))
        return model
