"""The Triton kernel of transpose.py, in a module of its own: it is imported only where it runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # rows and columns: a whole cache line either way


def transpose_bytes_triton(matrix: Tensor) -> Tensor:
    assert matrix.is_contiguous() and matrix.element_size() == 1
    num_rows, num_columns = matrix.shape
    transposed = matrix.new_empty(num_columns, num_rows)
    with torch.cuda.device_of(matrix):
        transpose_kernel[(triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE))](
            matrix.view(torch.uint8),
            transposed.view(torch.uint8),
            num_rows,
            num_columns,
            TILE=TILE,
            enable_fp_fusion=True,  # nothing to fuse: Triton 3.9 warns without it
        )
    return transposed


@triton.jit
def transpose_kernel(matrix, transposed, num_rows, num_columns, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row, is_column = rows < num_rows, columns < num_columns
    places = matrix + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tile = tl.load(places, mask=is_row[:, None] & is_column[None, :], other=0)
    places = transposed + columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
    tl.store(places, tl.trans(tile), mask=is_column[:, None] & is_row[None, :])
