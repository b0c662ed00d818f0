"""Cross entropy and its gradient from logits that stay in 16 bits: one kernel, in place of ten eager ones.

The gradient of a row's loss with respect to its logits is softmax - one-hot: it needs that row only. So loss
and gradient are computed together, and the gradient overwrites the logits. The kernel reads a row of V logits
twice, the second time from the L2 cache, and writes it once; everything between is in float32 registers. The
eager operators make float32 copies of all M x V logits.
"""

import os

import torch
from torch import Tensor


def cross_entropy_gradient_(logits: Tensor, bias: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return the losses (M,) of `logits + bias`, and replace `logits` (M, V) by the gradient of their sum.

    `logits` are contiguous; `bias` (V,) has the dtype of the losses, and -inf in it excludes a column. Rows
    whose label (M,) is `ignored` have loss and gradient 0. On a GPU, or with TRITON_INTERPRET=1, it is one
    Triton kernel, which tracers see as one operator; elsewhere, and in float64, it is the reference.
    """
    on_gpu = logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if on_gpu and bias.dtype == torch.float32:
        losses: Tensor = torch.ops.ttt.cross_entropy_gradient_(logits, bias, labels, ignored)
        return losses
    return cross_entropy_gradient_reference_(logits, bias, labels, ignored)


def cross_entropy_gradient_reference_(logits: Tensor, bias: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return what `cross_entropy_gradient_` does, operator by operator, on any device."""
    counts = labels != ignored
    columns = labels.clamp(min=0)[:, None]
    shifted = logits.to(bias.dtype) + bias
    shares = shifted.softmax(dim=1)
    # the largest share of a row is 1 / sum(exp(shifted - its largest)), so exp is computed once
    logsumexp = shifted.amax(dim=1) - shares.amax(dim=1).log()
    losses = (logsumexp - shifted.gather(1, columns)[:, 0]).where(counts, 0)
    shares.scatter_add_(1, columns, shares.new_full(columns.shape, -1.0))
    logits.copy_(shares.mul_(counts[:, None]))
    return losses


@torch.library.custom_op("ttt::cross_entropy_gradient_", mutates_args={"logits"})
def cross_entropy_gradient_operator(logits: Tensor, bias: Tensor, labels: Tensor, ignored: int) -> Tensor:
    from language_bert.kernels.cross_entropy_triton import cross_entropy_gradient_triton_

    return cross_entropy_gradient_triton_(logits, bias, labels, ignored)


@cross_entropy_gradient_operator.register_fake
def allocate_losses(logits: Tensor, bias: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return torch.empty(len(logits), dtype=bias.dtype, device=logits.device)
