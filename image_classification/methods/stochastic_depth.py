"""Stochastic depth.

What. Leaves out residual blocks at random in training, deeper ones more often. The output of the others is
divided by 1 - rate, so that evaluation, which uses all blocks, stays as it is.
Effect on quality. Published: neutral with ResNet-50 at 0.2; the study uses it, at 0.1, for 270 epochs only.
Effect on time. Published: about 5 % faster. A block that is left out computes nothing.
Relieves. Forward pass, backward pass.
When not. Short trainings; a compiled model, whose steps have one graph (refused).
Use. With the model: `apply_stochastic_depth(model)`. Each batch: `draw_depth(model)`.
Source. Huang et al. 2016, https://arxiv.org/abs/1603.09382 (rates that grow linearly with depth); MosaicML
Composer 0.7, algorithms/stochastic_depth; torchvision.ops.StochasticDepth in mode `batch`, which computes
what it then drops.
Unlike Composer. Same defaults (0.2, growing linearly, whole blocks, the same on every rank). Branches are
divided by 1 - rate in training; there they are multiplied by it in evaluation. Dropping samples, a uniform
rate and its warm-up, off by default there, are left out. Basic blocks too, there bottlenecks only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from common.config.schema import RunConfig, Strict
from common.training.method import Batch, Method, Progress, replace_layers
from common.training.registry import refuse_compiled


def apply_stochastic_depth(model: nn.Module, drop_rate: float = 0.2) -> int:
    """Wrap the residual blocks of a ResNet, in place; returns their number.

    Block i of n, from 1, is left out with probability drop_rate * i / n. Call `draw_depth(model)` before
    every training step.
    """
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    wrapped = {
        block: StochasticBlock(block, drop_rate * number / len(blocks))
        for number, block in enumerate(blocks, 1)
    }
    return replace_layers(model, wrapped.get)


def draw_depth(model: nn.Module) -> None:
    """Draw which blocks the next step leaves out, from torch's random numbers on the CPU."""
    blocks = [module for module in model.modules() if isinstance(module, StochasticBlock)]
    for block, value in zip(blocks, torch.rand(len(blocks)).tolist(), strict=True):
        block.is_dropped = value < block.drop_rate


class WithoutBranch(torch.autograd.Function):
    """Returns its first input; the other inputs get gradients of 0, so that no parameter lacks one."""

    @staticmethod
    def forward(ctx: Any, shortcut: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return shortcut.view_as(shortcut)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class StochasticBlock(nn.Module):
    """A residual block whose branch is multiplied by 1 / (1 - drop_rate), or, if `is_dropped`, left out."""

    def __init__(self, block: nn.Module, drop_rate: float) -> None:
        super().__init__()
        self.block, self.drop_rate, self.is_dropped = block, drop_rate, False
        self.training = block.training

    def forward(self, images: Tensor) -> Tensor:
        block = self.block
        if not self.training:
            return block(images)
        shortcut = images if block.downsample is None else block.downsample(images)
        branch = [block.conv1, block.bn1, block.relu, block.conv2, block.bn2]
        if isinstance(block, Bottleneck):
            branch += [block.relu, block.conv3, block.bn3]
        if self.is_dropped:
            parameters = [parameter for layer in branch for parameter in layer.parameters()]
            return F.relu(WithoutBranch.apply(shortcut, *parameters))
        for layer in branch:
            images = layer(images)
        return block.relu(shortcut + images / (1 - self.drop_rate))


class StochasticDepth(Method):
    """Wraps the blocks and draws the depth of each step, the same on every rank and in every micro-batch.

    Raises UserError for a compiled model and for one without a residual block.
    """

    class Config(Strict):
        drop_rate: float = Field(
            default=0.2, gt=0, lt=1, description="of the last block; block i of n has i / n of it"
        )

    def configure(self, config: RunConfig) -> RunConfig:
        refuse_compiled(config, self.name)
        return config

    def model(self, model: nn.Module) -> nn.Module:
        if apply_stochastic_depth(model, self.settings.drop_rate) == 0:
            self.refuse("no residual block in this model")
        self.wrapped = model
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        if progress is not None:
            with progress.randomness(self.name):
                draw_depth(self.wrapped)
        return batch
