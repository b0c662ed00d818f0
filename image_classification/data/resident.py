"""Images decoded once and kept as pixels; an image that was used is never read or decoded again.

Several ranks share the images for the whole run: each has its own, decodes these and keeps nothing else.
Each image is kept squashed to a square of `stored_px`, with its height and width: a crop is drawn in pixels
of the image, as in every loader, and then cut from the square, since it ends as a square in any case. The
square loses detail along an axis on which the image has more than `stored_px` pixels. Crops for 176 px are
enlarged instead of shrunk where they show less than 47 % of an image kept at 256, which 43 % of crops do; of
one kept at 320, less than 30 %, which 24 % do. The others are filtered twice and slightly softer. The effect
on accuracy was not measured.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor

from common.data import sampler
from common.errors import UserError
from common.training.memory import USABLE, total_bytes
from common.training.ranks import read_rank_info
from image_classification.config import Decoder, ImageDataConfig, Where
from image_classification.data.ahead import begin_ahead
from image_classification.data.dali import dali_decoder, has_dali
from image_classification.data.decoding import Decoded, Request
from image_classification.data.images import Images, decode
from image_classification.data.loader import PixelBatch, TrainSettings, TrainStep, train_steps
from image_classification.data.nvjpeg import nvjpeg_decoder
from image_classification.kernels.crop_resize import crop_resize

GIB = 2**30
RESERVE_BYTES = 4 * GIB  # of a GPU, for weights, optimizer and libraries
RESERVE_BYTES_PER_IMAGE = 42 * 2**20  # of a batch: ResNet-50 at 224 px (calculated)
LEAST_PX, ROUND_TO = 96, 16  # of a size that is proposed
NUM_STEPS_AHEAD = 3  # being decoded while the training works on another
EVALUATION_SHARE = 0.5  # of the memory that is left, at most, for the pixels of the evaluation


def choose_decoder(name: Decoder, device: torch.device) -> Decoder:
    """Replace `auto` by DALI on a GPU where it is installed, else by threads."""
    if name != "auto":
        return name
    return "dali" if device.type == "cuda" and has_dali() else "threads"


def open_decoder(
    name: Decoder, images: Images, stored_px: int, *, device: torch.device, num_threads: int, most: int
) -> AbstractContextManager[Request]:
    """Open the decoder of this name, for `most` images at once: it squashes them in the background.

    Waiting for images raises UserError for one that cannot be decoded. Raises UserError without DALI.
    """
    chosen = choose_decoder(name, device)
    if chosen == "dali":
        return dali_decoder(images, stored_px, device=device, num_threads=num_threads, most=most)
    if chosen == "nvjpeg":
        return nvjpeg_decoder(images, stored_px, device=device)
    return thread_decoder(images, stored_px, device=device, num_threads=num_threads)


@contextmanager
def thread_decoder(
    images: Images, stored_px: int, *, device: torch.device, num_threads: int
) -> Iterator[Request]:
    """Open PIL in threads of the CPU; the pixels are on the host, pinned for a GPU."""

    def decode_into(sample: int, target: np.ndarray, size: np.ndarray) -> None:  # no torch: see `prefetch`
        image = decode(images, sample)
        size[:] = image.height, image.width
        target[...] = np.asarray(image.resize(target.shape[:2], Image.Resampling.BILINEAR))

    def request(samples: np.ndarray) -> Callable[[], Decoded]:
        shape = (len(samples), stored_px, stored_px, 3)
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        sizes = np.zeros((len(samples), 2), np.int64)
        rows = zip(samples.tolist(), pixels.numpy(), sizes, strict=True)
        decoding = [pool.submit(decode_into, *row) for row in rows]

        def wait() -> Decoded:
            for image in decoding:
                image.result()
            return pixels, sizes

        return wait

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="decoding")
    try:
        yield request
    finally:
        pool.shutdown(cancel_futures=True)


class PixelMemory(NamedTuple):
    """The memory that holds pixels beside a training on `batch_size` images at once."""

    where: Where
    device: torch.device
    batch_size: int

    @property
    def is_on_gpu(self) -> bool:
        return self.where == "device" and self.device.type == "cuda"

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the training takes of it (calculated)."""
        if self.where == "host" and self.device.type == "cuda":
            return 0
        return RESERVE_BYTES + self.batch_size * RESERVE_BYTES_PER_IMAGE

    def available_bytes(self) -> int:
        """Measure the memory left for pixels: that of the GPU, or this rank's of the host."""
        if self.is_on_gpu:
            still_needed = max(0, self.reserved_bytes - torch.cuda.memory_reserved(self.device))
            return max(0, torch.cuda.mem_get_info(self.device)[0] - still_needed)
        return psutil.virtual_memory().available // read_rank_info().num_local

    def bytes_to_fit(self, num_samples: int, stored_px: int) -> int:
        """Calculate the memory that must be there so that a larger size of stored pixels is chosen."""
        return math.ceil((stored_bytes(num_samples, stored_px) + self.reserved_bytes) / USABLE)


