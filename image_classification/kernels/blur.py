"""The blur [1, 2, 1] x [1, 2, 1] / 16 of channels-last images, forward and backward, as one pass over memory.

A depthwise convolution does the same; cuDNN has slow kernels for it in 16 bits and this layout. Here every
output reads its nine neighbours, whose rows lie in the caches: images are read once from memory and written
once. The backward pass is the same blur; with stride 2 each input reads the outputs that it went into.
"""

import os
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a constant where torch.compile traces


def output_length(length: int, stride: int) -> int:
    return (length - 1) // stride + 1


@torch.library.custom_op("ttt::blur", mutates_args=())
def blur(images: Tensor, stride: int) -> Tensor:
    """Return images (batch, channels, height, width) blurred with zero padding 1, channels last.

    Height and width become ceil(length / stride); `stride` is 1 or 2. On a GPU, or with TRITON_INTERPRET=1.
    """
    from image_classification.kernels.blur_triton import blur_triton

    images = images.contiguous(memory_format=torch.channels_last)
    height, width = (output_length(length, stride) for length in images.shape[2:])
    return blur_triton(images, height, width, stride=stride, is_backward=False)


@torch.library.custom_op("ttt::blur_backward", mutates_args=())
def blur_backward(gradient: Tensor, height: int, width: int, stride: int) -> Tensor:
    """Take the gradient of a blurred image back to images of this height and width."""
    from image_classification.kernels.blur_triton import blur_triton

    gradient = gradient.contiguous(memory_format=torch.channels_last)
    return blur_triton(gradient, height, width, stride=stride, is_backward=True)


@blur.register_fake
def allocate_blurred(images: Tensor, stride: int) -> Tensor:
    return allocate(images, *(output_length(length, stride) for length in images.shape[2:]))


@blur_backward.register_fake
def allocate_gradient(gradient: Tensor, height: int, width: int, stride: int) -> Tensor:
    return allocate(gradient, height, width)


def allocate(images: Tensor, height: int, width: int) -> Tensor:
    shape = (*images.shape[:2], height, width)
    return torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)


def keep_shape(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.size, ctx.stride = inputs[0].shape[2:], inputs[1]


def differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return blur_backward(gradient, *ctx.size, ctx.stride), None


blur.register_autograd(differentiate, setup_context=keep_shape)
