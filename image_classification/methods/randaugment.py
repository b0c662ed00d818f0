"""RandAugment.

What. Changes each training image by `num_ops` of 14 operations (shear, contrast ...), all of one magnitude.
Effect on quality. Published: +0.4 to 0.7 % top-1 with ResNet-50 in 90 epochs. Of the study's recipes only the
one of 270 epochs uses it (one operation of severity 9 of 10, on a scale of its own).
Effect on time. None on the device. Published: heavy on the CPU that loads the data. The line below changes
whole images; `v2.Compose([crop, rand_augment, the rest])` is cheaper.
Relieves. Nothing: it buys accuracy that long trainings can use.
When not. Short trainings; a loader that is slower than the step; loaders without worker processes (refused).
Use. With the data: `dataset.transform = v2.Compose([rand_augment, dataset.transform])  # of PIL or uint8`.
Source. Cubuk et al. 2020, https://arxiv.org/abs/1909.13719; MosaicML Composer 0.7, algorithms/randaugment;
torchvision.transforms.v2.RandAugment.
Unlike Composer. Two operations as there, but magnitude 9 of 30 of torchvision's 14 operations; there severity
9 of 10 of 13 operations of its own, with random sign and strength.
"""

from typing import Any

from pydantic import Field
from torchvision.transforms import v2

from common.config.schema import Strict
from image_classification.augmentation import Augmentation, Transform


def rand_augment(image: Any, num_ops: int = 2, magnitude: int = 9) -> Any:
    """Return an image, PIL or (3, height, width) uint8, after so many operations; magnitudes are 0 to 30."""
    return v2.RandAugment(num_ops=num_ops, magnitude=magnitude)(image)


class Randaugment(Augmentation):
    class Config(Strict):
        num_ops: int = Field(default=2, ge=1, description="operations an image, one after the other")
        magnitude: int = Field(default=9, ge=0, le=30, description="their strength")

    def transform(self) -> Transform:
        return v2.RandAugment(**self.settings.model_dump())