def choose_stored_px(num_samples: int, data: ImageDataConfig, memory: PixelMemory, *, num_local: int) -> int:
    """Choose the size of stored pixels by total, not free memory, so that equal ranks choose the same."""
    larger = data.stored_px_if_it_fits
    if larger is None:
        return data.stored_px
    holder = memory.device if memory.where == "device" else torch.device("cpu")
    fits = memory.bytes_to_fit(num_samples, larger) <= total_bytes(holder, num_local)
    return larger if fits else data.stored_px


def stored_bytes(num_samples: int, stored_px: int) -> int:
    return num_samples * stored_px**2 * 3


def check_budget(num_samples: int, data: ImageDataConfig, memory: PixelMemory) -> None:
    """Raise UserError unless so many stored images fit into the memory."""
    needed, free = stored_bytes(num_samples, data.stored_px), memory.available_bytes()
    if needed > free:
        place = "on the GPU" if memory.is_on_gpu else "in memory"
        fitting = math.isqrt(free // (3 * num_samples)) // ROUND_TO * ROUND_TO
        alone = " data.stored_px_if_it_fits=null" if data.stored_px_if_it_fits else ""
        smaller = f"use data.stored_px={fitting}{alone} or " if fitting >= LEAST_PX else ""
        host = "use data.stored_on=host or " if memory.is_on_gpu else ""
        raise UserError(
            f"{needed / GIB:.1f} GiB of decoded pixels needed, {free / GIB:.1f} GiB free {place}",
            where="data.loader",
            hint=f"{smaller}{host}stream with data.loader=workers or dali",
        )


def allocate(shape: tuple[int, ...], *, device: torch.device, where: Where) -> Tensor:
    """Allocate uint8 memory on `device`, or on the host, pinned for a GPU until the tensor is freed."""
    if where == "device":
        return torch.empty(shape, dtype=torch.uint8, device=device)
    memory = torch.empty(shape, dtype=torch.uint8)
    if device.type == "cuda":  # torch would round the size of pinned memory up to a power of two
        cudart, address = torch.cuda.cudart(), memory.data_ptr()
        torch.cuda.check_error(cudart.cudaHostRegister(address, memory.nbytes, 0))
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy `values` to the device; the host does not wait for a GPU."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def resident_batches(images: Images, settings: TrainSettings) -> Iterator[PixelBatch]:
    """Yield batches without end from pixels that stay in memory once an image was used.

    They are crops (batch, 3, size, size) on the device in the dtype of the settings, normalised, channels
    last. The order is that of `sampler.shard_batches`, on one rank that of every loader; crops are those of
    `loader.worker_batches`, also from a later start. A step decodes only images that are not stored yet; the
    decoder ends with the iterator. Raises UserError for an image that cannot be decoded, when its turn comes.
    """
    data, seed, rank_info = settings.data, settings.seed, settings.rank_info
    rank_samples = sampler.shard(len(images), settings.batch_size, seed=seed, rank_info=rank_info)
    stored = StoredPixels(len(rank_samples), settings)
    is_requested = np.zeros(len(rank_samples), bool)

    def begin(step: TrainStep) -> tuple[TrainStep, np.ndarray, np.ndarray, Callable[[], Decoded] | None]:
        """Begin to decode the images that no step before this one needed."""
        rows = np.searchsorted(rank_samples, step.samples)
        missing = rows[~is_requested[rows]]
        is_requested[missing] = True
        return step, rows, missing, request(rank_samples[missing]) if len(missing) else None

    steps = train_steps(len(images), settings, rank_samples=rank_samples)
    with open_decoder(
        data.decoder,
        images,
        data.stored_px,
        device=settings.device,
        num_threads=data.num_workers,
        most=settings.num_rank_samples,
    ) as request:
        for step, rows, missing, decoded in begin_ahead(map(begin, steps), NUM_STEPS_AHEAD):
            if decoded is not None:
                stored.put(missing, *decoded())
            yield PixelBatch(step.samples, stored.crop(step, rows))


class StoredPixels:
    """A row of pixels for each image of a rank, on the device or in memory of the host."""

    def __init__(self, num_images: int, settings: TrainSettings) -> None:
        self.device, self.dtype, where = settings.device, settings.dtype, settings.data.stored_on
        stored_px = settings.data.stored_px
        self.pixels = allocate((num_images, stored_px, stored_px, 3), device=self.device, where=where)
        self.sizes = np.zeros((num_images, 2), np.int64)  # height, width of the originals
        self.is_on_host = where == "host"

    def put(self, rows: np.ndarray, pixels: Tensor, sizes: np.ndarray) -> None:
        self.sizes[rows] = sizes
        device = self.pixels.device
        copies_on = device.type == "cuda"  # a copy to the host must be whole before it is read
        self.pixels.index_copy_(0, to_device(rows, device), pixels.to(device, non_blocking=copies_on))

    def crop(self, step: TrainStep, rows: np.ndarray) -> Tensor:
        """Return the crops of a step whose images lie in these rows."""
        sizes = self.sizes[rows]
        boxes, flips = step.draw(step.samples, sizes)
        fractions = (boxes / np.tile(sizes, 2)).astype(np.float32)
        pixels = self.pixels
        if self.is_on_host:
            pixels, rows = self.copy_rows(rows), np.arange(len(rows))
        rows, fractions, flips = (to_device(values, self.device) for values in (rows, fractions, flips))
        return crop_resize(pixels, rows, fractions, flips, size_px=step.crop_px, dtype=self.dtype)

    def copy_rows(self, rows: np.ndarray) -> Tensor:
        """Copy rows from the host to the device, image by image: (batch, stored_px, stored_px, 3)."""
        pixels = torch.empty((len(rows), *self.pixels.shape[1:]), dtype=torch.uint8, device=self.device)
        for target, row in zip(pixels, rows, strict=True):
            target.copy_(self.pixels[int(row)], non_blocking=True)
        return pixels


class EvaluationCache:
    """Keeps the pixels of an evaluation, so that the next one neither reads nor decodes.

    They are kept if all of them fit into a share of the memory that is left; `is_complete` says whether they
    are.
    """

    def __init__(self, memory: PixelMemory) -> None:
        self.memory = memory
        self.most_bytes = int(memory.available_bytes() * EVALUATION_SHARE)
        self.kept: list[PixelBatch] = []
        self.is_complete = False

    def batches(self, source: Iterable[PixelBatch]) -> Iterator[PixelBatch]:
        """Yield batches of uint8 pixels on the device.

        They come from `source` until a pass over it has kept all of them; later passes do not read it.
        """
        for samples, stored, _ in self.kept if self.is_complete else self.read(source):
            yield PixelBatch(samples, stored.to(self.memory.device, non_blocking=True))

    def read(self, source: Iterable[PixelBatch]) -> Iterator[PixelBatch]:
        """Yield the batches of `source` and keep them as long as they fit."""
        self.kept, num_bytes = [], 0
        for samples, pixels, _ in source:
            stored = torch.from_numpy(pixels.copy())  # which frees the worker's shared memory
            if self.memory.device.type == "cuda":
                stored = stored.cuda(self.memory.device) if self.memory.is_on_gpu else stored.pin_memory()
            num_bytes += pixels.nbytes
            if num_bytes <= self.most_bytes:
                self.kept.append(PixelBatch(samples, stored))
            yield PixelBatch(samples, stored)
        self.is_complete = num_bytes <= self.most_bytes
        if not self.is_complete:
            self.kept.clear()
