"""Methods that change the pixels of training images where these are read, before normalization."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.config.schema import RunConfig
from common.errors import UserError
from common.training.method import Method, seeded
from common.training.registry import build_methods

Transform = Callable[[Tensor], Tensor]  # of one image (3, height, width) uint8; picklable


class Augmentation(Method, ABC):
    """Works in worker processes: each image in turn, with random numbers that nothing else draws from.

    Loaders that crop on the device have no single images (resident, dali).
    """

    @abstractmethod
    def transform(self) -> Transform:
        """Return what is done to an image; it draws from torch's random numbers on the CPU."""

    def configure(self, config: RunConfig) -> RunConfig:
        """Change nothing; raise UserError for a loader without worker processes."""
        loader = config.model_dump()["data"]["loader"]
        if loader != "workers":
            raise UserError(
                f"changes single images in worker processes, which the loader '{loader}' does not have",
                where=f"methods.{self.name}",
                hint="--set data.loader=workers",
            )
        return config


def augmentations(config: RunConfig) -> list[Augmentation]:
    """Return the methods of a configuration that change single images, in their order."""
    return [method for method in build_methods(config) if isinstance(method, Augmentation)]


def augmentation(config: RunConfig) -> Transform | None:
    """Return what the methods of a configuration do to an image, one after another; None if nothing."""
    methods = augmentations(config)
    return partial(in_turn, [method.transform() for method in methods]) if methods else None


def in_turn(transforms: list[Transform], image: Tensor) -> Tensor:
    """Apply each to an image."""
    for transform in transforms:
        image = transform(image)
    return image


def augmented(transform: Transform, pixels: np.ndarray, *, seed: int, epoch: int, sample: int) -> np.ndarray:
    """Return (height, width, 3) uint8, a function of the arguments alone: any worker gives the same."""
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    with seeded(seed, epoch, sample):
        return transform(image).permute(1, 2, 0).numpy()
