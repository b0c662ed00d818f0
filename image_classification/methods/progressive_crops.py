"""Progressive crops.

What. Small crops first, full-size ones at the end, as progressive resizing does, but cropped and resized
once, by the loader, straight to the size of the epoch, with antialiasing; few sizes, so that compilers and
captured graphs can prepare all of them.
Effect on quality. Not measured on ImageNet: antialiased pixels should be worth more than every second one.
Effect on time. A step costs about (size / full size)^2. Published sizes snapped to 96, 128, 160 and 176: the
27 epochs that are run equal 8.9 epochs at 224 pixels in floating-point operations, as the 13 sizes do
(calculated).
Relieves. Forward pass, backward pass, data loading: compute, memory traffic, and the loader's resizing.
When not. A loader that hands over stored tensors of one size: `progressive_resizing` works on the batch.
Workers that outlive an epoch (`persistent_workers`) of a plain loader, which would go on with the first size.
Use. With the data: `sizes_px, rest = crops_by_epoch([96, 128, 160, 176], [14, 5, 3, 6]), dataset.transform  #
which does not crop`.
Each epoch: `dataset.transform = v2.Compose([v2.RandomResizedCrop(sizes_px[epoch]), rest])`.
Source. Howard 2018, https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html; the sizes are this project's.
"""

from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from common.config.schema import RunConfig, Strict
from common.errors import UserError
from common.training.method import Method


def crops_by_epoch(sizes_px: list[int], epochs: list[int]) -> list[int]:
    """Return the size of every epoch: each of `sizes_px` for its number of `epochs`, in turn."""
    return list(chain.from_iterable([size] * count for size, count in zip(sizes_px, epochs, strict=True)))


class ProgressiveCrops(Method):
    """Sets `data.crop_px_by_epoch`."""

    class Config(Strict):
        """The epochs are those of the run, the last size is its training crop."""

        sizes_px: list[Annotated[int, Field(ge=32)]] = Field(
            min_length=1, description="sides of the crops, in pixels, one after the other"
        )
        epochs: list[Annotated[int, Field(ge=1)]] = Field(
            min_length=1, description="how many epochs each of them is used"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        """Raise UserError unless the epochs are those of the run and the last size is the training crop."""
        where, settings = f"methods.{self.name}", self.settings
        if len(settings.sizes_px) != len(settings.epochs):
            raise UserError("each of sizes_px needs its number of epochs", where=where)
        sizes = crops_by_epoch(settings.sizes_px, settings.epochs)
        if len(sizes) != config.num_epochs:
            what = f"{len(sizes)} epochs have a size, but the run has {config.num_epochs}"
            raise UserError(what, where=where)
        data: dict[str, Any] = config.model_dump()["data"]
        if sizes[-1] != data["train_crop_px"]:
            raise UserError(
                f"the last size is {sizes[-1]}, but train_crop_px is {data['train_crop_px']}", where=where
            )
        return config.replaced(data=data | {"crop_px_by_epoch": sizes})
