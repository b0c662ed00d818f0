"""Begin work before its result is needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Decoded = tuple[Tensor, np.ndarray]  # (n, stored_px, stored_px, 3) uint8; (n, 2) int64 height, width before
# Begins to decode samples (n,); its result waits for them.
Request = Callable[[np.ndarray], Callable[[], Decoded]]
Item = TypeVar("Item")
Built = TypeVar("Built")


def begin_ahead(begun: Iterable[Item], num_ahead: int) -> Iterator[Item]:
    """Yield the items of `begun` in order, each after the next `num_ahead` have been taken from it."""
    waiting: deque[Item] = deque()
    for item in begun:
        waiting.append(item)
        if len(waiting) > num_ahead:
            yield waiting.popleft()
    yield from waiting


def prefetch(build: Callable[[Item], Built], items: Iterable[Item]) -> Iterator[Built]:
    """Yield `build(item)` of every item while a second thread builds the next; its errors are raised here.

    Decoding and resizing in PIL release the interpreter lock and use one core. No torch operation belongs in
    `build`: it would start a second set of compute threads, and the training thread would wait for them.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="images") as pool:
        for pending in begin_ahead((pool.submit(build, item) for item in items), 1):
            yield pending.result()


@contextmanager
def decode_behind(
    read: Callable[[np.ndarray], Item], decode: Callable[[np.ndarray, Item], Decoded]
) -> Iterator[Request]:
    """Read the files of requested samples in one thread of Python, and decode what was read in another."""

    def decode_what_was_read(samples: np.ndarray, content: Future[Item]) -> Decoded:
        return decode(samples, content.result())

    def request(samples: np.ndarray) -> Callable[[], Decoded]:
        return running.submit(decode_what_was_read, samples, reading.submit(read, samples)).result

    reading, running = (ThreadPoolExecutor(1, thread_name_prefix="decoding") for _ in range(2))
    try:
        yield request
    finally:
        running.shutdown(cancel_futures=True)
        reading.shutdown(cancel_futures=True)


def on_side_stream(device: torch.device, compute: Callable[[], Tensor]) -> Tensor:
    """Return what `compute` returns; on a GPU, on a side stream beside the training's, and wait for it."""
    if device.type != "cuda":
        return compute()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        result = compute()
    stream.synchronize()
    result.record_stream(torch.cuda.current_stream(device))
    return result
