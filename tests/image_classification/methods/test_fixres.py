"""FixRes: two sizes of the data change, nothing else; in a plain loop, two crops before what is there."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from common.errors import UserError
from common.evidence.recipes import all_differences, flat
from common.training.load import load_config
from image_classification.methods.fixres import Fixres, apply_fixres


def test_two_sizes_change() -> None:
    config = load_config("image_classification", "baseline", size="full", settings=[]).config
    method = Fixres("fixres", Fixres.Config(train_crop_px=176, evaluation_resize_px=232))
    changed = method.configure(config)
    changes = all_differences(flat(config.model_dump()), flat(changed.model_dump()))
    assert list(changes) == [
        ("data.train_crop_px", "224", "176"),
        ("data.evaluation_resize_px", "256", "232"),
    ]
    with pytest.raises(UserError, match="already"):
        method.configure(changed)


def test_crops_come_before_the_transforms_of_a_data_set() -> None:
    trained, evaluated = (SimpleNamespace(transform=v2.PILToTensor()) for _ in range(2))
    apply_fixres(trained, evaluated, 40, 64, 48)
    pixels = torch.arange(100 * 120, dtype=torch.int32).remainder(251).to(torch.uint8).view(100, 120)
    image = Image.fromarray(pixels.numpy()).convert("RGB")
    assert trained.transform(image).shape == (3, 40, 40)
    expected = v2.PILToTensor()(v2.CenterCrop(48)(v2.Resize(64)(image)))
    assert evaluated.transform(image).equal(expected) and expected.shape == (3, 48, 48)
