"""The blur [1, 2, 1] x [1, 2, 1] / 16 of channels-last images, alone and after a max-pool, with gradients.

A depthwise convolution computes the same blur; cuDNN's kernels for it are slow in 16 bits and this layout.
Here every output reads its nine neighbours, whose rows lie in the caches: images are read once from memory
and written once. The backward pass is the same blur; with stride 2 each input reads the outputs that it went
into.

In separate kernels, a max-pool over 3x3 windows would write a maximum and an index for every pixel, and the
blur would read the maxima. Here every output computes its nine maxima from 25 pixels. The backward pass
computes the maxima again from the images, so that no index is stored.
"""

import os
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once: a constant for torch.compile
MAX_BLUR_STRIDE = 2  # of the blur after a max-pool


def allocate(images: Tensor, height: int, width: int) -> Tensor:
    shape = (*images.shape[:2], height, width)
    return torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)


@torch.library.custom_op("ttt::blur", mutates_args=())
def blur(images: Tensor, stride: int) -> Tensor:
    """Return images (batch, channels, height, width) blurred with zero padding 1, channels last.

    Height and width become ceil(length / stride); `stride` is 1 or 2. On a GPU, or with TRITON_INTERPRET=1.
    """
    from image_classification.kernels.blur_triton import blur_triton

    images = images.contiguous(memory_format=torch.channels_last)
    return blur_triton(images, allocate_blurred(images, stride), stride=stride, is_backward=False)


@torch.library.custom_op("ttt::blur_backward", mutates_args=())
def blur_backward(gradient: Tensor, height: int, width: int, stride: int) -> Tensor:
    """Compute the gradient of images of this height and width, from that of the blurred images."""
    from image_classification.kernels.blur_triton import blur_triton

    gradient = gradient.contiguous(memory_format=torch.channels_last)
    return blur_triton(gradient, allocate(gradient, height, width), stride=stride, is_backward=True)


@blur.register_fake
def allocate_blurred(images: Tensor, stride: int) -> Tensor:
    return allocate(images, *((length - 1) // stride + 1 for length in images.shape[2:]))


@blur_backward.register_fake
def allocate_blur_gradient(gradient: Tensor, height: int, width: int, stride: int) -> Tensor:
    return allocate(gradient, height, width)


def save_shape(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.size, ctx.stride = inputs[0].shape[2:], inputs[1]


def differentiate_blur(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return blur_backward(gradient, *ctx.size, ctx.stride), None


blur.register_autograd(differentiate_blur, setup_context=save_shape)


@torch.library.custom_op("ttt::max_blur", mutates_args=())
def max_blur(images: Tensor) -> Tensor:
    """Return the maxima of 3x3 windows of images, blurred with zero padding 1 and stride 2, channels last.

    Images are (batch, channels, height, width); every pixel is the centre of a window. Height and width
    become ceil(length / 2). On a GPU, or with TRITON_INTERPRET=1.
    """
    from image_classification.kernels.blur_triton import max_blur_triton

    images = images.contiguous(memory_format=torch.channels_last)
    return max_blur_triton(images, allocate_max_blurred(images))


@torch.library.custom_op("ttt::max_blur_backward", mutates_args=())
def max_blur_backward(images: Tensor, gradient: Tensor) -> Tensor:
    """Compute the gradient of images from that of the blurred maxima; of equal pixels the first gets it."""
    from image_classification.kernels.blur_triton import max_blur_backward_triton

    images = images.contiguous(memory_format=torch.channels_last)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    return max_blur_backward_triton(images, gradient, allocate_max_blur_gradient(images, gradient))


@max_blur.register_fake
def allocate_max_blurred(images: Tensor) -> Tensor:
    return allocate_blurred(images, MAX_BLUR_STRIDE)


@max_blur_backward.register_fake
def allocate_max_blur_gradient(images: Tensor, gradient: Tensor) -> Tensor:
    return allocate(images, *images.shape[2:])


def save_images(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def differentiate_max_blur(ctx: Any, gradient: Tensor) -> Tensor:
    result: Tensor = max_blur_backward(*ctx.saved_tensors, gradient)
    return result


max_blur.register_autograd(differentiate_max_blur, setup_context=save_images)
