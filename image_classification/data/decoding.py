"""Decode resident images in the background: the types and threads that their decoders share."""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor

from image_classification.data.images import Images

Decoded = tuple[Tensor, np.ndarray]  # (n, stored_px, stored_px, 3) uint8; (n, 2) int64 height, width before
# Begins to decode samples (n,); its result waits for them.
Request = Callable[[np.ndarray], Callable[[], Decoded]]


@contextmanager
def decode_behind(
    images: Images, decode: Callable[[np.ndarray, list[np.ndarray]], Decoded]
) -> Iterator[Request]:
    """Read the files of requested samples in one thread of Python, and decode what was read in another."""

    def decode_what_was_read(samples: np.ndarray, content: Future[list[np.ndarray]]) -> Decoded:
        return decode(samples, content.result())

    def request(samples: np.ndarray) -> Callable[[], Decoded]:
        return running.submit(
            decode_what_was_read, samples, reading.submit(read_files, images, samples)
        ).result

    reading, running = (ThreadPoolExecutor(1, thread_name_prefix="decoding") for _ in range(2))
    try:
        yield request
    finally:
        running.shutdown(cancel_futures=True)
        reading.shutdown(cancel_futures=True)


def read_files(images: Images, samples: np.ndarray) -> list[np.ndarray]:
    return [np.frombuffer(images.jpeg(int(sample)), np.uint8) for sample in samples]


def ignore_notice_of_decoder() -> None:
    """Silence torchvision 0.29: TorchCodec will replace its decoder of images, which 0.26 to 0.29 have."""
    warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning)


def on_side_stream(device: torch.device, compute: Callable[[], Tensor]) -> Tensor:
    """Return what `compute` returns; on a GPU, on a side stream beside the training's, and wait for it."""
    if device.type != "cuda":
        return compute()
    stream = side_stream(device)
    # Without `device` around it, the end of the stream's block would select GPU 0 again: every rank would
    # then take memory of that GPU.
    with torch.cuda.device(device), torch.cuda.stream(stream):
        result = compute()
    stream.synchronize()
    result.record_stream(torch.cuda.current_stream(device))
    return result


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Open the one side stream of a device: torch keeps freed memory for the stream that used it."""
    return torch.cuda.Stream(device)
