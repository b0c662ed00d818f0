"""The Triton kernel of cross_entropy.py, in a module of its own: it is imported only where it runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_COLUMNS = 4096  # of a row at a time: 16 float32 values in each of 256 threads
NUM_WARPS = 8


def cross_entropy_gradient_triton_(logits: Tensor, bias: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return what `cross_entropy_gradient_` does; `bias` is float32, and all are contiguous.

    A label beyond the vocabulary that is not `ignored` has the loss NaN.
    """
    assert logits.is_contiguous() and bias.is_contiguous() and labels.is_contiguous()
    num_rows, vocab_size = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(num_rows,)](
            logits,
            bias,
            labels,
            losses,
            ignored,
            VOCAB_SIZE=vocab_size,
            NUM_COLUMNS=NUM_COLUMNS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,  # multiply and add in one instruction: not Triton's default from 3.10 on
        )
    return losses


@triton.jit
def cross_entropy_kernel(
    logits, bias, labels, losses, ignored, VOCAB_SIZE: tl.constexpr, NUM_COLUMNS: tl.constexpr
):
    """Compute one row: its logsumexp as it is read for the first time, its gradient the second time."""
    row = tl.program_id(0).to(tl.int64)  # offsets from here on exceed 32 bits
    label = tl.load(labels + row)
    counts = label != ignored
    is_word = (label >= 0) & (label < VOCAB_SIZE)
    logits += row * VOCAB_SIZE
    chosen = tl.load(logits + label, mask=is_word, other=float("nan"))  # before it is written over
    chosen = chosen.to(tl.float32) + tl.load(bias + label, mask=is_word, other=0.0)

    columns = tl.arange(0, NUM_COLUMNS)
    largest = tl.full((NUM_COLUMNS,), -float("inf"), tl.float32)  # of each lane, so that no loop waits
    total = tl.zeros((NUM_COLUMNS,), tl.float32)
    for first in range(0, VOCAB_SIZE, NUM_COLUMNS):
        is_inside = first + columns < VOCAB_SIZE
        values = tl.load(logits + first + columns, mask=is_inside, other=-float("inf")).to(tl.float32)
        values += tl.load(bias + first + columns, mask=is_inside, other=0.0)
        larger = tl.maximum(largest, values)
        reference = tl.where(larger == -float("inf"), 0.0, larger)  # inf - inf is not a number
        total = total * tl.exp(largest - reference) + tl.exp(values - reference)
        largest = larger
    row_largest = tl.max(largest, axis=0)
    logsumexp = row_largest + tl.log(tl.sum(total * tl.exp(largest - row_largest), axis=0))
    tl.store(losses + row, tl.where(counts, logsumexp - chosen, 0.0))

    for first in range(0, VOCAB_SIZE, NUM_COLUMNS):
        is_inside = first + columns < VOCAB_SIZE
        values = tl.load(logits + first + columns, mask=is_inside, other=-float("inf")).to(tl.float32)
        values += tl.load(bias + first + columns, mask=is_inside, other=0.0)
        gradient = tl.exp(values - logsumexp) - tl.where(first + columns == label, 1.0, 0.0)
        gradient = tl.where(counts, gradient, 0.0).to(logits.dtype.element_ty)
        tl.store(logits + first + columns, gradient, mask=is_inside)
