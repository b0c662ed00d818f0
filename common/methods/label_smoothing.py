"""Label smoothing.

What. Moves a part of each target from the right class to all classes evenly, in training only.
Effect on quality. Published: about +0.2 % top-1 on ImageNet (Szegedy 2016); it keeps the logits from growing
without bound.
Effect on time. Negligible.
Relieves. Nothing: it buys accuracy that fewer epochs spend.
When not. Short trainings that do not overfit; teachers in distillation.
Use. For the loss: `loss = F.cross_entropy(model(images), smooth_labels(labels, 1000, 0.1))`.
Source. Szegedy et al. 2016, https://arxiv.org/abs/1512.00567; MosaicML Composer 0.7,
algorithms/label_smoothing.
Unlike Composer. The smoothing is required here, 0.1 by default there.
"""

from typing import Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from common.config.schema import Strict
from common.errors import check_share
from common.training.method import Loss, Method


def smooth_labels(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Return (1 - smoothing) * one-hot + smoothing / num_classes as float32 (batch, num_classes).

    `labels` are class indices (batch,) int64, or probabilities (batch, num_classes) in place of one-hot.
    """
    check_share(smoothing, "smooth_labels")
    certain = F.one_hot(labels, num_classes).float() if labels.ndim == 1 else labels
    return certain * (1 - smoothing) + smoothing / num_classes


class LabelSmoothing(Method):
    """Passes smoothed targets to the loss, which must accept probabilities."""

    is_of_reference = True

    class Config(Strict):
        smoothing: float = Field(
            gt=0, le=1, description="the part of each target spread evenly over all classes"
        )

    def loss(self, loss: Loss) -> Loss:
        def smoothed(outputs: Any, targets: dict[str, Tensor]) -> Tensor:
            if not isinstance(outputs, Tensor) or "labels" not in targets:
                self.refuse("this benchmark has no class labels")
            labels = smooth_labels(targets["labels"], outputs.shape[-1], self.settings.smoothing)
            return loss(outputs, targets | {"labels": labels})

        return smoothed
