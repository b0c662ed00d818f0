"""Batches of images read while training runs: random crops to train on, centre crops to evaluate with.

The crops of a training batch are a function of (images, settings, step): worker processes and DALI (dali.py)
give the same ones. On the CPU they decode the same pixels. After resizing, pixels differ from those of an
exact filter by at most 1.01 of 255 levels, on average by 0.35; DALI's outermost pixels by up to 20, because
DALI repeats the edge of the crop. tests/image_classification/data/test_loaders.py checks it.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple

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
from image_classification.config import ImageDataConfig
from image_classification.data.ahead import prefetch
from image_classification.data.crops import Crops, draw_crops
from image_classification.data.decoding import ignore_notice_of_decoder
from image_classification.data.images import Images, decode
from image_classification.kernels.crop_resize import SCALE, SHIFT

WORKER_ENDS_S = 2.0  # at most, after its connections have closed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings that determine the training batches.

    `batch_size` is that of all ranks together; `crop_px` maps a step, from 0, to the size of its crops in
    pixels.
    """

    data: ImageDataConfig
    batch_size: int
    seed: int
    crop_px: Callable[[int], int]
    rank_info: RankInfo = SINGLE_RANK
    start_step: int = 0
    transform: Transform | None = None  # of each crop, in worker processes
    device: torch.device = torch.device("cpu")  # of the pixels of dali and resident
    dtype: torch.dtype = torch.float32  # of the pixels of resident

    @property
    def num_rank_samples(self) -> int:
        """Samples of every batch that this rank takes."""
        return len(self.rank_info.part(self.batch_size))


class PixelBatch(NamedTuple):
    """A batch of a loader: uint8 (batch, size, size, 3), or normalised (batch, 3, size, size) as resident.

    `loading_s` are the seconds in which worker processes built it, divided by their number.
    """

    samples: np.ndarray  # (batch,) int64
    pixels: np.ndarray | Tensor
    loading_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """The samples and crops of one step. Worker processes get it pickled."""

    samples: np.ndarray  # (batch,) int64
    crop_px: int
    draw: Callable[[np.ndarray, np.ndarray], Crops]  # of samples and their sizes
    augment: Callable[..., np.ndarray] | None = None  # of pixels and their sample

    def crops(self, size: Callable[[int], tuple[int, int]]) -> Crops:
        """Return the crops of the samples; `size` gives height and width of an image."""
        return self.draw(self.samples, np.array([size(sample) for sample in self.samples.tolist()]))


def train_steps(
    num_samples: int, settings: TrainSettings, *, rank_samples: np.ndarray | None = None
) -> Iterator[TrainStep]:
    """Yield the steps from `settings.start_step` on, without end.

    A rank takes a part of each batch, or draws from the `rank_samples` that it keeps for the whole run.
    """
    data, batch_size, seed, rank_info = settings.data, settings.batch_size, settings.seed, settings.rank_info
    drawn = {"seed": seed, "start_step": settings.start_step}
    if rank_samples is not None:
        order = sampler.shard_batches(rank_samples, num_samples, batch_size, rank_info=rank_info, **drawn)
    else:
        whole = sampler.batches(num_samples, batch_size, **drawn)
        order = (sampler.rank_part(samples, rank_info) for samples in whole)
    for step, samples in enumerate(order, settings.start_step):
        epoch = step // (num_samples // batch_size)
        draw = partial(
            draw_crops,
            seed=seed,
            epoch=epoch,
            min_area=data.min_crop_area,
            flip_probability=data.flip_probability,
            alternates_flips=data.alternates_flips,
        )
        transform = settings.transform and partial(augment, settings.transform, seed=seed, epoch=epoch)
        yield TrainStep(samples=samples, crop_px=settings.crop_px(step), draw=draw, augment=transform)


def worker_batches(images: Images, settings: TrainSettings) -> Iterator[PixelBatch]:
    """Yield batches without end.

    Worker processes decode and resize with torchvision; each of them prepares two whole batches ahead.
    `images` must be picklable. Raises UserError for a file that cannot be decoded.
    """
    steps = train_steps(len(images), settings)
    return map_in_workers(partial(build_train_batch, images), steps, num_workers=settings.data.num_workers)


