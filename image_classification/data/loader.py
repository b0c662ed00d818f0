"""Batches of images read while training runs: random crops to train on, centre crops to evaluate with.

What a training batch shows is a function of (images, settings, step): worker processes and DALI (dali.py)
give the same crops. On the CPU they decode the same pixels. After resizing, these differ from an exact
filter's by at most 1.01 of 255 levels, on average by 0.35; the outermost pixels of DALI by up to 20, because
it repeats the edge of the crop. tests/image_classification/data/test_loaders.py says so.
"""

import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional

from common.data import sampler
from common.errors import UserError
from common.training.ranks import SINGLE_RANK, RankInfo
from image_classification.augmentation import Transform, augment
from image_classification.data.crops import Crops, draw_crops
from image_classification.data.images import Images, decode
from image_classification.kernels.crop_resize import scale_and_shift

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, in [0, 1]
STD = (0.229, 0.224, 0.225)

PixelBatch = tuple[np.ndarray, np.ndarray]  # samples (batch,) int64, pixels (batch, size, size, 3) uint8
Item = TypeVar("Item")
Built = TypeVar("Built")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings that determine the training batches.

    `batch_size` is that of all ranks together, of which this rank takes its part; `crop_px` gives the size in
    pixels of a step, from 0; `min_area` is the smallest part of an image that a crop shows.
    """

    batch_size: int
    seed: int
    crop_px: Callable[[int], int]
    min_area: float
    flip_probability: float
    alternates_flips: bool = False
    rank_info: RankInfo = SINGLE_RANK
    rank_samples: np.ndarray | None = None  # of the whole run; None: a part of each batch
    transform: Transform | None = None  # of each crop, in worker processes

    @property
    def num_rank_samples(self) -> int:
        """Samples of every batch that this rank takes."""
        return len(self.rank_info.part(self.batch_size))


@dataclass(slots=True)
class Meter:
    """The seconds in which a loader worked on batches, divided by its number of workers."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """The samples and crops of one step. Worker processes get it pickled."""

    samples: np.ndarray  # (batch,) int64
    crop_px: int
    draw: Callable[[np.ndarray, np.ndarray], Crops]  # of samples and their sizes
    augment: Callable[..., np.ndarray] | None = None  # of pixels and their sample

    def crops(self, size: Callable[[int], tuple[int, int]]) -> Crops:
        """Return the crops of the samples; `size` gives height and width of an image."""
        return self.draw(self.samples, np.array([size(int(sample)) for sample in self.samples]))


def train_steps(num_samples: int, settings: TrainSettings, *, start_step: int) -> Iterator[TrainStep]:
    """Yield the steps from `start_step` on, without end."""
    steps_per_epoch = num_samples // settings.batch_size
    drawn = {"seed": settings.seed, "start_step": start_step}
    if settings.rank_samples is not None:
        rank_info = settings.rank_info
        order = sampler.shard_batches(
            settings.rank_samples, num_samples, settings.batch_size, rank_info=rank_info, **drawn
        )
    else:
        whole = sampler.batches(num_samples, settings.batch_size, **drawn)
        order = (sampler.rank_part(samples, settings.rank_info) for samples in whole)
    for step, samples in enumerate(order, start_step):
        epoch = step // steps_per_epoch
        draw = partial(
            draw_crops,
            seed=settings.seed,
            epoch=epoch,
            min_area=settings.min_area,
            flip_probability=settings.flip_probability,
            alternates_flips=settings.alternates_flips,
        )
        transform = None
        if settings.transform is not None:
            transform = partial(augment, settings.transform, seed=settings.seed, epoch=epoch)
        yield TrainStep(samples=samples, crop_px=settings.crop_px(step), draw=draw, augment=transform)


def worker_batches(
    images: Images,
    settings: TrainSettings,
    *,
    num_workers: int,
    start_step: int = 0,
    meter: Meter | None = None,
) -> Iterator[PixelBatch]:
    """Yield batches without end: samples (batch,) int64, pixels (batch, size, size, 3) uint8.

    Worker processes decode and resize with torchvision; each of the `num_workers` prepares two whole batches
    ahead. `images` must be picklable. Raises UserError for a file that cannot be decoded.
    """
    build = partial(build_train_batch, images)
    steps = train_steps(len(images), settings, start_step=start_step)
    return map_in_workers(build, steps, num_workers=num_workers, meter=meter)


def evaluation_batches(
    images: Images,
    batch_size: int,
    *,
    samples: range | None = None,
    resize_px: int,
    crop_px: int,
    num_workers: int = 0,
    num_threads: int = 1,
) -> Iterator[PixelBatch]:
    """Yield every sample, or those of `samples`, once and in order; the last batch may be smaller.

    The shorter side is resized to `resize_px` with PIL, then the centre of `crop_px` cut out, in
    `num_workers` processes or, without any, in `num_threads` threads; the pixels are the same. Raises
    UserError for a file that cannot be decoded.
    """
    crop = partial(centre_crop, images, resize_px, crop_px)
    order = np.arange(len(images))[slice(samples.start, samples.stop) if samples is not None else slice(None)]
    items = (order[first : first + batch_size] for first in range(0, len(order), batch_size))
    if num_workers:
        yield from map_in_workers(partial(build_evaluation_batch, crop), items, num_workers=num_workers)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="evaluation") as pool:
        yield from prefetch(partial(build_evaluation_batch, crop, apply=pool.map), items)


def build_train_batch(images: Images, step: TrainStep) -> PixelBatch:
    crops = step.crops(images.size)
    pixels = (
        random_crop(images, int(sample), box, step.crop_px)
        for sample, box in zip(step.samples, crops.boxes, strict=True)
    )
    mirrored = [image[:, ::-1] if flip else image for image, flip in zip(pixels, crops.flips, strict=True)]
    if step.augment is not None:
        samples = step.samples.tolist()
        mirrored = [step.augment(image, sample=n) for image, n in zip(mirrored, samples, strict=True)]
    return step.samples, np.stack(mirrored)


def build_evaluation_batch(
    crop: Callable[[int], np.ndarray], samples: np.ndarray, apply: Callable[..., Iterable[np.ndarray]] = map
) -> PixelBatch:
    return samples, np.stack(list(apply(crop, samples.tolist())))


def random_crop(images: Images, sample: int, box: np.ndarray, size_px: int) -> np.ndarray:
    content = torch.from_numpy(np.frombuffer(bytearray(images.jpeg(sample)), np.uint8))
    try:
        image = decode_jpeg(content, mode=ImageReadMode.RGB)
    except RuntimeError:  # another format, or a damaged file: PIL reads it or names it
        image = functional.pil_to_tensor(decode(images, sample))
    crop = functional.resized_crop(image, *box.tolist(), [size_px, size_px], antialias=True)
    return crop.permute(1, 2, 0).contiguous().numpy()  # else a batch could have the layout of its first crop


def centre_crop(images: Images, resize_px: int, crop_px: int, sample: int) -> np.ndarray:
    image = decode(images, sample)
    width, height = (resize_px * length // min(image.size) for length in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - crop_px) / 2), round((height - crop_px) / 2)
    return np.asarray(resized.crop((left, top, left + crop_px, top + crop_px)))


def prefetch(build: Callable[[Item], Built], items: Iterable[Item]) -> Iterator[Built]:
    """Yield `build(item)` of every item while a second thread works on the next; its errors rise here.

    Decoding and resizing in PIL release the interpreter lock and use one core. No torch operation belongs in
    `build`: it would start a second set of compute threads, and the training thread would wait for them.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="images") as pool:
        pending: Future[Built] | None = None
        for item in items:
            started = pool.submit(build, item)
            if pending is not None:
                yield pending.result()
            pending = started
        if pending is not None:
            yield pending.result()


