"""FixRes resolutions.

What. Trains on smaller crops than it evaluates: random crops enlarge what they show, so objects have the same
apparent size in training and evaluation when the training crop is smaller.
Effect on quality. Published: a larger evaluation size gains accuracy at an equal training size (Touvron
2019); the smaller training crops spend it again. Not measured here.
Effect on time. A training step costs about (new size / old size)^2: 0.62 for 176 instead of 224 pixels.
Relieves. Compute and memory traffic; of the loader, the resizing only.
When not. Objects of one fixed size; crops that show nearly the whole image, as with a large `min_crop_area`.
Source. Touvron et al. 2019, https://arxiv.org/abs/1906.06423; MosaicML, MLPerf Training v2.0 (176, 232 ->
224).
"""

from typing import Any, TypeVar

from pydantic import Field

from common.config import RunConfig, Strict
from common.errors import UserError
from common.method import Method

ConfigT = TypeVar("ConfigT", bound=RunConfig)


def with_resolutions(config: ConfigT, *, train_crop_px: int, evaluation_resize_px: int) -> ConfigT:
    """Return the configuration with other sizes in `data`; the evaluation crop stays."""
    sizes = {"train_crop_px": train_crop_px, "evaluation_resize_px": evaluation_resize_px}
    changed: Any = config.replaced(data=config.model_dump()["data"] | sizes)
    return changed


class Fixres(Method):
    """Changes two sizes of the data."""

    class Config(Strict):
        """Training crop and the shorter side before the evaluation crop, in pixels."""

        train_crop_px: int = Field(ge=32)
        evaluation_resize_px: int = Field(ge=32)

    def configure(self, config: RunConfig) -> RunConfig:
        """Raise UserError when the configuration has these sizes already."""
        changed = with_resolutions(config, **self.settings.model_dump())
        if changed == config:
            raise UserError("the data have these sizes already", where=f"methods.{self.name}")
        return changed
