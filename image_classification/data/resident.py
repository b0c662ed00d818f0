"""Images decoded once and kept as pixels; an image that was used is never read or decoded again.

Several ranks share the images for the whole run: each has its own, decodes these and keeps nothing else.
Each image is kept squashed to a square of `stored_px`, with its height and width: a crop is drawn in pixels
of the image, as in every loader, and then cut from the square, since it ends as a square in any case. What
that loses: detail along an axis on which the image has more than `stored_px` pixels. Of images kept at 256,
crops for 176 pixels that show less than about half of the image are enlarged instead of shrunk; the others
are filtered twice and slightly softer. The effect on accuracy was not measured.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from common.data import sampler
from common.errors import UserError
from image_classification.data.decoders import Decoded, Name, open_decoder
from image_classification.data.images import Images
from image_classification.data.loader import MEAN, STD, PixelBatch, TrainSettings, TrainStep, train_steps
from image_classification.kernels.crop_resize import crop_resize

GIB = 2**30
RESERVE_BYTES = 4 * GIB  # of a GPU, for weights, optimizer and libraries
RESERVE_BYTES_PER_IMAGE = 42 * 2**20  # of a batch: ResNet-50 at 224 px (calculated)
LEAST_PX, ROUND_TO = 96, 16  # of a size that is proposed
NUM_STEPS_AHEAD = 3  # being decoded while the training works on another

Where = Literal["device", "host"]


def available_bytes(device: torch.device, where: Where, *, batch_size: int) -> int:
    """Return the memory left for pixels: that of the GPU beside a training, or this rank's of the host."""
    if where == "device" and device.type == "cuda":
        reserve = RESERVE_BYTES + batch_size * RESERVE_BYTES_PER_IMAGE
        still_needed = max(0, reserve - torch.cuda.memory_reserved(device))
        return max(0, torch.cuda.mem_get_info(device)[0] - still_needed)
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun: they share the memory
    return psutil.virtual_memory().available // num_processes


def stored_bytes(num_samples: int, stored_px: int) -> int:
    return num_samples * stored_px**2 * 3


