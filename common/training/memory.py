"""The largest micro-batch that fits into memory; after a failed allocation, the next smaller one to try."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from common.errors import UserError
from common.evidence.records import counted

ALLOCATION_FAILED = (  # in errors' texts; oneDNN's do not name memory
    "out of memory",
    "defaultcpuallocator",
    "could not create a memory",
    "could not execute a primitive",
    "could not create a primitive",
    "status_alloc_failed",  # of cuBLAS and cuDNN
)


USABLE = 0.9  # of a device's memory: the rest is the driver's, and lost between allocations


class OutOfMemory(UserError):
    """A UserError for a batch that does not fit."""


@contextmanager
def explain_out_of_memory(
    key: str, size: int, *, num_samples: int, kept: str, num_ranks: int = 1
) -> Iterator[None]:
    """Turn a failed allocation in the block into an OutOfMemory that names the next smaller value of `key`.

    All `num_ranks` together compute `size` of `num_samples` at a time; a smaller size does not change `kept`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        smaller = next_smaller(size, num_samples)
        raise OutOfMemory(
            f"out of memory with {counted(math.ceil(size / num_ranks), 'sample')} at a time"
            + (f", asking for {asked[1]}" if asked else ""),
            where=key,
            hint=f"--set {key}={smaller} keeps {kept}" if smaller else "more devices, or a smaller model",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: on a GPU, in torch's allocator on the host, or in Python.

    An error that the failure caused counts, too, such as that of a broken CUDA graph capture.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in ALLOCATION_FAILED):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_out_of_memory(cause)


def total_bytes(device: torch.device, num_local: int) -> int:
    """Return the memory of a GPU, or the share of the host's for each of `num_local` ranks; never changes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total // num_local


def usable_bytes(device: torch.device, num_local: int) -> int:
    """Return the bytes of `total_bytes` that a training may take."""
    return int(USABLE * total_bytes(device, num_local))


def fitting_size(num_samples: int, available: int, needed: Callable[[int], int]) -> int:
    """Return the largest part of `num_samples` for which `needed` returns at most the `available` bytes.

    Raises UserError where not even one sample fits.
    """
    size = num_samples
    while needed(size) > available:
        smaller = next_smaller(size, num_samples)
        if smaller is None:
            needs, has = f"{needed(1) / 1e9:.1f} GB", f"{available / 1e9:.1f} GB"
            what = f"auto: a sample takes {needs}, a rank may have {has} here"
            raise UserError(what, where="micro_batch_size", hint="--set micro_batch_size=N")
        size = smaller
    return size


def next_smaller(size: int, num_samples: int) -> int | None:
    """Find the largest divisor of `num_samples` in [size / 2, size), else size / 2; None for size 1."""
    half = -(-size // 2)
    divisors = (part for part in range(size - 1, half - 1, -1) if num_samples % part == 0)
    return None if size == 1 else next(divisors, half)
