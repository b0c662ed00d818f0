"""The transpose of a matrix of one-byte numbers, as a pass of its own over memory.

Torch's compiler writes a transpose from the kernel that computes the matrix, value by value: on an H200 the
largest such kernel of `optimized_fp8` reached a third of the rate of a copy. Here a tile is turned in shared
memory, so that rows are read whole and columns are written whole.
"""

import os

import torch
from torch import Tensor


def transpose_bytes(matrix: Tensor) -> Tensor:
    """Return the transpose (N, M), contiguous, of a contiguous matrix (M, N) of one-byte numbers.

    On a GPU, or with TRITON_INTERPRET=1, it is one Triton kernel, which compilers see as one operator.
    """
    if matrix.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        transposed: Tensor = torch.ops.ttt.transpose_bytes(matrix)
        return transposed
    return matrix.t().contiguous()


@torch.library.custom_op("ttt::transpose_bytes", mutates_args=())
def transpose_bytes_operator(matrix: Tensor) -> Tensor:
    from language_bert.kernels.transpose_triton import transpose_bytes_triton

    return transpose_bytes_triton(matrix)


@transpose_bytes_operator.register_fake
def allocate_transposed(matrix: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape[::-1])
