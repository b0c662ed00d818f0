"""im2col_wgrad: gradients of torch's convolution, in the layout of the weight, where outputs are small."""

import copy

import pytest
import torch
from torch import nn

from common.methods.im2col_wgrad import apply_im2col_wgrad
from common.training.load import load_config

PRODUCT = "Im2ColWeightGradientBackward"


def pair(*shape, max_positions=512, **settings):
    """Return a channels-last convolution in float64, and a copy with the method."""
    torch.manual_seed(0)
    plain = nn.Conv2d(*shape, bias=False, **settings).double().to(memory_format=torch.channels_last)
    product = nn.Sequential(copy.deepcopy(plain))
    assert apply_im2col_wgrad(product, max_positions) == 1
    return plain, product


def gradients(model, images):
    images = images.clone().requires_grad_()
    output = model(images)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape))
    (weight,) = model.parameters()
    return output.detach(), images.grad, weight.grad


@pytest.mark.parametrize(
    ("shape", "settings", "size"),
    [
        ((6, 8, 3), {"padding": 1}, (2, 2)),
        ((6, 8, 3), {"padding": 1, "stride": 2}, (5, 4)),
        ((6, 8, 1), {"stride": 2}, (5, 5)),
        ((6, 8, (1, 3)), {"padding": (0, 2), "stride": (2, 1)}, (4, 3)),
        ((3, 4, 7), {"padding": 3, "stride": 2}, (9, 9)),
    ],
)
def test_output_and_gradients_are_those_of_torch(shape, settings, size):
    plain, product = pair(*shape, **settings)
    images = torch.randn(3, shape[0], *size, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert type(product(images).grad_fn).__name__ == PRODUCT
    torch.testing.assert_close(gradients(product, images), gradients(plain, images), rtol=1e-12, atol=1e-12)
    assert product[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_a_single_image_and_float64_under_autocast_are_left_to_torch():
    plain, product = pair(4, 8, 3, padding=1)
    image = torch.randn(4, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(product(image), plain(image), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        output = product(image[None])
    assert output.dtype == torch.float64 and type(output.grad_fn).__name__ == PRODUCT


def test_under_autocast_the_weight_gradient_is_rounded_once():
    plain, product = pair(32, 64, 3, padding=1)
    images = torch.randn(4, 32, 3, 3).bfloat16().double()
    product.float()
    with torch.no_grad():
        plain.weight.copy_(plain.weight.bfloat16())
    _, _, expected = gradients(plain, images)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, found = gradients(product, images.float())
    assert found.dtype == torch.float32
    assert (found.double() - expected).norm() < 2**-7 * expected.norm()


def test_only_small_outputs_and_only_training_use_the_product():
    _, product = pair(2, 2, 3, padding=1, max_positions=2 * 3 * 3)
    small, large = (torch.zeros(2, 2, 3, width, dtype=torch.float64) for width in (3, 4))
    outputs = product(small), product(large)
    assert [type(output.grad_fn).__name__ for output in outputs] == [PRODUCT, "ConvolutionBackward0"]
    product.requires_grad_(False)
    assert product(small).grad_fn is None


def test_other_convolutions_stay_as_they_are():
    others = [
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, bias=False, groups=2),
        nn.Conv2d(4, 4, 3, bias=False, dilation=2),
        nn.Conv2d(4, 4, 3, bias=False, padding="same"),
        nn.Conv2d(4, 4, 3, bias=False, padding=1, padding_mode="reflect"),
        nn.Conv1d(4, 4, 3, bias=False),
    ]
    assert apply_im2col_wgrad(nn.Sequential(*others)) == 0


def test_a_gpu_trains_without_it(monkeypatch):
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        config = load_config("image_classification", "optimized", size="mini", settings=()).config
        assert ("im2col_wgrad" in config.methods) is not has_gpu
