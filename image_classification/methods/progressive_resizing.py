"""Progressive resizing.

What. Trains on small images first and on full-size ones at the end. The size changes between epochs only.
Effect on quality. Little if the last part of training sees full-size images. The published runs resized by
nearest neighbour (`nearest`); `bilinear` has antialiasing.
Effect on time. A step costs about (size / full size)^2. In the published schedule (28 epochs, 88 to 176
pixels) the 27 epochs of a run have the pixels of 8.3 epochs at 224.
Relieves. Forward pass, backward pass: compute and memory traffic. Not the loader.
When not. A loader that is slower than the step; a compiler or captured graphs, which pay for each of the 13
sizes, unless `size_increment_px` leaves only a few.
Use. Each batch: `images = resize_images(images, image_size_px(epoch, num_epochs, 224))`.
Source. Howard 2018, https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html; MosaicML Composer 0.7,
algorithms/progressive_resizing.
Unlike Composer. Settings are required here. Defaults there are 0.5, a delay of 0.5, 0.2, 4 and `nearest`; the
published runs had a delay of 0.4. Cropping, and resizing of targets, off by default there, are left out.
"""

from dataclasses import replace
from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from common.config.schema import Fraction, RunConfig, Strict
from common.training.method import Batch, Method, Progress


def image_size_px(
    epoch: int,
    num_epochs: int,
    full_px: int,
    *,
    initial_scale: float = 0.5,
    delay_fraction: float = 0.4,
    finetune_fraction: float = 0.2,
    size_increment_px: int = 4,
) -> int:
    """Return the size of an epoch (from 0): `initial_scale` at first, then linearly up to `full_px`.

    The size begins to grow after `delay_fraction` of the epochs, is full for the last `finetune_fraction`,
    and is rounded to multiples of `size_increment_px` between. The defaults are the published ones.
    """
    growing = 1 - delay_fraction - finetune_fraction
    grown = min(1.0, max(0.0, (epoch / num_epochs - delay_fraction) / growing))
    if grown == 1:
        return full_px
    scale = initial_scale + (1 - initial_scale) * grown
    return min(full_px, max(1, round(full_px * scale / size_increment_px)) * size_increment_px)


def resize_images(images: Tensor, size_px: int, interpolation: str = "nearest") -> Tensor:
    """Return (batch, channels, size_px, size_px), `nearest` or antialiased `bilinear`."""
    if images.shape[-1] == size_px:
        return images
    size = (size_px, size_px)  # a scale factor can lose a pixel: 176 * (120 / 176) rounds down to 119
    if interpolation == "nearest":
        return F.interpolate(images, size=size, mode=interpolation)
    wide = images.float() if images.element_size() < 4 else images  # a CPU has no antialiasing in 16 bits
    return F.interpolate(wide, size=size, mode=interpolation, antialias=True).to(images.dtype)


class ProgressiveResizing(Method):
    """Resizes training batches after the loader; evaluation sees the images as they are.

    Published: 0.5, 0.4, 0.2, 4 and nearest. Raises UserError for settings that leave no smaller size.
    """

    class Config(Strict):
        initial_scale: float = Field(gt=0, lt=1, description="of the training crop, in the first epoch")
        delay_fraction: Fraction = Field(description="the part of all epochs before images begin to grow")
        finetune_fraction: Fraction = Field(description="the last part of all epochs, at full size")
        size_increment_px: int = Field(ge=1, description="sizes on the way are multiples of this, in pixels")
        interpolation: Literal["nearest", "bilinear"] = Field(description="bilinear has antialiasing")

    def configure(self, config: RunConfig) -> RunConfig:
        if self.settings.delay_fraction + self.settings.finetune_fraction >= 1:
            self.refuse("delay_fraction and finetune_fraction must leave some epochs between")
        full_px = config.model_dump()["data"]["train_crop_px"]
        if self.size_px(0, 1, full_px) == full_px:
            self.refuse("every epoch would have the full size")
        return config

    def size_px(self, epoch: int, num_epochs: int, full_px: int) -> int:
        """Return the size of an epoch with these settings."""
        fractions = self.settings.model_dump(exclude={"interpolation"})
        return image_size_px(epoch, num_epochs, full_px, **fractions)

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        if progress is None:
            return batch
        images = batch.inputs["x"]
        size = self.size_px(progress.epoch, progress.num_epochs, images.shape[-1])
        resized = resize_images(images, size, self.settings.interpolation)
        return replace(batch, inputs=batch.inputs | {"x": resized})
