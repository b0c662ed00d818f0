"""Decoders of the resident loader, squashing images to squares: DALI (nvJPEG on a GPU) or threads of PIL."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from image_classification.data.dali import build_squashing, gpu_id, has_dali, import_dali, raise_damaged
from image_classification.data.images import Images, decode

Name = Literal["auto", "threads", "dali"]
Decoded = tuple[Tensor, np.ndarray]  # (n, stored_px, stored_px, 3) uint8; (n, 2) int64 height, width before


class Decoder(Protocol):
    """Decodes requested images in the background."""

    def request(self, samples: np.ndarray) -> Callable[[], Decoded]:
        """Start decoding samples (n,); the returned function waits for them, or raises the error."""

    def close(self) -> None:
        """End the threads."""


class ThreadDecoder:
    """PIL in threads of the CPU; the pixels are on the host, pinned for a GPU."""

    def __init__(self, images: Images, stored_px: int, *, device: torch.device, num_threads: int) -> None:
        self.images, self.stored_px, self.is_pinned = images, stored_px, device.type == "cuda"
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="decoding")

    def request(self, samples: np.ndarray) -> Callable[[], Decoded]:
        shape = (len(samples), self.stored_px, self.stored_px, 3)
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=self.is_pinned)
        sizes = np.zeros((len(samples), 2), np.int64)
        rows = zip(samples, pixels.numpy(), sizes, strict=True)
        decoding = [self.pool.submit(self.decode, int(sample), *row) for sample, *row in rows]

        def wait() -> Decoded:
            for image in decoding:
                image.result()
            return pixels, sizes

        return wait

    def decode(self, sample: int, target: np.ndarray, size: np.ndarray) -> None:
        """Write the squashed image and its size. No torch here: see `loader.prefetch`."""
        image = decode(self.images, sample)
        size[:] = image.height, image.width
        target[...] = np.asarray(image.resize(target.shape[:2], Image.Resampling.BILINEAR))

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


class DaliDecoder:
    """DALI's decoder, nvJPEG on a GPU; the pixels are where it works.

    One thread of Python reads files, another runs the pipeline on what was read.
    """

    def __init__(
        self, images: Images, stored_px: int, *, device: torch.device, num_threads: int, most: int
    ) -> None:
        self.images = images
        self.pipeline = build_squashing(import_dali(), stored_px, most, num_threads, gpu_id(device))
        self.reading = ThreadPoolExecutor(1, thread_name_prefix="decoding")
        self.running = ThreadPoolExecutor(1, thread_name_prefix="decoding")

    def request(self, samples: np.ndarray) -> Callable[[], Decoded]:
        content = self.reading.submit(self.read, samples)
        return self.running.submit(self.decode, samples, content).result

    def read(self, samples: np.ndarray) -> list[np.ndarray]:
        return [np.frombuffer(self.images.jpeg(int(sample)), np.uint8) for sample in samples]

    def decode(self, samples: np.ndarray, content: Future[list[np.ndarray]]) -> Decoded:
        try:
            (pixels,) = self.pipeline.run(content=content.result())
        except RuntimeError:
            raise_damaged(self.images, [samples])
            raise
        sizes = np.array([self.images.size(int(sample)) for sample in samples], np.int64)
        return torch.from_dlpack(pixels.as_tensor()), sizes

    def close(self) -> None:
        """End DALI's threads now: see `dali.dali_batches`."""
        self.running.shutdown(cancel_futures=True)
        self.reading.shutdown(cancel_futures=True)
        self.pipeline.__del__()


def uses_dali(name: Name, device: torch.device) -> bool:
    """Return whether DALI decodes: where it is asked for, else on a GPU where it is installed."""
    if name != "auto" or device.type != "cuda":
        return name == "dali"
    return has_dali()


def open_decoder(
    name: Name, images: Images, stored_px: int, *, device: torch.device, num_threads: int, most: int
) -> Decoder:
    """Return the decoder of this name, for `most` images at once. Raises UserError without DALI."""
    if uses_dali(name, device):
        return DaliDecoder(images, stored_px, device=device, num_threads=num_threads, most=most)
    return ThreadDecoder(images, stored_px, device=device, num_threads=num_threads)
