"""Progressive crops.

What. Trains on small crops first and on full-size ones at the end. The loader crops and resizes each image
once, to the size of the epoch, with antialiasing. The sizes are few, so that compilers and captured graphs
can prepare all of them.
Effect on quality. Not measured. Antialiasing should keep more detail than the published nearest neighbour.
Effect on time. A step costs about (size / full size)^2. With the published sizes rounded to 96, 128, 160 and
176 the 27 epochs of a run have the operations of 8.9 epochs at 224, as many as with all 13 (calculated).
Relieves. Forward pass, backward pass, data loading: compute, memory traffic, and the loader's resizing.
When not. A loader of stored tensors of one size (`progressive_resizing` resizes the batch instead); workers
of a plain loader that outlive an epoch (`persistent_workers`) and would keep the first size.
Use. With the data: `sizes_px, rest = crops_by_epoch([96, 128, 160, 176], [14, 5, 3, 6]), dataset.transform  #
which does not crop`.
Each epoch: `dataset.transform = v2.Compose([v2.RandomResizedCrop(sizes_px[epoch]), rest])`.
Source. Howard 2018, https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html; the sizes are this project's.
Unlike Composer. Composer 0.7 has no such method.
"""

from itertools import chain
from typing import Annotated

from pydantic import Field

from common.config.schema import RunConfig, Strict
from common.errors import UserError
from common.training.method import Method


def crops_by_epoch(sizes_px: list[int], epochs: list[int]) -> list[int]:
    """Return the size of every epoch: each of `sizes_px` for its number of `epochs`, in turn."""
    if not sizes_px or len(sizes_px) != len(epochs) or min(*sizes_px, *epochs) < 1:
        raise UserError("each size needs its number of epochs, at least 1", where="crops_by_epoch")
    return list(chain.from_iterable([size] * count for size, count in zip(sizes_px, epochs, strict=True)))


class ProgressiveCrops(Method):
    """Sets `data.crop_px_by_epoch`.

    Raises UserError unless the epochs are those of the run and the last size is its training crop.
    """

    class Config(Strict):
        sizes_px: list[Annotated[int, Field(ge=32)]] = Field(
            min_length=1, description="sides of the crops, in pixels, one after the other"
        )
        epochs: list[Annotated[int, Field(ge=1)]] = Field(
            min_length=1, description="how many epochs each of them is used"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        settings, data = self.settings, config.model_dump()["data"]
        if len(settings.sizes_px) != len(settings.epochs):
            self.refuse("each of sizes_px needs its number of epochs")
        sizes = crops_by_epoch(settings.sizes_px, settings.epochs)
        if len(sizes) != config.num_epochs:
            self.refuse(f"{len(sizes)} epochs have a size, but the run has {config.num_epochs}")
        if sizes[-1] != data["train_crop_px"]:
            self.refuse(f"the last size is {sizes[-1]}, but train_crop_px is {data['train_crop_px']}")
        return config.replaced(data=data | {"crop_px_by_epoch": sizes})
