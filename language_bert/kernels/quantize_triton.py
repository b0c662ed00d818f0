"""The Triton kernel of quantize.py, in a module of its own: it is imported only where it runs."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 128  # of a tile: in 8 bits a cache line of 128 bytes, as it is and transposed
NUM_WARPS = 8


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
                columns.view(torch.uint8)[first:],
                maxima[index],
                sums[:, first:],
                num_rows,
                width,
                source.stride(0),
                parts[-1].stride(0),
                rows.stride(0),
                columns.stride(0),
                sums.stride(0),
                FUNCTION=function,
                MOST=torch.finfo(dtype).max,
                IS_GRADIENT=sums.shape[1] > 0,
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one tile of `rows` and `columns`, the largest magnitude in it and the sums of its columns."""
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < num_columns
    is_inside = is_row[:, None] & is_column[None, :]
    row, column = row.to(tl.int64), column.to(tl.int64)
    x = tl.load(source + row[:, None] * source_stride + column[None, :], mask=is_inside, other=0.0)
    x = x.to(tl.float32)
    if FUNCTION == "gelu":
        x = x * sigmoid_of_gelu(x)
    elif FUNCTION == "gelu_backward":
        value = tl.load(other + row[:, None] * other_stride + column[None, :], mask=is_inside, other=0.0)
        value = value.to(tl.float32)
        share = sigmoid_of_gelu(value)
        slope = 1.5957691216057308 * (1.0 + 3 * 0.044715 * value * value)  # 2 sqrt(2 / pi)
        x = x * share * (1.0 + value * (1.0 - share) * slope)
    tile = row_tile * tl.num_programs(1) + column_tile
    tl.store(maxima + tile, tl.max(tl.max(tl.abs(x), axis=1), axis=0))
    if IS_GRADIENT:
        tl.store(sums + row_tile * sums_stride + column, tl.sum(x, axis=0), mask=is_column)
    x = tl.clamp(x * (1.0 / tl.load(scale)), -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    rounded = x.to(tl.float8e5 if IS_GRADIENT else tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(rows + row[:, None] * rows_stride + column[None, :], rounded, mask=is_inside)
    transposed = tl.trans(rounded)
    places = columns + column[:, None] * columns_stride + row[None, :]
    tl.store(places, transposed, mask=is_column[:, None] & is_row[None, :])


@triton.jit
def sigmoid_of_gelu(x):
    """GELU's tanh form is x (1 + tanh(z)) / 2, and (1 + tanh(z)) / 2 is the sigmoid of 2 z."""
    return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 2 sqrt(2 / pi)
