"""Compute the head's product and loss in chunks.

What. The M x V logits of the masked tokens never exist whole: for a few tokens at a time they are computed,
turned into their loss and, at once, their gradients, and forgotten.
Effect on quality. None: the same loss and gradients up to the order of sums.
Effect on time. No logits are written, read and kept for the backward pass (23,000 x 30,522 of them are 1.4 GB
in bf16, 2.8 GB in float32). Not measured on a GPU yet.
Relieves. Forward pass, backward pass: memory, and its traffic.
When not. Small vocabularies. Needs `sparse_head`.
Use. With the model after unpad, sparse_head: `chunk_head(model)`.
Source. The idea is common: https://github.com/linkedin/Liger-Kernel, https://arxiv.org/abs/2411.09009.
"""

from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import Strict
from common.errors import UserError
from common.training.method import Loss, Method
from language_bert.data.batches import IGNORED
from language_bert.methods.fused_qkv import packed
from language_bert.methods.unpad import UnpaddedBert
from language_bert.model import PackedBert, Predictions, next_sentence_loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of hidden (M, D) times weight (V, D) plus bias (V,); labels (M,) may be ignored."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk_tokens: int
    ) -> Tensor:
        """Return the loss, a scalar of the bias's type; the gradients are kept."""
        factor = weight.to(hidden.dtype)
        counts = labels != IGNORED
        total = torch.zeros((), dtype=bias.dtype, device=bias.device)
        hidden_grad = torch.empty_like(hidden)
        weight_grad, bias_grad = torch.zeros_like(weight), torch.zeros_like(bias)
        for first in range(0, len(hidden), chunk_tokens):
            rows = slice(first, first + chunk_tokens)
            logits = (hidden[rows] @ factor.T).to(bias.dtype) + bias
            chosen = labels[rows].clamp(min=0)[:, None]
            logsumexp = logits.logsumexp(dim=1, keepdim=True)
            total += (logsumexp - logits.gather(1, chosen))[:, 0].where(counts[rows], 0).sum()
            grad = (logits - logsumexp).exp_()  # the softmax, then minus 1 at the label
            grad.scatter_add_(1, chosen, grad.new_full((len(chosen), 1), -1.0))
            grad.mul_(counts[rows, None])
            bias_grad += grad.sum(dim=0)
            grad = grad.to(hidden.dtype)
            hidden_grad[rows] = grad @ factor
            weight_grad += grad.T @ hidden[rows]
        num = counts.sum()
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad, num)
        return total / num

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the kept gradients, divided by the number of tokens."""
        hidden_grad, weight_grad, bias_grad, num = ctx.saved_tensors
        scale = grad / num
        return (hidden_grad * scale).to(hidden_grad.dtype), weight_grad * scale, bias_grad * scale, None, None


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk_tokens: int
) -> Tensor:
    """Return the loss, a scalar; its gradients are those of the whole product."""
    apply: Any = ChunkedCrossEntropy.apply
    found: Tensor = apply(hidden, weight, bias, labels, chunk_tokens)
    return found


def chunked_loss(
    model: PackedBert, outputs: Predictions, targets: dict[str, Tensor], chunk_tokens: int
) -> Tensor:
    """Return the loss of what the head's transform gives, in the place of logits."""
    decoder = model.cls.predictions.decoder
    with torch.autocast(outputs[0].device.type, enabled=False):
        found = chunked_cross_entropy(
            outputs[0], decoder.weight, decoder.bias, targets["labels"], chunk_tokens
        )
    return found + next_sentence_loss(outputs, targets) if model.has_next_sentence else found


def chunk_head(model: UnpaddedBert, chunk_tokens: int = 4096) -> None:
    """Compute logits and loss in chunks, in place; `read_masked_tokens` comes before.

    In training the model then returns what is multiplied with the vocabulary, (M, D), in the place of logits.
    """
    model.transform_only = True
    model.training_loss = partial(chunked_loss, chunk_tokens=chunk_tokens)


class ChunkedHead(Method):
    """The loss takes over what the head leaves out."""

    is_exact = True

    class Config(Strict):
        """How large the chunks are."""

        chunk_tokens: int = Field(default=4096, gt=0, description="so many masked tokens at a time")

    def model(self, model: nn.Module) -> nn.Module:
        """Let the head stop before the product with the vocabulary in training."""
        self.encoder = packed(model, self.name)
        if not self.encoder.masked_tokens_only:
            raise UserError("needs sparse_head before it", where=f"methods.{self.name}")
        self.encoder.transform_only = True
        return model

    def loss(self, loss: Loss) -> Loss:
        """Return the chunked loss."""

        def chunked(outputs: Predictions, targets: dict[str, Tensor]) -> Tensor:
            return chunked_loss(self.encoder, outputs, targets, self.settings.chunk_tokens)

        return chunked
