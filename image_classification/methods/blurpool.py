"""BlurPool.

What. Blurs with the filter [1, 2, 1] x [1, 2, 1] / 16 before every subsampling, so that a shift of the image
by a pixel hardly matters. In ResNet-50 this changes the max-pool and six strided convolutions.
Effect on quality. Published: +0.5 to 1 % top-1 on ImageNet (Zhang 2019).
Effect on time. The published form costs about 20 % of the step (calculated from memory traffic). Exact
rewrites make it cheaper: on a GPU one kernel for channels-last images takes the place of cuDNN's depthwise
convolution; before a 1x1 convolution the blur itself takes the stride (a quarter of its work); on a CPU in
bfloat16 the strided blur is a sliced dense one. On a GPU one kernel computes the max-pool and its blur.
Relieves. Nothing: it buys accuracy that fewer epochs and smaller images spend.
When not. Fine textures that alias into a useful signal; few channels: it costs more than their convolution.
Use. With the model: `apply_blurpool(model)  # in a state_dict of ResNet-50 layer2.0.conv2.weight becomes
layer2.0.conv2.1.weight`.
Source. Zhang 2019, Making Convolutional Networks Shift-Invariant Again,
http://proceedings.mlr.press/v97/zhang19a.html; MosaicML Composer 0.7, algorithms/blurpool (blur first, zero
padding).
Unlike Composer. The number of channels is required here, 16 by default there. Blur before the convolution,
its default, is the only order, and convolutions and max-pools are both replaced.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import Strict
from common.training.method import Method, replace_layers
from image_classification.kernels.blur import INTERPRETED, MAX_BLUR_STRIDE  # defines torch.ops.ttt

BLURRED = "has_its_blur"  # attribute of a convolution that has a blur before it


def apply_blurpool(model: nn.Module, min_channels: int = 16, *, fuses_max_pool: bool = True) -> int:
    """Blur before every max-pool and convolution of stride 2, in place; returns how many layers changed.

    Convolutions with fewer than `min_channels` input channels, and those that have a blur, are left alone.
    With `fuses_max_pool` a GPU computes a max-pool and its blur in one kernel.
    """
    device = next((parameter.device for parameter in model.parameters()), None)

    def blur(layer: nn.Module) -> nn.Module | None:
        blurred = blur_layer(layer, min_channels, fuses_max_pool=fuses_max_pool)
        return None if blurred is None else blurred.to(device)

    return replace_layers(model, blur)


def blur_layer(layer: nn.Module, min_channels: int, *, fuses_max_pool: bool) -> nn.Module | None:
    """Return the blurred form of a layer, sharing its weights, or None where there is nothing to blur."""
    if isinstance(layer, nn.MaxPool2d) and layer.stride in (2, (2, 2)):
        dense = nn.MaxPool2d(layer.kernel_size, 1, layer.padding, layer.dilation, ceil_mode=layer.ceil_mode)
        return MaxBlur(dense, is_fused=fuses_max_pool)
    is_strided = isinstance(layer, nn.Conv2d) and layer.stride == (2, 2) and layer.in_channels >= min_channels
    if isinstance(layer, nn.Conv2d) and is_strided and not getattr(layer, BLURRED, False):
        setattr(layer, BLURRED, True)
        is_pointwise = layer.kernel_size == (1, 1) and layer.padding == (0, 0)
        if is_pointwise:
            layer.stride = (1, 1)
        return nn.Sequential(Blur(stride=2 if is_pointwise else 1), layer)
    return None


def has_kernel(images: Tensor) -> bool:
    return (images.is_cuda or INTERPRETED) and images.dtype != torch.float64


class Blur(nn.Module):
    """Depthwise [1, 2, 1] x [1, 2, 1] / 16, zero padding 1; the filter is exact in every float type."""

    def __init__(self, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        line = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("filter", (line[:, None] * line / 16)[None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Blur (batch, channels, height, width); stride 2 halves and rounds up.

        The layout stays on a CPU; on a GPU the result is channels last, and can be differentiated once.
        """
        if has_kernel(images):
            blurred: Tensor = torch.ops.ttt.blur(images, self.stride)
            return blurred
        weight = self.filter.to(images.dtype).expand(images.shape[1], 1, 3, 3)
        is_sliced = self.stride == 2 and images.device.type == "cpu" and images.dtype == torch.bfloat16
        stride = 1 if is_sliced else self.stride
        blurred = F.conv2d(images, weight, stride=stride, padding=1, groups=images.shape[1])
        if is_sliced:
            is_channels_last = blurred.is_contiguous(memory_format=torch.channels_last)
            layout = torch.channels_last if is_channels_last else torch.contiguous_format
            blurred = blurred[:, :, ::2, ::2].contiguous(memory_format=layout)
        return blurred


class MaxBlur(nn.Sequential):
    """A max-pool of stride 1, then the blur of stride 2; with `is_fused` one GPU kernel for 3x3 windows."""

    def __init__(self, dense: nn.MaxPool2d, *, is_fused: bool = True) -> None:
        super().__init__(dense, Blur(stride=MAX_BLUR_STRIDE))
        sizes = dense.kernel_size, dense.padding, dense.dilation
        pairs = [size if isinstance(size, tuple) else (size, size) for size in sizes]
        self.is_fused = is_fused and pairs == [(3, 3), (1, 1), (1, 1)] and not dense.ceil_mode

    def forward(self, images: Tensor) -> Tensor:
        """Reduce (batch, channels, height, width); the layout is that of `Blur`."""
        fuses = self.is_fused and has_kernel(images)
        reduced: Tensor = torch.ops.ttt.max_blur(images) if fuses else super().forward(images)
        return reduced


class Blurpool(Method):
    class Config(Strict):
        min_channels: int = Field(
            ge=1, description="convolutions with fewer input channels are left alone; published: 16"
        )
        fuses_max_pool: bool = Field(
            default=True, description="on a GPU, the max-pool and its blur are one kernel"
        )

    def model(self, model: nn.Module) -> nn.Module:
        settings = self.settings
        if not apply_blurpool(model, settings.min_channels, fuses_max_pool=settings.fuses_max_pool):
            self.refuse("no strided layer in this model")
        return model
