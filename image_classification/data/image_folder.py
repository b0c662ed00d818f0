"""Images in one folder per class: listing, decoding, crops, and batches prepared one step ahead.

Which crop a sample gets is a function of (seed, epoch, sample), so it depends neither on the order of the
work nor on the thread that does it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional

from common import sampler
from common.errors import UserError
from common.method import Batch

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, in [0, 1]
STD = (0.229, 0.224, 0.225)
ASPECT_RATIOS = (3 / 4, 4 / 3)
NUM_TRIES = 10

Item = TypeVar("Item")
Drawn = tuple[np.ndarray, np.ndarray]  # samples (batch,), pixels (batch, size, size, 3) uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolder:
    """The images of a folder by class and name; a class's number is its place among the sorted ones."""

    paths: list[Path]
    labels: Tensor  # (num_samples,) int64
    decoded: dict[int, Image.Image] | None  # images kept from their first use on; None: decode each time

    @classmethod
    def open(
        cls, directory: Path, *, num_samples: int, num_classes: int, keep_decoded: bool, hint: str
    ) -> "ImageFolder":
        """List `directory`. Raises UserError unless it holds so many classes and images."""
        if not directory.is_dir():
            raise UserError("no such folder", where=str(directory), hint=hint)
        classes = sorted(path for path in directory.iterdir() if path.is_dir())
        if len(classes) != num_classes:
            raise UserError(
                f"{len(classes)} classes, expected {num_classes}", where=str(directory), hint=hint
            )
        files = [sorted(path.iterdir()) for path in classes]
        paths = [path for inner in files for path in inner]
        if len(paths) != num_samples:
            raise UserError(f"{len(paths)} images, expected {num_samples}", where=str(directory), hint=hint)
        counts = torch.tensor([len(inner) for inner in files])
        labels = torch.arange(num_classes).repeat_interleave(counts)
        return cls(paths=paths, labels=labels, decoded={} if keep_decoded else None)

    def image(self, sample: int) -> Image.Image:
        """Return an RGB image. Raises UserError for a file that cannot be decoded."""
        if self.decoded is not None and sample in self.decoded:
            return self.decoded[sample]
        path = self.paths[sample]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except OSError as error:
            raise UserError(f"cannot be decoded ({error})", where=str(path)) from error
        if self.decoded is not None:
            self.decoded[sample] = image
        return image

    def batch(self, samples: np.ndarray, images: np.ndarray) -> Batch:
        """Return the batch of these samples; `images` are (batch, size, size, 3) uint8, so channels-last."""
        stacked = torch.from_numpy(images).permute(0, 3, 1, 2)
        targets = {"labels": self.labels[torch.from_numpy(samples)]}
        return Batch(inputs={"x": normalize(stacked)}, targets=targets, num_samples=len(images))


def train_batches(
    folder: ImageFolder, batch_size: int, *, seed: int, crop_px: int, min_area: float, flip_probability: float
) -> Iterator[Batch]:
    """Yield batches of random crops of size `crop_px`, some of them mirrored, without end."""
    num_samples = len(folder.paths)
    steps_per_epoch = num_samples // batch_size

    def crop(sample: int, epoch: int) -> np.ndarray:
        image, rng = folder.image(sample), sample_generator(seed, epoch, sample)
        top, left, height, width = crop_box(image.height, image.width, rng, min_area=min_area)
        box = (left, top, left + width, top + height)
        pixels = np.asarray(image.resize((crop_px, crop_px), Image.Resampling.BILINEAR, box=box))
        return pixels[:, ::-1] if rng.random() < flip_probability else pixels

    def build(numbered: tuple[int, np.ndarray]) -> Drawn:
        step, samples = numbered
        return samples, np.stack([crop(int(sample), step // steps_per_epoch) for sample in samples])

    for drawn in one_ahead(build, enumerate(sampler.batches(num_samples, batch_size, seed=seed))):
        yield folder.batch(*drawn)


def evaluation_batches(
    folder: ImageFolder, batch_size: int, *, resize_px: int, crop_px: int
) -> Iterator[Batch]:
    """Yield every image once: its shorter side resized to `resize_px`, then a centre crop of `crop_px`."""

    def centre(sample: int) -> np.ndarray:
        image = functional.resize(folder.image(sample), [resize_px], antialias=True)
        return np.asarray(functional.center_crop(image, [crop_px, crop_px]))

    def build(samples: np.ndarray) -> Drawn:
        return samples, np.stack([centre(int(sample)) for sample in samples])

    order = np.arange(len(folder.paths))
    for drawn in one_ahead(build, (order[first : first + batch_size] for first in order[::batch_size])):
        yield folder.batch(*drawn)


def one_ahead(build: Callable[[Item], Drawn], items: Iterable[Item]) -> Iterator[Drawn]:
    """Yield `build(item)` of every item while a second thread works on the next; its errors rise here.

    Decoding and resizing in PIL release the interpreter lock and use one core. No torch operation belongs in
    `build`: it would start a second set of compute threads, and the training thread would wait for them.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="images") as pool:
        pending: Future[Drawn] | None = None
        for item in items:
            started = pool.submit(build, item)
            if pending is not None:
                yield pending.result()
            pending = started
        if pending is not None:
            yield pending.result()


def sample_generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return the generator of one sample in one epoch; counter 0 belongs to the order of the epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, sample + 1]))


def crop_box(
    height: int, width: int, rng: np.random.Generator, *, min_area: float
) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) in pixels of a random crop.

    Its area is uniform in [min_area, 1] of the image, the logarithm of its aspect ratio uniform between those
    of 3/4 and 4/3; after ten crops that do not fit, the largest centre crop within these ratios.
    Source: torchvision.transforms.RandomResizedCrop.
    """
    low, high = ASPECT_RATIOS
    for _ in range(NUM_TRIES):
        area = height * width * rng.uniform(min_area, 1)
        ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.integers(height - crop_height + 1))
            left = int(rng.integers(width - crop_width + 1))
            return top, left, crop_height, crop_width
    crop_height = min(height, round(width / low))
    crop_width = min(width, round(height * high))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def normalize(images: Tensor) -> Tensor:
    """Return uint8 images (batch, 3, height, width) as float32, each channel by ImageNet's statistics."""
    scale = 1 / (255 * torch.tensor(STD, device=images.device))
    shift = -torch.tensor(MEAN, device=images.device) / torch.tensor(STD, device=images.device)
    return images.float().mul_(scale[:, None, None]).add_(shift[:, None, None])
