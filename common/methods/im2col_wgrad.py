"""Im2col weight gradients.

What. Computes the weight gradient of a convolution as one matrix product, of the gradient of its output with
the patches of its input (im2col), where the output has few positions. Output and gradient of the input stay
those of torch's convolution. Only on a CPU: on a GPU the configuration drops it.
Effect on quality. None: the same sums in another order.
Effect on time. For outputs of 2 x 2 or 3 x 3 pixels and a batch of 32, oneDNN computes this gradient at a
third to a half of the rate of a matrix product, and in another memory layout than channels last, from which
it is converted (bf16, one machine).
Relieves. Backward pass: weight gradients.
When not. More positions: patches of a 3 x 3 convolution hold a pixel nine times, and oneDNN is as fast.
Use. With the model: `apply_im2col_wgrad(model)`.
Source. Chellapilla, Puri and Simard 2006, High Performance Convolutional Neural Networks for Document
Processing, https://inria.hal.science/inria-00112631.
Unlike Composer. Composer has no such method.
"""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input

from common.config.schema import RunConfig, Strict
from common.training.method import Method, autocast_dtype

Pair = tuple[int, int]


class Im2ColConv2d(nn.Conv2d):
    """A convolution whose weight gradient is one matrix product, for at most `max_positions` of an output."""

    max_positions: int  # set by apply_im2col_wgrad

    def forward(self, input: Tensor) -> Tensor:
        trains_on_cpu = input.device.type == "cpu" and self.weight.requires_grad
        is_batch = input.ndim == 4  # torch also takes a single image
        if not trains_on_cpu or not is_batch or self.num_positions(input) > self.max_positions:
            return super().forward(input)
        dtype = autocast_dtype(self.weight)
        convolved: Tensor = Im2ColWeightGradient.apply(
            input.to(dtype), self.weight.to(dtype), self.stride, self.padding
        )
        return convolved

    def num_positions(self, input: Tensor) -> int:
        """Return batch x height x width of the output for an input (batch, channels, height, width)."""
        sizes = zip(input.shape[2:], self.kernel_size, self.stride, self.padding, strict=True)
        height, width = ((size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sizes)  # type: ignore[operator]
        return len(input) * height * width


class Im2ColWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(input, weight, None, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        input, weight = ctx.saved_tensors
        out_channels, in_channels, *kernel = weight.shape
        patches = im2col(input, (kernel[0], kernel[1]), ctx.stride, ctx.padding)
        product = gradient.permute(0, 2, 3, 1).reshape(-1, out_channels).T @ patches
        weight_gradient = product.view(out_channels, *kernel, in_channels).permute(0, 3, 1, 2)
        if not ctx.needs_input_grad[0]:
            return None, weight_gradient, None, None
        input_gradient: Tensor = conv2d_input(input.shape, weight, gradient, ctx.stride, ctx.padding)  # type: ignore[no-untyped-call]
        return input_gradient, weight_gradient, None, None


def im2col(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the patches of images (batch, channels, height, width) that each position of an output sees.

    They are (positions, kernel height x kernel width x channels), padded with zeros.
    """
    (rows, columns), channels = padding, images.shape[1]
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, columns, columns, rows, rows))
    windows = padded.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, kernel[0] * kernel[1] * channels)


def apply_im2col_wgrad(model: nn.Module, max_positions: int = 512) -> int:
    """Convert every plain 2-d convolution in place; returns how many it has converted.

    Weights stay the same objects; convolutions of an earlier call stay as they are. Plain are those of torch
    itself, without bias, groups or dilation, padded with zeros. A convolution uses the matrix product where
    batch x height x width of its output is at most `max_positions`.
    """
    convolutions = [module for module in model.modules() if is_plain(module)]
    for convolution in convolutions:
        convolution.__class__ = Im2ColConv2d
        convolution.max_positions = max_positions  # type: ignore[assignment]
    return len(convolutions)


def is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d or module.bias is not None or module.padding_mode != "zeros":
        return False
    return module.groups == 1 and module.dilation == (1, 1) and not isinstance(module.padding, str)


class Im2ColWgrad(Method):
    is_exact = True

    class Config(Strict):
        max_positions: int = Field(
            default=512, ge=1, description="of an output, batch x height x width, for the product"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        return self.dropped_from(config) if torch.cuda.is_available() else config

    def model(self, model: nn.Module) -> nn.Module:
        if not apply_im2col_wgrad(model, self.settings.max_positions):
            self.refuse("no plain 2-d convolution in this model")
        return model
