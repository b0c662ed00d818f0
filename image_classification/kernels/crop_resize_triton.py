"""The Triton kernel of crop_resize.py, in a module of its own: it is imported only where it runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_ROWS = 16  # of one program; divides the usual sizes 96, 128, 160, 176 and 224
NUM_VALUES = 64  # neighbours in an output row of columns x 3 channels: 128 bytes in half precision


def crop_resize_triton(
    pixels: Tensor,
    samples: Tensor,
    boxes: Tensor,
    flips: Tensor,
    *,
    size_px: int,
    scale: list[float],
    shift: list[float],
    dtype: torch.dtype,
) -> Tensor:
    """Return what `crop_resize` does; channel c becomes value * scale[c] + shift[c].

    The grid depends on the batch and `size_px` alone; at most 65535 crops.
    """
    shape = (len(samples), 3, size_px, size_px)
    crops = torch.empty(shape, dtype=dtype, device=pixels.device, memory_format=torch.channels_last)
    grid = (triton.cdiv(3 * size_px, NUM_VALUES), triton.cdiv(size_px, NUM_ROWS), len(samples))
    stored_px = pixels.shape[1]
    with torch.cuda.device_of(pixels):
        crop_resize_kernel[grid](
            pixels,
            samples,
            boxes,
            flips,
            crops,
            stored_px,
            size_px,
            stored_px / size_px,
            *scale,
            *shift,
            NUM_ROWS=NUM_ROWS,
            NUM_VALUES=NUM_VALUES,
            enable_fp_fusion=True,  # multiply and add in one instruction: not Triton's default from 3.10 on
        )
    return crops


@triton.jit
def crop_resize_kernel(
    pixels,
    samples,
    boxes,
    flips,
    crops,
    stored_px,
    size_px,
    shrinkage,  # stored_px / size_px, from the host: a division on the GPU would not be rounded correctly
    scale_red,
    scale_green,
    scale_blue,
    shift_red,
    shift_green,
    shift_blue,
    NUM_ROWS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
):
    """Compute NUM_ROWS x NUM_VALUES outputs of one crop, each from the stored pixels under its triangles.

    Neighbouring lanes read neighbouring bytes; rows are read again by other programs, from the caches.
    """
    values = tl.program_id(0) * NUM_VALUES + tl.arange(0, NUM_VALUES)
    rows = tl.program_id(1) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    crop = tl.program_id(2).to(tl.int64)  # offsets from here on exceed 32 bits
    columns, channels = values // 3, values % 3
    unflipped = tl.where(tl.load(flips + crop) != 0, size_px - 1 - columns, columns)

    box = boxes + crop * 4
    top, bottom, y_centres, first_y, y_support = locate_taps(
        tl.load(box), tl.load(box + 2), rows, stored_px, shrinkage
    )
    left, right, x_centres, first_x, x_support = locate_taps(
        tl.load(box + 1), tl.load(box + 3), unflipped, stored_px, shrinkage
    )
    image = pixels + tl.load(samples + crop) * (stored_px * stored_px * 3)
    y_slope, x_slope = 1.0 / y_support, 1.0 / x_support  # of the triangles

    totals = tl.zeros((NUM_ROWS, NUM_VALUES), tl.float32)
    weight_sums = tl.zeros((NUM_ROWS, NUM_VALUES), tl.float32)
    for i in range(tl.ceil(2 * y_support).to(tl.int32)):
        y = first_y + i
        y_weights = tap_weights(y, y_centres, y_slope, top, bottom)
        starts = tl.minimum(tl.maximum(y, 0), stored_px - 1) * (3 * stored_px)
        for j in range(tl.ceil(2 * x_support).to(tl.int32)):
            x = first_x + j
            x_weights = tap_weights(x, x_centres, x_slope, left, right)
            offsets = tl.minimum(tl.maximum(x, 0), stored_px - 1) * 3 + channels
            weights = y_weights[:, None] * x_weights[None, :]
            totals += weights * tl.load(image + (starts[:, None] + offsets[None, :])).to(tl.float32)
            weight_sums += weights

    scales = tl.where(channels == 0, scale_red, tl.where(channels == 1, scale_green, scale_blue))
    shifts = tl.where(channels == 0, shift_red, tl.where(channels == 1, shift_green, shift_blue))
    normalized = totals / weight_sums * scales[None, :] + shifts[None, :]
    row_length = 3 * size_px
    targets = crops + crop * (size_px * row_length) + (rows[:, None] * row_length + values[None, :])
    is_inside = (rows < size_px)[:, None] & (values < row_length)[None, :]
    tl.store(targets, normalized.to(crops.dtype.element_ty), mask=is_inside)


@triton.jit
def locate_taps(start, length, positions, stored_px, shrinkage):
    """Compute both ends of a crop, the centres of outputs, their first taps, and the filter's support."""
    scale = length * shrinkage
    support = tl.maximum(scale, 1.0)
    low = start * stored_px
    centres = low + (positions + 0.5) * scale
    first = tl.floor(centres - support + 0.5).to(tl.int32)
    return low, (start + length) * stored_px, centres, first, support


@triton.jit
def tap_weights(stored, centres, slope, low, high):
    begins = stored.to(tl.float32)
    triangle = tl.maximum(1.0 - tl.abs(begins + 0.5 - centres) * slope, 0.0)
    part_inside = tl.maximum(tl.minimum(begins + 1.0, high) - tl.maximum(begins, low), 0.0)
    return triangle * part_inside
