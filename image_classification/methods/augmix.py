"""AugMix.

What. Mixes each training image, by random weights, with `width` copies of itself, each changed by a chain of
one to three random operations.
Effect on quality. Published: +0.5 % top-1 with ResNet-50; meant for robustness against corrupted images.
Effect on time. None on the device. Published: very heavy on the CPU that loads the data. The line below
changes whole images; `v2.Compose([crop, aug_mix, the rest])` is cheaper.
Relieves. Nothing: it buys accuracy that long trainings can use.
When not. Short trainings; a loader that is slower than the step; loaders without worker processes (refused).
Use. With the data: `dataset.transform = v2.Compose([aug_mix, dataset.transform])  # of PIL or uint8`.
Source. Hendrycks et al. 2020, https://arxiv.org/abs/1912.02781 (its loss on two mixtures is left out, as in
the study); MosaicML Composer 0.7, algorithms/augmix; torchvision.transforms.v2.AugMix.
Unlike Composer. Same defaults (severity 3, width 3, chains of 1 to 3 operations, weights of Dirichlet and
Beta with 1). Operations and their strengths are torchvision's; Composer has 13 of its own.
"""

from typing import Any

from pydantic import Field
from torchvision.transforms import v2

from common.config.schema import Strict
from image_classification.augmentation import Augmentation, Transform


def aug_mix(image: Any, severity: int = 3, width: int = 3) -> Any:
    """Return an image, PIL or (3, height, width) uint8, mixed with changed copies; severities are 1 to 10."""
    return v2.AugMix(severity=severity, mixture_width=width)(image)


class Augmix(Augmentation):
    class Config(Strict):
        severity: int = Field(default=3, ge=1, le=10, description="of the operations")
        width: int = Field(default=3, ge=1, description="how many changed copies")

    def transform(self) -> Transform:
        return v2.AugMix(severity=self.settings.severity, mixture_width=self.settings.width)
