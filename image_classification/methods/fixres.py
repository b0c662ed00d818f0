"""FixRes resolutions.

What. Trains on smaller crops than evaluation uses. A random crop enlarges objects; with a smaller training
crop they have the same apparent size in training and in evaluation.
Effect on quality. Published: at an equal training size a larger evaluation size gains accuracy (Touvron
2019); smaller training crops spend this gain.
Effect on time. A training step costs about (new size / old size)^2: 0.62 for 176 instead of 224 pixels.
Relieves. Forward pass, backward pass: compute and memory traffic; of the loader, the resizing only.
When not. Objects of one fixed size; crops that show nearly the whole image, as with a large `min_crop_area`.
Use. With the data: `apply_fixres(dataset, evaluation_dataset, 176, 232, 224)  # before transforms that do not
crop`.
Source. Touvron et al. 2019, https://arxiv.org/abs/1906.06423; MosaicML, MLPerf Training v2.0 (176, 232 ->
224).
Unlike Composer. There it is a choice of sizes in the recipes, not a method.
"""

from typing import Any

from pydantic import Field
from torchvision.transforms import v2

from common.config.schema import RunConfig, Strict
from common.training.method import Method


def apply_fixres(
    dataset: Any,
    evaluation_dataset: Any,
    train_crop_px: int,
    evaluation_resize_px: int,
    evaluation_crop_px: int,
    *,
    min_crop_area: float = 0.08,
) -> None:
    """Put random crops before the `transform` of `dataset`, centre crops before that of the evaluation set.

    Neither `transform` may crop; both turn PIL images or tensors of any size into inputs of the model.
    """
    crop = v2.RandomResizedCrop(train_crop_px, scale=(min_crop_area, 1), antialias=True)
    dataset.transform = v2.Compose([crop, dataset.transform])
    larger = v2.Resize(evaluation_resize_px, antialias=True), v2.CenterCrop(evaluation_crop_px)
    evaluation_dataset.transform = v2.Compose([*larger, evaluation_dataset.transform])


class Fixres(Method):
    """Changes two sizes of the data, published: to 176 and 232; refuses data that have these sizes."""

    is_configured_first = True

    class Config(Strict):
        train_crop_px: int = Field(ge=32, description="side of the crops to train on, in pixels")
        evaluation_resize_px: int = Field(
            ge=32, description="shorter side before the evaluation crop, in pixels"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        changed = config.replaced(data=config.model_dump()["data"] | self.settings.model_dump())
        if changed == config:
            self.refuse("the data have these sizes already")
        return changed
