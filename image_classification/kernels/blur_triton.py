"""The Triton kernel of blur.py, in a module of its own: it is imported only where it runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_VALUES = 1024  # outputs of a program, neighbours in memory: 8 in each of 128 threads


def blur_triton(images: Tensor, height: int, width: int, *, stride: int, is_backward: bool) -> Tensor:
    """Blur channels-last images to `height` x `width`, or take gradients back to images of that size."""
    shape = (*images.shape[:2], height, width)
    result = torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)
    num_programs = triton.cdiv(images.shape[1] * height * width, NUM_VALUES)
    if result.numel() == 0:
        return result
    with torch.cuda.device_of(images):
        blur_kernel[(num_programs, len(result))](
            images,
            result,
            images.shape[2],
            images.shape[3],
            height,
            width,
            NUM_CHANNELS=images.shape[1],
            STRIDE=stride,
            IS_BACKWARD=is_backward,
            NUM_VALUES=NUM_VALUES,
            enable_fp_fusion=True,  # multiply and add in one instruction: not Triton's default from 3.10 on
        )
    return result


@triton.jit
def blur_kernel(
    images,
    result,
    height_in,
    width_in,
    height_out,
    width_out,
    NUM_CHANNELS: tl.constexpr,
    STRIDE: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
    NUM_VALUES: tl.constexpr,
):
    """Compute NUM_VALUES neighbours in the memory of one image, each from up to nine values."""
    image = tl.program_id(1).to(tl.int64)  # offsets inside of an image fit 32 bits
    images += image * height_in * width_in * NUM_CHANNELS
    result += image * height_out * width_out * NUM_CHANNELS
    values = tl.program_id(0) * NUM_VALUES + tl.arange(0, NUM_VALUES)
    channels, places = values % NUM_CHANNELS, values // NUM_CHANNELS
    columns, rows = places % width_out, places // width_out
    is_inside = rows < height_out

    totals = tl.zeros((NUM_VALUES,), tl.float32)
    for i in tl.static_range(3):
        y, y_counts = find_tap(rows, i - 1, height_in, STRIDE, IS_BACKWARD)
        for j in tl.static_range(3):
            x, x_counts = find_tap(columns, j - 1, width_in, STRIDE, IS_BACKWARD)
            weight = (1 + i % 2) * (1 + j % 2) / 16  # 1, 2, 1 along either axis
            offsets = (y * width_in + x) * NUM_CHANNELS + channels
            taps = tl.load(images + offsets, mask=is_inside & y_counts & x_counts, other=0.0)
            totals += weight * taps.to(tl.float32)
    tl.store(result + values, totals.to(result.dtype.element_ty), mask=is_inside)


@triton.jit
def find_tap(positions, shift, length, STRIDE: tl.constexpr, IS_BACKWARD: tl.constexpr):
    # Backward, the taps are the outputs whose windows hold `positions`.
    if IS_BACKWARD:
        scaled = positions + shift
        taps = scaled // STRIDE
        return taps, (scaled >= 0) & (scaled % STRIDE == 0) & (taps < length)
    taps = positions * STRIDE + shift
    return taps, (taps >= 0) & (taps < length)
