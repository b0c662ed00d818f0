"""The kernels of the image pipeline and its methods beside their plain forms, for `ttt doctor`."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from common.training.benchmark import KernelPair
from image_classification.data.loader import MEAN, STD
from image_classification.kernels.crop_resize import crop_resize, crop_resize_reference
from image_classification.methods.blurpool import Blur

NUM_IMAGES, STORED_PX, SIZE_PX = 8, 96, 56
CHANNELS = 32


def kernel_pairs(device: torch.device) -> Iterator[KernelPair]:
    """Yield the blur; the crop only on a GPU, since a processor computes its plain form itself."""
    yield blur_pair(device)
    if device.type == "cuda":
        yield crop_pair(device)


def blur_pair(device: torch.device) -> KernelPair:
    """Return the strided blur in bfloat16 with its gradient, and the convolution that it stands for."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_IMAGES, CHANNELS, SIZE_PX, SIZE_PX, generator=generator).bfloat16().to(device)
    layer, plain = Blur(stride=2).to(device), images.float().requires_grad_()
    images = images.to(memory_format=torch.channels_last).requires_grad_()

    def with_gradient(blurred: Tensor, source: Tensor) -> list[Tensor]:
        return [blurred, *torch.autograd.grad(blurred.square().sum(), [source])]

    def convolved() -> list[Tensor]:
        weight = torch.tensor([1.0, 2.0, 1.0], device=device)
        filters = (weight[:, None] * weight / 16).expand(CHANNELS, 1, 3, 3)
        return with_gradient(F.conv2d(plain, filters, stride=2, padding=1, groups=CHANNELS), plain)

    return KernelPair(
        name="blur",
        kernel=lambda: with_gradient(layer(images), images),
        plain=convolved,
        tolerance=0.02,  # bfloat16 keeps 8 bits
    )


def crop_pair(device: torch.device) -> KernelPair:
    """Return crop, resize, flip and normalisation by the kernel, and as two matrix products in float32."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_IMAGES, STORED_PX, STORED_PX, 3)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(device)
    starts = torch.rand(NUM_IMAGES, 2, generator=generator) * 0.4
    boxes = torch.cat([starts, 0.2 + 0.4 * torch.rand(NUM_IMAGES, 2, generator=generator)], dim=1).to(device)
    flips = (torch.rand(NUM_IMAGES, generator=generator) < 0.5).to(device)
    samples = torch.randperm(NUM_IMAGES, generator=generator).to(device)
    given = {"size_px": SIZE_PX, "mean": MEAN, "std": STD, "dtype": torch.float32}
    return KernelPair(
        name="crop and resize",
        kernel=lambda: [crop_resize(pixels, samples, boxes, flips, **given)],
        plain=lambda: [crop_resize_reference(pixels, samples, boxes, flips, **given)],
        tolerance=1e-3,  # where TF32 is allowed; the tests ask for 2e-4 in a value
    )
