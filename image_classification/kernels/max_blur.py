"""A max-pool over 3x3 windows and the blur of stride 2 after it, forward and backward, as one pass over
memory.

In kernels of their own the max-pool writes a maximum and an index for every pixel, and the blur reads them.
Here every output takes its nine maxima from 25 pixels, whose rows lie in the caches. The backward pass finds
the maxima again, in the images: no index is kept.
"""

from typing import Any

import torch
from torch import Tensor

from image_classification.kernels.blur import allocate, output_length

STRIDE = 2  # of the blur


@torch.library.custom_op("ttt::max_blur", mutates_args=())
def max_blur(images: Tensor) -> Tensor:
    """Return the maxima of 3x3 windows of images, blurred with zero padding 1 and stride 2, channels last.

    Images are (batch, channels, height, width); every pixel is the centre of a window. Height and width
    become ceil(length / 2). On a GPU, or with TRITON_INTERPRET=1.
    """
    from image_classification.kernels.max_blur_triton import max_blur_triton

    images = images.contiguous(memory_format=torch.channels_last)
    return max_blur_triton(images, allocate_max_blurred(images))


@torch.library.custom_op("ttt::max_blur_backward", mutates_args=())
def max_blur_backward(images: Tensor, gradient: Tensor) -> Tensor:
    """Take the gradient of the blurred maxima back to the images; of equal pixels, the first has it."""
    from image_classification.kernels.max_blur_triton import max_blur_backward_triton

    images = images.contiguous(memory_format=torch.channels_last)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    return max_blur_backward_triton(images, gradient, allocate_gradient(images, gradient))


@max_blur.register_fake
def allocate_max_blurred(images: Tensor) -> Tensor:
    return allocate(images, *(output_length(length, STRIDE) for length in images.shape[2:]))


@max_blur_backward.register_fake
def allocate_gradient(images: Tensor, gradient: Tensor) -> Tensor:
    return allocate(images, *images.shape[2:])


def keep_images(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def differentiate(ctx: Any, gradient: Tensor) -> Tensor:
    result: Tensor = max_blur_backward(*ctx.saved_tensors, gradient)
    return result


max_blur.register_autograd(differentiate, setup_context=keep_images)