def evaluation_batches(
    images: Images, data: ImageDataConfig, batch_size: int, samples: range
) -> Iterator[PixelBatch]:
    """Yield the centre of each of `samples` once and in order; the last batch may be smaller.

    PIL resizes the shorter side, in processes where the training loader has them, else in threads; the pixels
    are the same. Raises UserError for a file that cannot be decoded.
    """
    crop = partial(centre_crop, images, data.evaluation_resize_px, data.evaluation_crop_px)
    parts = (samples[first : first + batch_size] for first in range(0, len(samples), batch_size))
    items = (np.array(part) for part in parts)
    if data.loader == "workers":
        yield from map_in_workers(partial(build_evaluation_batch, crop), items, num_workers=data.num_workers)
        return
    with ThreadPoolExecutor(data.num_workers, thread_name_prefix="evaluation") as pool:
        yield from prefetch(partial(build_evaluation_batch, crop, apply=pool.map), items)


def build_train_batch(images: Images, step: TrainStep) -> PixelBatch:
    crops = []
    for sample, box, is_mirrored in zip(step.samples.tolist(), *step.crops(images.size), strict=True):
        pixels = random_crop(images, sample, box, step.crop_px)
        pixels = pixels[:, ::-1] if is_mirrored else pixels
        crops.append(step.augment(pixels, sample=sample) if step.augment else pixels)
    return PixelBatch(step.samples, np.stack(crops))


def build_evaluation_batch(
    crop: Callable[[int], np.ndarray], samples: np.ndarray, apply: Callable[..., Iterable[np.ndarray]] = map
) -> PixelBatch:
    return PixelBatch(samples, np.stack(list(apply(crop, samples.tolist()))))


def random_crop(images: Images, sample: int, box: np.ndarray, size_px: int) -> np.ndarray:
    content = torch.from_numpy(np.frombuffer(bytearray(images.jpeg(sample)), np.uint8))
    try:
        image = decode_jpeg(content, mode=ImageReadMode.RGB)
    except RuntimeError:  # not a JPEG, which PIL reads, or damaged, which PIL reports
        image = functional.pil_to_tensor(decode(images, sample))
    crop = functional.resized_crop(image, *box.tolist(), [size_px, size_px], antialias=True)
    return crop.permute(1, 2, 0).contiguous().numpy()  # else a batch could have the layout of its first crop


def centre_crop(images: Images, resize_px: int, crop_px: int, sample: int) -> np.ndarray:
    image = decode(images, sample)
    width, height = (resize_px * length // min(image.size) for length in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - crop_px) / 2), round((height - crop_px) / 2)
    return np.asarray(resized.crop((left, top, left + crop_px, top + crop_px)))


class LazyDataset(Dataset[Any]):
    """A data set whose indices are the arguments of `build`. It returns an error of the data as a value."""

    def __init__(self, build: Callable[[Any], PixelBatch]) -> None:
        self.build = build

    def __getitem__(self, item: Any) -> PixelBatch | UserError:
        before = time.perf_counter()
        try:
            return self.build(item)._replace(loading_s=time.perf_counter() - before)
        except UserError as error:  # a DataLoader would raise it again with a traceback as its text
            return error


def map_in_workers(
    build: Callable[[Any], PixelBatch], items: Iterable[Any], *, num_workers: int
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
        generator=torch.Generator(),  # else it would draw from the global one
    )
    try:
        for item in loader:
            if isinstance(item, UserError):
                raise item
            samples, pixels, seconds = item
            yield PixelBatch(samples.numpy(), pixels.numpy(), seconds / num_workers)
    except (ConnectionError, EOFError) as error:  # a killed worker's connections close before it ends
        time.sleep(WORKER_ENDS_S)  # once the worker has ended, torch raises its own error here
        raise RuntimeError("DataLoader worker exited unexpectedly") from error


def set_up_worker(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends its workers
    signal.signal(signal.SIGTERM, end_worker)
    ignore_notice_of_decoder()


def end_worker(number: int, frame: FrameType | None) -> None:
    """Exit with clean-up, which removes the worker's folder of sockets; torch's handler has none."""
    sys.exit()


@cache
def copy_normalization(device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy scale and shift of the channels to a device; cached, because each copy to a GPU waits."""
    return torch.tensor(SCALE, device=device), torch.tensor(SHIFT, device=device)


def normalize(pixels: Tensor) -> Tensor:
    """Return uint8 pixels (batch, height, width, 3) as float32 (batch, 3, height, width), channels last.

    Channels are normalized by ImageNet's statistics, on the device of the pixels.
    """
    scale, shift = copy_normalization(pixels.device)
    return pixels.float().mul_(scale).add_(shift).permute(0, 3, 1, 2)
