"""Methods that change training images in the loader's worker processes, before normalization."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from common.config.schema import RunConfig
from common.training.method import Method, seeded
from common.training.registry import build_methods

Transform = Callable[[Tensor], Tensor]  # of one image (3, height, width) uint8; picklable


class Augmentation(Method, ABC):
    """Transforms single images in worker processes, with random numbers that nothing else draws from.

    Raises UserError for the loaders that crop whole batches (resident, dali) and have no single images.
    """

    @abstractmethod
    def transform(self) -> Transform:
        """Return the transform of an image; it draws from torch's random numbers on the CPU."""

    def configure(self, config: RunConfig) -> RunConfig:
        loader = config.model_dump()["data"]["loader"]
        if loader != "workers":
            self.refuse(
                f"changes single images in worker processes, which the loader '{loader}' does not have",
                hint="--set data.loader=workers",
            )
        return config


def augmentations(config: RunConfig) -> list[Augmentation]:
    """Return the methods of a configuration that change single images, in their order."""
    return [method for method in build_methods(config) if isinstance(method, Augmentation)]


def build_transform(config: RunConfig) -> Transform | None:
    """Compose the transforms of all these methods in their order; None if there are none."""
    transforms = [method.transform() for method in augmentations(config)]
    return v2.Compose(transforms) if transforms else None


def augment(transform: Transform, pixels: np.ndarray, *, seed: int, epoch: int, sample: int) -> np.ndarray:
    """Transform (height, width, 3) uint8: a function of the arguments alone, the same in any worker."""
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    with seeded(seed, epoch, sample):
        return transform(image).permute(1, 2, 0).numpy()
