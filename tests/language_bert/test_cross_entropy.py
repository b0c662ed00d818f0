"""Cross entropy with its gradient in place: torch's operators, the Triton kernel, the padded vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from language_bert.data.batches import IGNORED
from language_bert.kernels.cross_entropy import cross_entropy_gradient_
from language_bert.methods.chunked_head import ROUND_VOCAB_TO, chunked_cross_entropy
from tests.command import run_interpreted

NUM_ROWS, SIZE = 50, 16
KERNEL_AGAINST_REFERENCE = """
import sys
import torch
from language_bert.data.batches import IGNORED
from language_bert.kernels.cross_entropy import cross_entropy_gradient_, cross_entropy_gradient_reference_

torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
    for vocab_size in (320, 4096, 9024):  # part of a block, a block, two and a part
        logits, bias = (5 * torch.randn(4, vocab_size)).to(dtype), torch.randn(vocab_size)
        bias[-7:] = -float("inf")
        labels = torch.tensor([0, IGNORED, vocab_size - 8, 7])
        gradient, expected = logits.clone(), logits.clone()
        losses = cross_entropy_gradient_(gradient, bias, labels, IGNORED)
        expected_losses = cross_entropy_gradient_reference_(expected, bias, labels, IGNORED)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=tolerance)
        assert gradient[0, 0] < 0 and not gradient[1].any() and not gradient[:, -7:].any()
logits, bias = torch.randn(3, 320), torch.zeros(320)
bias[0] = -float("inf")  # what a row without a label may read
losses = cross_entropy_gradient_(logits, bias, torch.tensor([IGNORED, 320, -1]), IGNORED)
assert losses[0] == 0 and losses[1:].isnan().all() and not logits[0].any()
assert "language_bert.kernels.cross_entropy_triton" in sys.modules
"""


def test_the_kernel_computes_what_the_reference_does():
    run_interpreted(KERNEL_AGAINST_REFERENCE)


def random_inputs(vocab_size):
    """Return hidden (M, D), weight (V, D), bias (V,) and labels (M,), every fifth of them ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_ROWS, SIZE), (vocab_size, SIZE), (vocab_size,))
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    labels = torch.randint(vocab_size, (NUM_ROWS,), generator=generator)
    labels[::5] = IGNORED
    return [value.requires_grad_() for value in inputs], labels


def test_losses_and_gradient_are_torchs():
    (hidden, weight, bias), labels = random_inputs(301)
    logits = F.linear(hidden, weight, bias).detach().requires_grad_()
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    products = F.linear(hidden, weight).detach()
    losses = cross_entropy_gradient_(products, bias.detach(), labels, IGNORED)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(products, gradient)


@pytest.mark.parametrize("vocab_size", [ROUND_VOCAB_TO, ROUND_VOCAB_TO + 1])
@pytest.mark.parametrize("chunk_tokens", [NUM_ROWS, 16])
def test_words_that_fill_up_the_vocabulary_never_win_and_get_no_gradient(vocab_size, chunk_tokens):
    inputs, labels = random_inputs(vocab_size)
    loss = chunked_cross_entropy(*inputs, labels, chunk_tokens)
    expected = F.cross_entropy(F.linear(*inputs), labels, ignore_index=IGNORED)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs))
