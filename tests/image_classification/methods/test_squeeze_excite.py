"""Squeeze-and-excitation: which convolutions are followed by one, and what it computes."""

import pytest
import torch
import torchvision
from torch import nn

from common.errors import UserError
from image_classification.methods.squeeze_excite import SqueezeExcite, apply_squeeze_excite


def test_wide_convolutions_of_resnet50_are_scaled():
    with torch.device("meta"):
        model = torchvision.models.resnet50(weights=None)
    before = dict(model.named_modules())
    expected = {
        name
        for name, module in before.items()
        if isinstance(module, nn.Conv2d) and min(module.weight.shape[:2]) >= 512
    }
    assert apply_squeeze_excite(model, 512) == len(expected) == 11
    changed = {name for name, module in model.named_modules() if before.get(name, module) is not module}
    assert changed == expected and "layer4.0.conv2" in changed and "layer3.5.conv1" not in changed


def test_output_is_the_convolutions_times_a_function_of_its_means():
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 6, 3, padding=1)
    model = nn.Sequential(layer)
    assert apply_squeeze_excite(model, 6, latent_channels=4) == 1
    model, images = model.double(), torch.randn(3, 8, 5, 7, dtype=torch.float64)
    first, last = model[0][1].fc1, model[0][1].fc2
    plain = layer(images)
    means = plain.sum(dim=(2, 3)) / 35
    hidden = (means @ first.weight.flatten(1).T + first.bias).clamp(min=0)
    scale = 1 / (1 + (-(hidden @ last.weight.flatten(1).T + last.bias)).exp())
    torch.testing.assert_close(model(images), plain * scale[:, :, None, None], rtol=1e-10, atol=1e-12)
    assert first.weight.shape == (4, 6, 1, 1)


def test_a_model_without_wide_convolutions_is_refused():
    with pytest.raises(UserError, match=r"squeeze_excite.min_channels: no convolution has 512 channels"):
        SqueezeExcite("squeeze_excite", SqueezeExcite.Config()).model(nn.Sequential(nn.Conv2d(3, 600, 1)))
