"""The Triton kernel of quantize.py, in a module of its own: it is imported only where it runs."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 64  # of a tile
NUM_WARPS = 4


def allocate(
    parts: Sequence[Tensor], dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty rows (M, N), columns (N, M), maxima of tiles, and sums (tiles, N) or (tiles, 0)."""
    sources = parts if function == "copy" else parts[:1]
    num_rows, width = parts[0].shape
    num_columns, num_tiles = width * len(sources), -(-num_rows // ROWS)
    rows = parts[0].new_empty(num_rows, num_columns, dtype=dtype)
    columns = parts[0].new_empty(num_columns, num_rows, dtype=dtype)
    maxima = parts[0].new_empty(len(sources), num_tiles, -(-width // COLUMNS), dtype=torch.float32)
    num_sums = num_columns if dtype == torch.float8_e5m2 else 0  # of gradients
    sums = parts[0].new_empty(num_tiles, num_sums, dtype=torch.float32)
    return rows, columns, maxima, sums


def quantize_triton(
    parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    rows, columns, maxima, sums = allocate(parts, dtype, function)
    num_rows, width = parts[0].shape
    with torch.cuda.device_of(rows):
        for index, source in enumerate(parts[: len(maxima)]):
            first = index * width
            quantize_kernel[maxima.shape[1:]](
                source,
                parts[-1],
                scale,
                rows.view(torch.uint8)[:, first:],
                columns.view(torch.int32)[first:],
                maxima[index],
                sums[:, first:],
                num_rows,
                width,
                source.stride(0),
                parts[-1].stride(0),
                rows.stride(0),
                columns.stride(0) // 4,
                sums.stride(0),
                FUNCTION=function,
                MOST=torch.finfo(dtype).max,
                IS_GRADIENT=sums.shape[1] > 0,
                HAS_ASSEMBLY=rows.is_cuda,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                num_warps=NUM_WARPS,
                enable_fp_fusion=True,
            )
    return rows, columns, maxima, sums


@triton.jit
def quantize_kernel(
    source,
    other,
    scale,
    rows,
    columns,
    maxima,
    sums,
    num_rows,
    num_columns,
    source_stride,
    other_stride,
    rows_stride,
    columns_stride,
    sums_stride,
    FUNCTION: tl.constexpr,
    MOST: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    HAS_ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one tile of `rows` and `columns`, the largest magnitude in it and the sums of its columns.

    Four rows at a time: a thread joins four bytes of a column to a word of 32 bits, and shared memory
    transposes words in place of bytes.
    """
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    word = row_tile * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    inverse = 1.0 / tl.load(scale)
    xs = load_rows(source, source_stride, word, column, num_rows, is_column)
    others = xs
    if FUNCTION == "gelu_backward":
        others = load_rows(other, other_stride, word, column, num_rows, is_column)
    words = tl.zeros((ROWS // 4, COLUMNS), tl.int32)
    largest = tl.zeros((ROWS // 4, COLUMNS), tl.float32)
    total = tl.zeros((ROWS // 4, COLUMNS), tl.float32)
    for part in tl.static_range(4):
        x = xs[part].to(tl.float32)
        if FUNCTION == "gelu":
            x = x * sigmoid_of_gelu(x)
        elif FUNCTION == "gelu_backward":
            value = others[part].to(tl.float32)
            share = sigmoid_of_gelu(value)
            slope = 1.5957691216057308 * (1.0 + 3 * 0.044715 * value * value)  # 2 sqrt(2 / pi)
            x = x * share * (1.0 + value * (1.0 - share) * slope)
        largest = tl.maximum(largest, tl.abs(x))
        if IS_GRADIENT:
            total += x
        x = tl.clamp(x * inverse, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        rounded = round_to_bytes(x, IS_GRADIENT, HAS_ASSEMBLY)
        places, is_inside = place_rows(rows, rows_stride, word, column, num_rows, is_column, part)
        tl.store(places, rounded, mask=is_inside)
        words |= rounded.to(tl.int32) << (8 * part)
    places = columns + column.to(tl.int64)[:, None] * columns_stride + word[None, :]
    tl.store(places, tl.trans(words), mask=is_column[:, None] & (word < num_rows // 4)[None, :])
    tile = row_tile * tl.num_programs(1) + column_tile
    tl.store(maxima + tile, tl.max(tl.max(largest, axis=1), axis=0))
    if IS_GRADIENT:
        tl.store(sums + row_tile * sums_stride + column, tl.sum(total, axis=0), mask=is_column)


@triton.jit
def place_rows(x, stride, word, column, num_rows, is_column, part):
    # The places of one row of each four in memory, and which of them are inside of the matrix.
    row = (word * 4 + part).to(tl.int64)
    return x + row[:, None] * stride + column[None, :], (row < num_rows)[:, None] & is_column[None, :]


@triton.jit
def load_rows(x, stride, word, column, num_rows, is_column):
    # The first, second, third and fourth row of each four; all are on their way at once.
    rows = ()
    for part in tl.static_range(4):
        places, is_inside = place_rows(x, stride, word, column, num_rows, is_column, part)
        rows += (tl.load(places, mask=is_inside, other=0.0),)
    return rows


@triton.jit
def round_to_bytes(x, IS_GRADIENT: tl.constexpr, HAS_ASSEMBLY: tl.constexpr):
    """Round to E5M2 or E4M3, four values of a thread at a time.

    A conversion returns two bytes. Where a program used such a pair both whole and byte by byte, NVIDIA's
    assembler (12.8 and 12.9) made code that reads registers that nothing has written. These instructions
    return four bytes in one register.
    """
    if HAS_ASSEMBLY:
        pair: tl.constexpr = "cvt.rn.satfinite.e5m2x2.f32" if IS_GRADIENT else "cvt.rn.satfinite.e4m3x2.f32"
        rounded = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; " + pair + " a, $2, $1; " + pair + " b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,r,r,r,r",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        rounded = x.to(tl.float8e5 if IS_GRADIENT else tl.float8e4nv).to(tl.uint8, bitcast=True)
    return rounded


@triton.jit
def sigmoid_of_gelu(x):
    """GELU's tanh form is x (1 + tanh(z)) / 2, and (1 + tanh(z)) / 2 is the sigmoid of 2 z."""
    return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
