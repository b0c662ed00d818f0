"""BlurPool: which layers change, and that the cheap forms are exact."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from common.errors import UserError
from image_classification.methods.blurpool import Blurpool, apply_blurpool


def plain_blur(images: torch.Tensor, stride: int = 1) -> torch.Tensor:
    """Sum over the nine shifted images."""
    line = (1, 2, 1)
    height, width = images.shape[-2:]
    padded = F.pad(images, (1, 1, 1, 1))
    shifts = [(i, j) for i in range(3) for j in range(3)]
    blurred = sum(line[i] * line[j] / 16 * padded[..., i : i + height, j : j + width] for i, j in shifts)
    return blurred[..., ::stride, ::stride]


def test_seven_layers_of_resnet50_change() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet50(weights=None)
    before = dict(model.named_modules())
    assert apply_blurpool(model, 16) == 7
    changed = {
        name for name, module in model.named_modules() if name in before and before[name] is not module
    }
    strided = {f"layer{i}.0.{name}" for i in (2, 3, 4) for name in ("conv2", "downsample.0")}
    assert changed == strided | {"maxpool"}
    assert apply_blurpool(nn.Sequential(model.conv1), 16) == 0  # 3 input channels


@pytest.mark.parametrize("size", [1, 7, 8, 13])
@pytest.mark.parametrize("kernel_px", [1, 3])
def test_blurred_convolution_equals_blur_then_convolution(size: int, kernel_px: int) -> None:
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
def test_blurred_max_pool_equals_max_then_blur(size: int, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 16, size, size).contiguous(memory_format=layout)
    model = nn.Sequential(nn.MaxPool2d(3, 2, 1))
    assert apply_blurpool(model) == 1
    expected = plain_blur(F.max_pool2d(images.double(), 3, 1, 1), stride=2)
    torch.testing.assert_close(model(images).double(), expected, atol=1e-6, rtol=1e-6)
    half = model(images.bfloat16())  # the sliced form
    assert half.is_contiguous(memory_format=layout)
    torch.testing.assert_close(half.double(), expected, atol=2e-2, rtol=2e-2)  # bf16 has 8 bits of mantissa


def test_a_model_without_strided_layers_is_refused() -> None:
    with pytest.raises(UserError, match="methods.blurpool: no strided layer"):
        Blurpool("blurpool", Blurpool.Config(min_channels=16)).model(nn.Sequential(nn.Linear(2, 2)))
