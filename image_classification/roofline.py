"""What a training image of a ResNet must cost, and how long a run of measured rates would take."""

import numpy as np
import torch
from torch import Tensor, nn

from common.config.duration import evaluation_seconds
from common.config.schema import DataConfig
from common.training.benchmark import Projection, Work

HALF_BYTES = 2  # activations in 16 bits


class Shapes:
    """Elements that the layers of a model read and write for one image, by kind of layer."""

    def __init__(self, model: nn.Module, size_px: int) -> None:
        self.conv_in = self.conv_out = self.conv_flops = self.stem_flops = 0
        self.norm = self.relu = self.added = self.pooled = 0
        hooks = [module.register_forward_hook(self.count) for module in model.modules()]
        with torch.no_grad():
            model.eval()(torch.empty(1, 3, size_px, size_px, device="meta"))
        for hook in hooks:
            hook.remove()

    def count(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Add one call of a layer."""
        num_in, num_out = inputs[0].numel(), output.numel()
        if isinstance(module, nn.Conv2d | nn.Linear):
            flops = 2 * num_out * module.weight[0].numel()
            self.conv_flops += flops
            self.stem_flops += flops if num_in == inputs[0].shape[-1] ** 2 * 3 else 0
            self.conv_in, self.conv_out = self.conv_in + num_in, self.conv_out + num_out
        elif isinstance(module, nn.BatchNorm2d):
            self.norm += num_out
        elif isinstance(module, nn.ReLU):
            self.relu += num_out
        elif isinstance(module, nn.MaxPool2d):
            self.pooled += num_in + num_out
        elif hasattr(module, "downsample"):  # a residual block ends with an addition
            self.added += num_out


def training_work(model: nn.Module, size_px: int, *, is_fused: bool) -> Work:
    """Return the work of one image (3, size_px, size_px), forward and backward, in 16 bits.

    `model` lies on the meta device. Each convolution takes as many operations for the gradient of its input
    and of its weight as forward; the stem needs no gradient of its input. Elements read or written: by a
    convolution 3 times its input and output; by a batch norm 3 forward and 5 backward, a ReLU 2 and 3, an
    addition 3 and 3, a pooling 2 and 2. Fused, ReLU and addition ride on the passes of the batch norm.
    Weights are left out: a batch shares them.
    """
    shapes = Shapes(model, size_px)
    both = 3 * (shapes.conv_in + shapes.conv_out) + 8 * shapes.norm + 3 * shapes.added + 2 * shapes.pooled
    extra = shapes.added if is_fused else 5 * shapes.relu + 3 * shapes.added
    return Work(flops=3 * shapes.conv_flops - shapes.stem_flops, num_bytes=HALF_BYTES * (both + extra))


def project(
    sizes_px: list[int],
    images_per_s: dict[int, float],
    data: DataConfig,
    *,
    num_evaluations: int,
    num_devices: int,
) -> Projection:
    """Return the minutes of epochs of these sizes on devices of these rates by size in pixels.

    Between measured sizes the time of an image grows linearly with its area; below the smallest it stays.
    """
    measured = sorted((size**2, 1 / rate) for size, rate in images_per_s.items())
    areas, seconds = (np.array(column) for column in zip(*measured, strict=True))
    train_s = np.interp(np.array(sizes_px) ** 2, areas, seconds).sum() * data.num_train_samples
    evaluation_s = evaluation_seconds(num_evaluations, data.num_evaluation_samples, 1 / seconds[-1])
    return Projection(
        minutes=float(train_s + evaluation_s) / num_devices / 60,
        assuming=(
            f"if {len(sizes_px)} epochs suffice as published, the loader keeps up, devices scale perfectly "
            f"and an image of the {num_evaluations} evaluations takes a third of the largest training one"
        ),
    )