class LazyDataset(Dataset[Any]):
    """A data set whose indices are the arguments of `build`. It returns an error of the data as a value."""

    def __init__(self, build: Callable[[Any], PixelBatch]) -> None:
        self.build = build

    def __getitem__(self, item: Any) -> tuple[PixelBatch, float] | UserError:
        before = time.perf_counter()
        try:
            return self.build(item), time.perf_counter() - before
        except UserError as error:  # a DataLoader would raise it again with a traceback as its text
            return error


def map_in_workers(
    build: Callable[[Any], PixelBatch], items: Iterable[Any], *, num_workers: int, meter: Meter | None = None
) -> Iterator[PixelBatch]:
    """Yield `build(item)` of every item in order, computed by worker processes that live until the end.

    With CUDA, the batches lie in pinned memory.
    """
    loader = DataLoader(
        LazyDataset(build),
        batch_size=None,
        sampler=items,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=set_up_worker,
        generator=torch.Generator(),  # the global one would be drawn from
    )
    meter = meter or Meter()
    for item in loader:
        if isinstance(item, UserError):
            raise item
        (samples, pixels), seconds = item
        meter.seconds += seconds / num_workers
        yield samples.numpy(), pixels.numpy()


def set_up_worker(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends its workers
    signal.signal(signal.SIGTERM, end_worker)
    # torchvision 0.29 announces that TorchCodec will replace its decoder; 0.26 to 0.29 have it
    warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning)


def end_worker(number: int, frame: FrameType | None) -> None:
    """End in order, which removes the worker's folder of sockets; torch would have it end at once."""
    sys.exit()


@cache
def normalization(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what each channel is multiplied with, and what is added; kept: a copy makes a GPU wait."""
    scale, shift = scale_and_shift(MEAN, STD)
    return torch.tensor(scale, device=device), torch.tensor(shift, device=device)


def normalize(pixels: Tensor) -> Tensor:
    """Return uint8 pixels (batch, height, width, 3) as float32 (batch, 3, height, width), channels last.

    Each channel by ImageNet's statistics, on the device of the pixels.
    """
    scale, shift = normalization(pixels.device)
    return pixels.float().mul_(scale).add_(shift).permute(0, 3, 1, 2)
