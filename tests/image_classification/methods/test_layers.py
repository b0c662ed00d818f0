"""Methods that change layers of the model: which layers of ResNet-50, and what the new ones compute."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from image_classification.methods.blurpool import apply_blurpool
from image_classification.methods.squeeze_excite import apply_squeeze_excite
from image_classification.methods.zero_gamma import apply_zero_gamma
from image_classification.model import build_resnet

STRIDED = {f"layer{i}.0.{name}" for i in (2, 3, 4) for name in ("conv2", "downsample.0")}
WIDE = {f"layer4.{block}.conv{number}" for block in range(3) for number in (1, 2, 3)}


def plain_blur(images, stride=1):
    """Sum over the nine shifted images."""
    line = (1, 2, 1)
    height, width = images.shape[-2:]
    padded = F.pad(images, (1, 1, 1, 1))
    shifts = [(i, j) for i in range(3) for j in range(3)]
    blurred = sum(line[i] * line[j] / 16 * padded[..., i : i + height, j : j + width] for i, j in shifts)
    return blurred[..., ::stride, ::stride]


@pytest.mark.parametrize(
    ("apply", "expected"),
    [
        (apply_blurpool, STRIDED | {"maxpool"}),
        (apply_squeeze_excite, WIDE | {f"layer{i}.0.downsample.0" for i in (3, 4)}),
    ],
)
def test_the_layers_of_resnet50_that_change(apply, expected):
    with torch.device("meta"):
        model = torchvision.models.resnet50(weights=None)
    before = dict(model.named_modules())
    num_changed = apply(model)
    changed = {name for name, module in model.named_modules() if before.get(name, module) is not module}
    assert changed == expected and num_changed == len(expected)
    if apply is apply_blurpool:
        assert apply(model) == 0  # a second call finds nothing


def test_convolutions_of_few_channels_are_not_blurred():
    assert apply_blurpool(nn.Sequential(nn.Conv2d(15, 64, 7, stride=2)), 16) == 0


@pytest.mark.parametrize("size", [1, 7, 8, 13])
@pytest.mark.parametrize("kernel_px", [1, 3])
def test_blurred_convolution_equals_blur_then_convolution(size, kernel_px):
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 8, kernel_px, stride=2, padding=kernel_px // 2, bias=False).double()
    weight = layer.weight.detach().clone().requires_grad_()
    images = torch.randn(2, 16, size, size, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(plain_blur(images), weight, stride=2, padding=kernel_px // 2)
    cotangent = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, [images, weight], cotangent)
    model = nn.Sequential(layer)
    assert apply_blurpool(model, 16) == 1
    found = model.double()(images)
    gradients = torch.autograd.grad(found, [images, layer.weight], cotangent)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("size", [7, 12])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_blurred_max_pool_equals_max_then_blur(size, layout):
    torch.manual_seed(0)
    images = torch.randn(2, 16, size, size).contiguous(memory_format=layout)
    model = nn.Sequential(nn.MaxPool2d(3, 2, 1))
    assert apply_blurpool(model) == 1
    expected = plain_blur(F.max_pool2d(images.double(), 3, 1, 1), stride=2)
    torch.testing.assert_close(model(images).double(), expected, atol=1e-6, rtol=1e-6)
    half = model(images.bfloat16())  # the sliced form
    assert half.is_contiguous(memory_format=layout)
    torch.testing.assert_close(half.double(), expected, atol=2e-2, rtol=2e-2)  # bf16 has 8 bits of mantissa


def test_squeeze_and_excitation_scales_channels_by_a_function_of_their_means():
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


@pytest.mark.parametrize(("name", "num_blocks", "last"), [("resnet18", 8, "bn2"), ("resnet50", 16, "bn3")])
def test_zero_gamma_changes_the_last_norm_of_every_block_and_no_other(name, num_blocks, last):
    model = build_resnet(name, 10)
    assert apply_zero_gamma(model) == num_blocks
    zeros = [key for key, value in model.state_dict().items() if key.endswith("weight") and not value.any()]
    assert len(zeros) == num_blocks and all(key.endswith(f"{last}.weight") for key in zeros)
    if name == "resnet18":
        features = torch.rand(1, 64, 8, 8)
        torch.testing.assert_close(model.eval().layer1[1](features), features)
