"""Compute the head's product and loss in chunks.

What. The M x V logits of the masked tokens are never stored whole: for a few tokens at a time they are
computed, turned into their loss and gradients, and freed. On a GPU one kernel does so in place.
Effect on quality. None: the same loss and gradients up to rounding and the order of sums; the gradient of the
bias is summed from those of the logits, which have 16 bits under autocast.
Effect on time. Of 23,000 x 30,522 logits, 1.4 GB in bf16, no copy in float32 is written or read, and none is
saved for the backward pass. `ttt inspect compile` counts the bytes.
Relieves. Forward pass, backward pass: memory, and its traffic.
When not. Small vocabularies. Needs `sparse_head`.
Use. With the model after unpad, sparse_head: `chunk_head(model)`.
Source. The idea is common: https://github.com/linkedin/Liger-Kernel, https://arxiv.org/abs/2411.09009.
Unlike Composer. Composer 0.7 has no such method.
"""

# The gradient of the mean cross entropy with respect to a row of logits is (softmax - one-hot) / M: it needs
# only that row. So the forward pass computes loss and gradients of a chunk together, and the backward pass
# multiplies the stored gradients of hidden (M, D), weight (V, D) and bias (V,) by the gradient of the loss.
# Matrix products are in the dtype of `hidden`, as autocast would have them; softmax and sums over chunks in
# that of the parameters. Rows of logits begin at multiples of 128 bytes, which tensor cores need to run at
# their rate: the product has extra words, whose bias of -inf makes their probability 0.

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import Strict
from common.training.method import Loss, Method
from language_bert.data.batches import IGNORED
from language_bert.kernels.cross_entropy import cross_entropy_gradient_
from language_bert.methods.unpad import UnpaddedBert, check_packed
from language_bert.model import PackedBert, Predictions, next_sentence_loss

ROUND_VOCAB_TO = 64  # 128 bytes in 16 bits


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of hidden (M, D) times weight (V, D) plus bias (V,); labels (M,) may be IGNORED."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk_tokens: int
    ) -> Tensor:
        vocab_size, size = weight.shape
        num_words = vocab_size + -vocab_size % ROUND_VOCAB_TO
        factor = hidden.new_empty(num_words, size)
        factor[:vocab_size], factor[vocab_size:] = weight, 0
        padded_bias = F.pad(bias, (0, num_words - vocab_size), value=-float("inf"))
        total = torch.zeros((), dtype=bias.dtype, device=bias.device)
        hidden_grad = torch.empty_like(hidden)
        weight_grad, bias_grad = weight.new_zeros(num_words, size), torch.zeros_like(padded_bias)
        for first in range(0, len(hidden), chunk_tokens):
            rows = slice(first, first + chunk_tokens)
            logits = hidden[rows] @ factor.T
            total += cross_entropy_gradient_(logits, padded_bias, labels[rows], IGNORED).sum()
            gradient = logits  # the kernel has overwritten them
            bias_grad += gradient.sum(dim=0, dtype=bias.dtype)
            hidden_grad[rows] = gradient @ factor
            weight_grad += gradient.T @ hidden[rows]
        num = (labels != IGNORED).sum()
        ctx.save_for_backward(hidden_grad, weight_grad[:vocab_size], bias_grad[:vocab_size], num)
        return total / num

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, bias_grad, num = ctx.saved_tensors
        scale = grad / num
        wide = hidden_grad.to(scale.dtype)  # a GPU would round the scale to the 16 bits of this gradient
        return (wide * scale).to(hidden_grad.dtype), weight_grad * scale, bias_grad * scale, None, None


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk_tokens: int
) -> Tensor:
    """Return the loss, a scalar; its gradients are those of the whole product."""
    apply: Any = ChunkedCrossEntropy.apply
    loss: Tensor = apply(hidden, weight, bias, labels, chunk_tokens)
    return loss


def chunked_loss(
    model: PackedBert, outputs: Predictions, targets: dict[str, Tensor], chunk_tokens: int
) -> Tensor:
    """Return the loss of a model whose outputs are the head's transform in place of logits."""
    decoder = model.cls.predictions.decoder
    with torch.autocast(outputs[0].device.type, enabled=False):
        loss = chunked_cross_entropy(
            outputs[0], decoder.weight, decoder.bias, targets["labels"], chunk_tokens
        )
    return loss + next_sentence_loss(outputs, targets) if model.has_next_sentence else loss


def chunk_head(model: UnpaddedBert, chunk_tokens: int = 4096) -> None:
    """Compute logits and loss in chunks, in place; call it after `read_masked_tokens`.

    In training the model then returns the input of the product with the vocabulary, (M, D), in place of
    logits.
    """
    check_packed(model, "chunk_head", has_sparse_head=True)
    model.transform_only = True
    model.training_loss = partial(chunked_loss, chunk_tokens=chunk_tokens)


class ChunkedHead(Method):
    """The head stops before the product with the vocabulary; the loss computes it."""

    is_exact = True

    class Config(Strict):
        chunk_tokens: int = Field(default=4096, gt=0, description="so many masked tokens at a time")

    def model(self, model: nn.Module) -> nn.Module:
        self.encoder = check_packed(model, self, has_sparse_head=True)
        self.encoder.transform_only = True
        return model

    def loss(self, loss: Loss) -> Loss:
        def chunked(outputs: Predictions, targets: dict[str, Tensor]) -> Tensor:
            return chunked_loss(self.encoder, outputs, targets, self.settings.chunk_tokens)

        return chunked
