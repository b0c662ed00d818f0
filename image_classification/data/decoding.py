"""Decode resident images in the background: the types and threads that their decoders share."""

from collections.abc import Callable, Iterator
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