def check_budget(
    num_samples: int, stored_px: int, *, device: torch.device, where: Where, batch_size: int
) -> None:
    """Raise UserError unless so many stored images fit where they are to stay, beside the training."""
    needed, free = stored_bytes(num_samples, stored_px), available_bytes(device, where, batch_size=batch_size)
    if needed > free:
        place = "on the GPU" if where == "device" and device.type == "cuda" else "in memory"
        fitting = math.isqrt(free // (3 * num_samples)) // ROUND_TO * ROUND_TO
        smaller = f"data.stored_px={fitting} or " if fitting >= LEAST_PX else ""
        raise UserError(
            f"{needed / GIB:.1f} GiB of decoded pixels needed, {free / GIB:.1f} GiB free {place}",
            where="data.loader",
            hint=f"use {smaller}data.stored_on=host, or stream with data.loader=workers or dali",
        )


def allocate(shape: tuple[int, ...], *, device: torch.device, where: Where) -> Tensor:
    """Allocate uint8 memory for the rest of the process: on `device`, or on the host, pinned for a GPU."""
    if where == "device":
        return torch.empty(shape, dtype=torch.uint8, device=device)
    memory = torch.empty(shape, dtype=torch.uint8)
    if device.type == "cuda":  # torch would round the size of pinned memory up to a power of two
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return memory


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy `values` to the device; the host does not wait for a GPU."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A step whose new images are being decoded."""

    step: TrainStep
    missing: np.ndarray  # (num_missing,) int64, rows of those samples that no step before it needed
    decoded: Callable[[], Decoded] | None  # waits for them; None: nothing is missing


class ResidentLoader:
    """Training batches from pixels that stay in memory once an image was used: an iterable without end.

    Yields samples (batch,) int64 and their crops (batch, 3, size, size) on `device` in `dtype`, normalised,
    channels last. The order is that of `sampler.shard_batches`, alone that of every loader, and crops are
    those of `loader.worker_batches`, also from a later `start_step`. A step decodes only what is not stored
    yet, with the `decoder` of that name, whose `num_threads` threads end with the iterator. The pixels lie on
    the device, beside a training on `micro_batch_size` images at once, or in memory of the host, from which
    each batch is copied. Raises UserError at once if they would not fit, and when its turn comes for an image
    that cannot be decoded.
    """

    def __init__(
        self,
        images: Images,
        settings: TrainSettings,
        *,
        stored_px: int = 256,
        device: torch.device,
        where: Where,
        dtype: torch.dtype,
        num_threads: int,
        decoder: Name = "auto",
        micro_batch_size: int | None = None,
        start_step: int = 0,
    ) -> None:
        seed, rank_info = settings.seed, settings.rank_info
        self.rank_samples = sampler.shard(len(images), settings.batch_size, seed=seed, rank_info=rank_info)
        self.settings = replace(settings, rank_samples=self.rank_samples)
        self.images, self.start_step = images, start_step
        computed = micro_batch_size or settings.num_rank_samples
        check_budget(len(self.rank_samples), stored_px, device=device, where=where, batch_size=computed)
        self.device, self.where, self.dtype = device, where, dtype
        self.decoder, self.num_threads = decoder, num_threads
        shape = (len(self.rank_samples), stored_px, stored_px, 3)
        self.pixels = allocate(shape, device=device, where=where)  # a row for each image of this rank
        self.sizes = np.zeros((len(self.rank_samples), 2), np.int64)  # height, width of the originals
        self.is_stored = np.zeros(len(self.rank_samples), bool)

    def __iter__(self) -> Iterator[tuple[np.ndarray, Tensor]]:
        is_requested = self.is_stored.copy()
        waiting: deque[Pending] = deque()
        decoder = open_decoder(
            self.decoder,
            self.images,
            self.pixels.shape[1],
            device=self.device,
            num_threads=self.num_threads,
            most=self.settings.num_rank_samples,
        )
        try:
            for step in train_steps(len(self.images), self.settings, start_step=self.start_step):
                rows = self.rows(step.samples)
                missing = rows[~is_requested[rows]]
                is_requested[missing] = True
                decoded = decoder.request(self.rank_samples[missing]) if len(missing) else None
                waiting.append(Pending(step=step, missing=missing, decoded=decoded))
                if len(waiting) > NUM_STEPS_AHEAD:
                    pending = waiting.popleft()
                    self.store(pending)
                    yield pending.step.samples, self.crops(pending.step)
        finally:
            decoder.close()

    def rows(self, samples: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.rank_samples, samples)

    def store(self, pending: Pending) -> None:
        """Wait for the new images of a step and store their pixels."""
        if not pending.decoded:
            return
        pixels, self.sizes[pending.missing] = pending.decoded()
        device = self.pixels.device
        rows = to_device(pending.missing, device)
        copies_on = device.type == "cuda"  # a copy to the host must be whole before it is read
        self.pixels.index_copy_(0, rows, pixels.to(device, non_blocking=copies_on))
        self.is_stored[pending.missing] = True

    def crops(self, step: TrainStep) -> Tensor:
        """Return the crops of a step whose images are all stored."""
        rows = self.rows(step.samples)
        sizes = self.sizes[rows]
        crops = step.draw(step.samples, sizes)
        boxes = (crops.boxes / np.tile(sizes, 2)).astype(np.float32)
        pixels = self.pixels
        if self.where == "host":
            pixels, rows = self.copy_rows(rows), np.arange(len(rows))
        return crop_resize(
            pixels,
            to_device(rows, self.device),
            to_device(boxes, self.device),
            to_device(crops.flips, self.device),
            size_px=step.crop_px,
            mean=MEAN,
            std=STD,
            dtype=self.dtype,
        )

    def copy_rows(self, rows: np.ndarray) -> Tensor:
        """Copy rows from the host to the device, image by image: (batch, stored_px, stored_px, 3)."""
        pixels = torch.empty((len(rows), *self.pixels.shape[1:]), dtype=torch.uint8, device=self.device)
        for target, row in zip(pixels, rows, strict=True):
            target.copy_(self.pixels[int(row)], non_blocking=True)
        return pixels


class EvaluationCache:
    """Keeps the pixels of an evaluation, so that the next one neither reads nor decodes.

    They are kept if all of them fit into `available_bytes`, on `device` or on the host; `is_complete` says
    whether they are.
    """

    def __init__(self, *, device: torch.device, where: Where, available_bytes: int) -> None:
        self.device, self.where, self.available_bytes = device, where, available_bytes
        self.kept: list[tuple[np.ndarray, Tensor]] = []
        self.is_complete = False

    def batches(self, source: Iterable[PixelBatch]) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield samples (batch,) and pixels (batch, size, size, 3) uint8 on the device.

        They come from `source` until it was read to its end once, and then are the same without touching it.
        """
        for samples, stored in self.kept if self.is_complete else self.read(source):
            yield samples, stored.to(self.device, non_blocking=True)

    def read(self, source: Iterable[PixelBatch]) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yield the batches of `source` and keep them as long as they fit."""
        self.kept, num_bytes = [], 0
        for samples, pixels in source:
            stored = torch.from_numpy(pixels.copy())  # a worker's memory is not for keeping
            if self.device.type == "cuda":
                stored = stored.to(self.device) if self.where == "device" else stored.pin_memory()
            num_bytes += pixels.nbytes
            if num_bytes <= self.available_bytes:
                self.kept.append((samples, stored))
            yield samples, stored
        self.is_complete = num_bytes <= self.available_bytes
        if not self.is_complete:
            self.kept.clear()
