"""Methods that change the sizes of images: fixres, progressive crops and progressive resizing."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from image_classification.methods.fixres import apply_fixres
from image_classification.methods.progressive_crops import crops_by_epoch
from image_classification.methods.progressive_resizing import image_size_px, resize_images
from tests.image_classification.loading import config_of

GROWING_PX = [96, 104, 112, 116, 124, 132, 140, 148, 156, 164, 172]


def test_fixres_crops_before_the_transforms_of_a_data_set():
    trained, evaluated = (SimpleNamespace(transform=v2.PILToTensor()) for _ in range(2))
    apply_fixres(trained, evaluated, 40, 64, 48)
    pixels = torch.arange(100 * 120, dtype=torch.int32).remainder(251).to(torch.uint8).view(100, 120)
    image = Image.fromarray(pixels.numpy()).convert("RGB")
    assert trained.transform(image).shape == (3, 40, 40)
    expected = v2.PILToTensor()(v2.CenterCrop(48)(v2.Resize(64)(image)))
    assert evaluated.transform(image).equal(expected) and expected.shape == (3, 48, 48)


def test_progressive_crops_cost_as_calculated_and_reach_the_loader():
    sizes = crops_by_epoch([96, 128, 160, 176], [14, 5, 3, 6])
    assert len(sizes) == 28
    assert sum((size / 224) ** 2 for size in sizes[:27]) == pytest.approx(8.82, abs=0.005)
    data = config_of("optimized", "full").data
    assert [data.crop_px(epoch) for epoch in range(28)] == sizes
    assert data.crop_px(28) == 176  # a batch drawn ahead of the end
    assert config_of("optimized", "mini").data.crop_px_by_epoch == [56, 84, 84, 84]


def test_progressive_resizing_has_the_sizes_of_the_published_run():
    sizes = [image_size_px(epoch, 28, 176) for epoch in range(28)]
    assert sizes == [88] * 12 + GROWING_PX + [176] * 5
    assert sum((size / 224) ** 2 for size in sizes) == pytest.approx(8.948, abs=5e-4)
    assert sum((size / 224) ** 2 for size in sizes[:27]) == pytest.approx(8.330, abs=1e-3)
    last = [image_size_px(epoch, 28, 175) for epoch in range(28)]
    assert max(last) == last[27] == 175  # full, though no multiple of 4
    mini = dict(config_of("mosaic", "mini").methods["progressive_resizing"])
    assert mini.pop("interpolation") == "nearest"
    assert [image_size_px(epoch, 4, 84, **mini) for epoch in range(4)] == [56, 56, 84, 84]


def test_resizing_keeps_constants_and_layout():
    images = torch.full((1, 3, 176, 176), 0.25).contiguous(memory_format=torch.channels_last)
    resized = resize_images(images, 120, "bilinear")
    assert resized.shape == (1, 3, 120, 120)  # a float scale factor would give 119
    assert resized.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(resized, torch.full_like(resized, 0.25))
    assert resize_images(images, 176, "bilinear") is images


def test_nearest_takes_pixels_as_they_are_and_bilinear_averages():
    images = torch.arange(16.0).view(1, 1, 4, 4)
    assert resize_images(images, 2, "nearest").flatten().tolist() == [0, 2, 8, 10]
    averaged = resize_images(images, 2, "bilinear")
    assert averaged.mean() == pytest.approx(images.mean()) and averaged[0, 0, 0, 0] > 2
    torch.testing.assert_close(resize_images(images.bfloat16(), 2, "bilinear"), averaged.bfloat16())
