"""Progressive resizing: the published sizes, whole epochs, evaluation untouched."""

import pytest
import torch

from common.config.schema import RunConfig
from common.errors import UserError
from common.training.load import load_config
from common.training.method import Batch, Progress
from image_classification.methods.progressive_resizing import (
    ProgressiveResizing,
    image_size_px,
    resize_images,
)

SETTINGS = {
    "initial_scale": 0.5,
    "delay_fraction": 0.4,
    "finetune_fraction": 0.2,
    "size_increment_px": 4,
}


def resizing(**changes: float) -> ProgressiveResizing:
    settings = {**SETTINGS, "interpolation": "nearest", **changes}
    return ProgressiveResizing("progressive_resizing", ProgressiveResizing.Config(**settings))


def mini_config(configuration: str) -> RunConfig:
    return load_config("image_classification", configuration, size="mini", settings=[]).config


def test_sizes_of_the_published_run() -> None:
    sizes = [image_size_px(epoch, 28, 176, **SETTINGS) for epoch in range(28)]
    growing = [96, 104, 112, 116, 124, 132, 140, 148, 156, 164, 172]
    assert sizes == [88] * 12 + growing + [176] * 5
    assert len(set(sizes)) == 13
    assert sum((size / 224) ** 2 for size in sizes) == pytest.approx(8.948, abs=5e-4)
    assert sum((size / 224) ** 2 for size in sizes[:27]) == pytest.approx(8.330, abs=1e-3)


def test_sizes_of_size_mini() -> None:
    settings = dict(mini_config("mosaic").methods["progressive_resizing"])
    assert settings.pop("interpolation") == "nearest"
    assert [image_size_px(epoch, 4, 84, **settings) for epoch in range(4)] == [56, 56, 84, 84]


def test_the_last_size_is_full_even_when_it_is_no_multiple() -> None:
    assert image_size_px(27, 28, 175, **SETTINGS) == 175
    assert max(image_size_px(epoch, 28, 175, **SETTINGS) for epoch in range(28)) == 175


def test_batches_change_at_epoch_borders_and_never_in_evaluation() -> None:
    method = resizing()
    images = torch.randn(2, 3, 176, 176).contiguous(memory_format=torch.channels_last)
    batch = Batch(inputs={"x": images}, targets={"labels": torch.zeros(2)}, num_samples=2)
    sizes = []
    for step in range(0, 280, 5):  # ten steps an epoch
        progress = Progress(step=step, num_steps=280, epoch=step // 10, num_epochs=28)
        sizes.append(method.batch(batch, progress).inputs["x"].shape[-1])
    assert sizes == [image_size_px(i // 2, 28, 176, **SETTINGS) for i in range(56)]
    assert method.batch(batch, None) is batch


def test_resize_keeps_constants_and_layout() -> None:
    images = torch.full((1, 3, 176, 176), 0.25).contiguous(memory_format=torch.channels_last)
    resized = resize_images(images, 120, "bilinear")
    assert resized.shape == (1, 3, 120, 120)  # a float scale factor would give 119
    assert resized.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(resized, torch.full_like(resized, 0.25))
    assert resize_images(images, 176, "bilinear") is images


def test_nearest_takes_pixels_as_they_are_and_bilinear_averages() -> None:
    images = torch.arange(16.0).view(1, 1, 4, 4)
    assert resize_images(images, 2, "nearest").flatten().tolist() == [0, 2, 8, 10]
    averaged = resize_images(images, 2, "bilinear")
    assert averaged.mean() == pytest.approx(images.mean()) and averaged[0, 0, 0, 0] > 2


def test_settings_without_effect_are_refused() -> None:
    config = mini_config("baseline")
    with pytest.raises(UserError, match="full size"):
        resizing(initial_scale=0.999).configure(config)
    with pytest.raises(UserError, match="must leave some epochs"):
        resizing(delay_fraction=0.9).configure(config)
