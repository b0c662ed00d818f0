"""The Triton kernels of blur.py, in a module of their own: it is imported only where they run."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Outputs of a program of 128 threads, neighbours in memory. A thread computes 8 of the blur alone. After a
# max-pool it computes 4, in about 70 registers; backward 2, of 2x2 pixels, in 90 to 120 registers, because 4
# would need all registers that a thread can have.
NUM_VALUES, NUM_VALUES_MAX, NUM_VALUES_MAX_BACKWARD = 1024, 512, 256


def blur_triton(images: Tensor, result: Tensor, *, stride: int, is_backward: bool) -> Tensor:
    """Fill `result` with blurred images, or backward with the gradient of images; both are channels last."""
    tensors = (images, result)
    launch(blur_kernel, images, tensors, result, NUM_VALUES, STRIDE=stride, IS_BACKWARD=is_backward)
    return result


def max_blur_triton(images: Tensor, result: Tensor) -> Tensor:
    """Fill `result` with the blurred maxima of images; both are channels last."""
    launch(max_blur_kernel, images, (images, result), result, NUM_VALUES_MAX)
    return result


def max_blur_backward_triton(images: Tensor, gradient: Tensor, result: Tensor) -> Tensor:
    """Fill `result` with the gradient of images, from that of their blurred maxima; all are channels last."""
    launch(max_blur_backward_kernel, images, (images, gradient, result), gradient, NUM_VALUES_MAX_BACKWARD)
    return result


def launch(
    kernel: triton.JITFunction,
    images: Tensor,
    tensors: tuple[Tensor, ...],
    outputs: Tensor,
    num_values: int,
    **constants: Any,
) -> None:
    """Start a program for every `num_values` values of each image in `outputs`."""
    num_images, num_channels, *size = images.shape
    size_out = outputs.shape[2:]
    num_programs = triton.cdiv(num_channels * size_out.numel(), num_values)
    if outputs.numel() == 0:
        return
    with torch.cuda.device_of(images):
        kernel[(num_programs, num_images)](
            *tensors,
            *size,
            *size_out,
            NUM_CHANNELS=num_channels,
            NUM_VALUES=num_values,
            enable_fp_fusion=True,  # multiply and add in one instruction: not Triton's default from 3.10 on
            **constants,
        )


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
    images = find_image(images, height_in, width_in, NUM_CHANNELS)
    result = find_image(result, height_out, width_out, NUM_CHANNELS)
    values, channels, columns, rows = locate_values(width_out, NUM_CHANNELS, NUM_VALUES)
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
def find_image(images, height, width, NUM_CHANNELS: tl.constexpr):
    # The memory of this program's image; offsets inside of it fit 32 bits.
    return images + tl.program_id(1).to(tl.int64) * height * width * NUM_CHANNELS


@triton.jit
def locate_values(width, NUM_CHANNELS: tl.constexpr, NUM_VALUES: tl.constexpr):
    # The places of this program's values in the memory of an image, and their channels, columns and rows.
    values = tl.program_id(0) * NUM_VALUES + tl.arange(0, NUM_VALUES)
    channels, places = values % NUM_CHANNELS, values // NUM_CHANNELS
    return values, channels, places % width, places // width


@triton.jit
def find_tap(positions, shift, length, STRIDE: tl.constexpr, IS_BACKWARD: tl.constexpr):
    # Backward, the taps are the outputs whose windows hold `positions`.
    if IS_BACKWARD:
        scaled = positions + shift
        taps = scaled // STRIDE
        return taps, (scaled >= 0) & (scaled % STRIDE == 0) & (taps < length)
    taps = positions * STRIDE + shift
    return taps, (taps >= 0) & (taps < length)


@triton.jit
def max_blur_kernel(
    images,
    result,
    height,
    width,
    height_out,
    width_out,
    NUM_CHANNELS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
):
    """Compute NUM_VALUES neighbours in the memory of one image, each from up to 25 pixels."""
    images = find_image(images, height, width, NUM_CHANNELS)
    result = find_image(result, height_out, width_out, NUM_CHANNELS)
    values, channels, x, y = locate_values(width_out, NUM_CHANNELS, NUM_VALUES)

    maxima = ((), (), ())  # by column of centres: the maximum of three pixels of each row
    for i in tl.static_range(5):
        row = load_row(
            images, 2 * y - 2 + i, 2 * x - 2, channels, height, width, NUM_CHANNELS, 5, -float("inf")
        )
        maxima = append(maxima, find_maxima(row))

    totals = tl.zeros((NUM_VALUES,), tl.float32)
    columns = find_maxima(maxima[0]), find_maxima(maxima[1]), find_maxima(maxima[2])
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            weight = (1 + i % 2) * (1 + j % 2) / 16  # 1, 2, 1 along either axis
            is_centre = is_within(2 * y - 1 + i, height) & is_within(2 * x - 1 + j, width)
            totals = tl.fma(tl.where(is_centre, columns[j][i], 0.0), weight, totals)
    tl.store(result + values, totals.to(result.dtype.element_ty), mask=y < height_out)


@triton.jit
def max_blur_backward_kernel(
    images,
    gradient,
    result,
    height,
    width,
    height_out,
    width_out,
    NUM_CHANNELS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
):
    """Compute 2x2 pixels for each of NUM_VALUES outputs (y, x): rows 2y and 2y + 1, columns 2x and 2x + 1.

    These pixels lie in windows of 4x4 centres, which cover 6x6 pixels and go into 3x3 outputs.
    """
    images = find_image(images, height, width, NUM_CHANNELS)
    gradient = find_image(gradient, height_out, width_out, NUM_CHANNELS)
    result = find_image(result, height, width, NUM_CHANNELS)
    values, channels, x, y = locate_values(width_out, NUM_CHANNELS, NUM_VALUES)

    rows, maxima = (), ((), (), (), ())  # by column of centres: the maximum of three pixels of each row
    for i in tl.static_range(6):
        row = load_row(
            images, 2 * y - 2 + i, 2 * x - 2, channels, height, width, NUM_CHANNELS, 6, -float("inf")
        )
        rows, maxima = rows + (row,), append(maxima, find_maxima(row))
    sums = ((), (), (), ())  # by column of centres: the gradient from the outputs of each row
    for i in tl.static_range(3):
        row = load_row(gradient, y - 1 + i, x - 1, channels, height_out, width_out, NUM_CHANNELS, 3, 0.0)
        sums = append(sums, sum_outputs(row, x, width))

    for i in tl.static_range(2):
        of_row = ()  # by column of centres: the gradient of the maximum of three pixels of this row
        for j in tl.static_range(4):
            of_row = of_row + (sum_where_first(maxima[j], sum_outputs(sums[j], y, height), i),)
        for j in tl.static_range(2):
            total = sum_where_first(rows[i + 2], of_row, j) / 16
            offsets = ((2 * y + i) * width + 2 * x + j) * NUM_CHANNELS + channels
            is_inside = (2 * y + i < height) & (2 * x + j < width)
            tl.store(result + offsets, total.to(result.dtype.element_ty), mask=is_inside)


@triton.jit
def load_row(
    images, y, x, channels, height, width, NUM_CHANNELS: tl.constexpr, LENGTH: tl.constexpr, outside
):
    """Load LENGTH pixels of row y from column x on as float32; pixels that do not exist are `outside`."""
    first, row = images + (y * width + x) * NUM_CHANNELS + channels, ()
    for j in tl.static_range(LENGTH):
        mask = is_within(y, height) & is_within(x + j, width)
        row = row + (tl.load(first + j * NUM_CHANNELS, mask=mask, other=outside).to(tl.float32),)
    return row


@triton.jit
def is_within(positions, length):
    return (positions >= 0) & (positions < length)


@triton.jit
def append(columns, row):
    longer = ()
    for j in tl.static_range(len(columns)):
        longer = longer + (columns[j] + (row[j],),)
    return longer


@triton.jit
def find_maxima(values):
    """Find the maxima of values 0 to 2, 1 to 3 and so on; two neighbours share a comparison."""
    maxima = ()
    for i in tl.static_range(len(values) - 2):
        if i % 2 == 0:
            maximum = larger(values[i], larger(values[i + 1], values[i + 2]))
        else:
            maximum = larger(larger(values[i], values[i + 1]), values[i + 2])
        maxima = maxima + (maximum,)
    return maxima


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sum_outputs(gradients, positions, length):
    """Return what centres 2p - 1 to 2p + 2 get from outputs p - 1 to p + 1, by weights 1, 2, 1.

    Centres outside of the image get nothing. Outputs that do not exist are given as 0.
    """
    before, middle, after = gradients[0], gradients[1], gradients[2]
    is_first_inside = (positions > 0).to(tl.float32)
    is_third_inside = (2 * positions + 1 < length).to(tl.float32)
    return before + is_first_inside * middle, 2 * middle, is_third_inside * middle + after, 2 * after


@triton.jit
def sum_where_first(values, gradients, START: tl.constexpr):
    """Return the sum of the gradients of windows whose first maximum is value START + 2.

    These windows begin at START, START + 1 and START + 2. Of equal maxima the first counts, as in torch.
    """
    value, before, after = values[START + 2], values[START + 1], values[START + 3]
    is_last = value > larger(values[START], before)
    is_middle = (value > before) & (value >= after)
    is_first = value >= larger(after, values[START + 4])
    total = tl.where(is_last, gradients[START], 0.0)
    total += tl.where(is_middle, gradients[START + 1], 0.0)
    return total + tl.where(is_first, gradients[START + 2], 0.0)
