"""Im2col convolutions.

What. Computes a convolution whose output has few positions as matrix products with the patches of its input
(im2col): the output, the gradient of its input and that of its weight. With more positions only the gradient
of the weight is such a product, and with many none. Only on a CPU: on a GPU the configuration drops it.
Effect on quality. None but rounding: in 16 bits a gradient of the input is a sum of products that are each
rounded before.
Effect on time. oneDNN computes convolutions of so few positions far below the rate of a matrix product. Steps
of ResNet-18 at 56 pixels gained most on the two processors measured, with and without bfloat16
(results/throughput: 2cpu-Xeon-e40d2b, 2cpu-EPYC-c82af2).
Relieves. Forward pass, backward pass: convolutions of small images.
When not. Larger outputs: patches of a 3 x 3 convolution hold a pixel nine times, and oneDNN is as fast. In
float32 one bench gained nothing at 84 and 112 pixels.
Use. With the model: `apply_im2col(model)`.
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
    """A convolution by matrix products where its output has few positions; in evaluation, too."""

    max_positions: int  # apply_im2col sets both
    max_weight_positions: int

    def forward(self, input: Tensor) -> Tensor:
        is_trainable_on_cpu = input.device.type == "cpu" and self.weight.requires_grad
        is_batch = input.ndim == 4  # torch also takes a single image
        if not is_trainable_on_cpu or not is_batch:
            return super().forward(input)
        num_positions = self.num_positions(input)
        if num_positions > max(self.max_positions, self.max_weight_positions):
            return super().forward(input)
        function = ThreeProducts if num_positions <= self.max_positions else WeightProduct
        dtype = autocast_dtype(self.weight)
        convolved: Tensor = function.apply(input.to(dtype), self.weight.to(dtype), self.stride, self.padding)
        return convolved

    def num_positions(self, input: Tensor) -> int:
        """Return batch x height x width of the output for an input (batch, channels, height, width)."""
        sizes = zip(input.shape[2:], self.kernel_size, self.stride, self.padding, strict=True)
        height, width = ((size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sizes)  # type: ignore[operator]
        return len(input) * height * width


class ThreeProducts(torch.autograd.Function):
    """Output and both gradients are matrix products; the output is in channels-last order."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        windows = im2col(input, weight, stride, padding)
        ctx.save_for_backward(weight, windows)
        ctx.shape, ctx.stride, ctx.padding = input.shape, stride, padding
        output = windows.flatten(0, 2).flatten(1) @ as_matrix(weight).T
        images = output.view(*windows.shape[:3], len(weight)).permute(0, 3, 1, 2)
        return images.detach()  # autograd lets nobody change a view in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        weight, windows = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0]:
            summands = (as_rows(gradient) @ as_matrix(weight)).view_as(windows)
            input_gradient = col2im(summands, ctx.shape, ctx.stride, ctx.padding)
        return input_gradient, weight_gradient(gradient, windows, weight), None, None


class WeightProduct(torch.autograd.Function):
    """The gradient of the weight is a matrix product; output and input gradient are torch's."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(weight, input)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(input, weight, None, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        weight, input = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = conv2d_input(input.shape, weight, gradient, ctx.stride, ctx.padding)  # type: ignore[no-untyped-call]
        windows = im2col(input, weight, ctx.stride, ctx.padding)
        return input_gradient, weight_gradient(gradient, windows, weight), None, None


def im2col(images: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Return what each position of an output sees of images (batch, channels, height, width), zeros outside.

    It is (batch, output height, output width, kernel height, kernel width, channels), contiguous.
    """
    rows, columns = padding
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, columns, columns, rows, rows))
    windows = padded.unfold(1, weight.shape[2], stride[0]).unfold(2, weight.shape[3], stride[1])
    return windows.permute(0, 1, 2, 4, 5, 3).contiguous()


def col2im(windows: Tensor, shape: torch.Size, stride: Pair, padding: Pair) -> Tensor:
    """Return images of a shape (batch, channels, height, width): for each pixel the sum over its windows.

    The adjoint of im2col. Sums of 16-bit windows are float32 until the end.
    """
    batch, channels, height, width = shape
    (rows, columns), (down, right) = padding, stride
    dtype = torch.promote_types(windows.dtype, torch.float32)
    padded = windows.new_zeros(batch, height + 2 * rows, width + 2 * columns, channels, dtype=dtype)
    _, num_down, num_right, kernel_height, kernel_width, _ = windows.shape
    for row in range(kernel_height):
        lines = padded[:, row : row + down * (num_down - 1) + 1 : down]
        for column in range(kernel_width):
            pixels = lines[:, :, column : column + right * (num_right - 1) + 1 : right]
            pixels += windows[:, :, :, row, column]
    images = padded[:, rows : rows + height, columns : columns + width]
    return images.to(windows.dtype).permute(0, 3, 1, 2)


def weight_gradient(gradient: Tensor, windows: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight, in channels-last order, from that of the output and its windows."""
    product = as_rows(gradient).T @ windows.flatten(0, 2).flatten(1)
    return product.view(len(weight), *windows.shape[3:]).permute(0, 3, 1, 2)


def as_rows(images: Tensor) -> Tensor:
    """Return images (batch, channels, height, width) as (positions, channels)."""
    return images.permute(0, 2, 3, 1).flatten(0, 2)


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as (output channels, kernel height x kernel width x input channels)."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def apply_im2col(model: nn.Module, max_positions: int = 512, max_weight_positions: int = 4096) -> int:
    """Convert every plain 2-d convolution in place; returns how many it has converted.

    Weights stay the same objects; convolutions of an earlier call stay as they are. Plain are convolutions of
    torch itself, without bias, groups or dilation, padded with zeros. Positions are batch x height x width of
    an output: up to `max_positions` all three products are matrix products, and up to `max_weight_positions`
    that of the weight's gradient. The products can be differentiated once.
    """
    convolutions = [module for module in model.modules() if is_plain(module)]
    for convolution in convolutions:
        convolution.__class__ = Im2ColConv2d
        convolution.max_positions = max_positions  # type: ignore[assignment]
        convolution.max_weight_positions = max_weight_positions  # type: ignore[assignment]
    return len(convolutions)


def is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d or module.bias is not None or module.padding_mode != "zeros":
        return False
    return module.groups == 1 and module.dilation == (1, 1) and not isinstance(module.padding, str)


class Im2Col(Method):
    is_exact = True

    class Config(Strict):
        max_positions: int = Field(
            default=512, ge=1, description="of an output, batch x height x width, for three products"
        )
        max_weight_positions: int = Field(
            default=4096, ge=1, description="the same, for the product that is the weight's gradient"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        return self.dropped_from(config) if torch.cuda.is_available() else config

    def model(self, model: nn.Module) -> nn.Module:
        settings = self.settings
        if not apply_im2col(model, settings.max_positions, settings.max_weight_positions):
            self.refuse("no plain 2-d convolution in this model")
        return model
