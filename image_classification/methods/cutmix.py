"""CutMix.

What. Replaces a rectangle of each image by the same rectangle of its neighbour in the batch, and mixes their
labels by the area. Each step draws one rectangle, its area from Beta(alpha, alpha).
Effect on quality. Published: little in a recipe that is tuned otherwise (no recipe of the study uses it); Yun
2019 reports +2.3 % top-1 for ResNet-50 in 300 epochs.
Effect on time. One copy of the batch.
Relieves. Nothing: it buys accuracy that long trainings can use.
When not. Short trainings, which do not overfit.
Use. Each batch: `images, labels = cut_mix(images, labels, num_classes=1000)`.
Source. Yun et al. 2019, https://arxiv.org/abs/1905.04899; MosaicML Composer 0.7, algorithms/cutmix;
torchvision.transforms.v2.CutMix.
Unlike Composer. Same default (1.0) and rectangles. The second image is the neighbour in the batch, there a
random one of the batch.
"""

from pydantic import Field
from torch import Tensor
from torchvision.transforms import v2

from common.config.schema import Strict
from image_classification.methods.mixup import Mixup


def cut_mix(
    images: Tensor, labels: Tensor, *, num_classes: int | None, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return images with a neighbour's rectangle, and labels as probabilities (batch, num_classes) float32.

    `labels` are indices (batch,) int64, or probabilities already. The neighbour of a sample is the one before
    it. The rectangle comes from torch's random numbers on the CPU.
    """
    mixed: tuple[Tensor, Tensor] = v2.CutMix(alpha=alpha, num_classes=num_classes)(images, labels)
    return mixed


class Cutmix(Mixup):
    """Cuts and mixes training batches; each micro-batch within itself, all with the rectangle of the step."""

    mix = staticmethod(cut_mix)

    class Config(Strict):
        alpha: float = Field(
            default=1.0, gt=0, description="of the Beta distribution of the area; 1: uniform"
        )
