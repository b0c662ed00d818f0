"""im2col: output and gradients of torch's convolution, in channels-last order, where outputs are small."""

import copy

import pytest
import torch
from torch import nn

from common.methods.im2col import apply_im2col
from common.training.load import load_config

THREE, WEIGHT, TORCH = "ThreeProductsBackward", "WeightProductBackward", "ConvolutionBackward0"
ALL = {"max_positions": 512, "max_weight_positions": 512}
WEIGHT_ONLY = {"max_positions": 1, "max_weight_positions": 512}


def pair(*shape, limits=ALL, **settings):
    """Return a channels-last convolution in float64, and a copy with the method."""
    torch.manual_seed(0)
    plain = nn.Conv2d(*shape, bias=False, **settings).double().to(memory_format=torch.channels_last)
    product = nn.Sequential(copy.deepcopy(plain))
    assert apply_im2col(product, **limits) == 1
    return plain, product


def differentiator(output):
    return type(output.grad_fn).__name__.removeprefix("_")


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
        ((6, 8, 3), {"padding": 4}, (2, 3)),
        ((6, 8, 2), {"stride": 3}, (7, 6)),
    ],
)
@pytest.mark.parametrize(("limits", "name"), [(ALL, THREE), (WEIGHT_ONLY, WEIGHT)])
def test_output_and_gradients_are_those_of_torch(shape, settings, size, limits, name):
    plain, product = pair(*shape, **settings, limits=limits)
    images = torch.randn(3, shape[0], *size, dtype=torch.float64).to(memory_format=torch.channels_last)
    output = product(images)
    assert differentiator(output) == name
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(gradients(product, images), gradients(plain, images), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(output.sum(), product[0].weight)  # before torch changes its order
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_a_single_image_is_left_to_torch_and_float64_stays_so_under_autocast():
    plain, product = pair(4, 8, 3, padding=1)
    image = torch.randn(4, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(product(image), plain(image), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        output = product(image[None])
    assert output.dtype == torch.float64 and differentiator(output) == THREE


@pytest.mark.parametrize("limits", [ALL, WEIGHT_ONLY])
def test_under_autocast_output_and_gradients_are_near_the_exact_ones(limits):
    plain, product = pair(32, 64, 3, padding=1, limits=limits)
    images = torch.randn(4, 32, 3, 3).bfloat16().double()
    product.float()
    with torch.no_grad():
        plain.weight.copy_(plain.weight.bfloat16())
    expected = gradients(plain, images)
    with torch.autocast("cpu", torch.bfloat16):
        output, image_gradient, weight_gradient = gradients(product, images.float())
    assert output.dtype == torch.bfloat16 and weight_gradient.dtype == torch.float32
    for value, exact in zip((output, image_gradient, weight_gradient), expected, strict=True):
        assert (value.double() - exact).norm() < 2**-7 * exact.norm()


def test_the_number_of_positions_and_training_decide_which_products_are_taken():
    limits = {"max_positions": 2 * 3 * 3, "max_weight_positions": 2 * 3 * 4}
    _, product = pair(2, 2, 3, padding=1, limits=limits)
    outputs = [product(torch.zeros(2, 2, 3, width, dtype=torch.float64)) for width in (3, 4, 5)]
    assert [differentiator(output) for output in outputs] == [THREE, WEIGHT, TORCH]
    product.requires_grad_(False)
    assert product(torch.zeros(2, 2, 3, 3, dtype=torch.float64)).grad_fn is None


@pytest.mark.parametrize("limits", [ALL, WEIGHT_ONLY])
@pytest.mark.parametrize("num_images", [2, 0])
def test_channels_first_weights_no_image_and_a_change_in_place(limits, num_images):
    pairs = pair(4, 8, 3, padding=1, limits=limits)
    plain, product = (model.to(memory_format=torch.contiguous_format) for model in pairs)
    images = torch.randn(num_images, 4, 3, 3, dtype=torch.float64)
    models = [nn.Sequential(model, nn.ReLU(inplace=True)) for model in (plain, copy.deepcopy(product))]
    expected, found = (gradients(model, images) for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(product(images), plain(images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limits", [ALL, WEIGHT_ONLY])
def test_the_weight_gets_its_gradient_where_images_need_none(limits):
    plain, product = pair(4, 8, 3, padding=1, limits=limits)
    images = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    for model in (plain, product):
        model(images).sum().backward()
    torch.testing.assert_close(product[0].weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


def test_other_convolutions_stay_as_they_are():
    others = [
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, bias=False, groups=2),
        nn.Conv2d(4, 4, 3, bias=False, dilation=2),
        nn.Conv2d(4, 4, 3, bias=False, padding="same"),
        nn.Conv2d(4, 4, 3, bias=False, padding=1, padding_mode="reflect"),
        nn.Conv1d(4, 4, 3, bias=False),
    ]
    assert apply_im2col(nn.Sequential(*others)) == 0


def test_a_gpu_trains_without_it(monkeypatch):
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        config = load_config("image_classification", "optimized", size="mini", settings=()).config
        assert ("im2col" in config.methods) is not has_gpu
