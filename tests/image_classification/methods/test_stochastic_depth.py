"""Stochastic depth: against torchvision's, which computes what it drops; evaluation as without it."""

import copy

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock
from torchvision.ops import StochasticDepth as PlainDepth

from image_classification.methods.stochastic_depth import (
    StochasticBlock,
    apply_stochastic_depth,
    draw_depth,
)


def small(name="resnet18"):
    torch.manual_seed(0)
    return torchvision.models.get_model(name, weights=None, num_classes=5).double()


def blocks_of(model):
    return [each for each in model.modules() if isinstance(each, StochasticBlock)]


@pytest.mark.parametrize(("name", "num_blocks"), [("resnet18", 8), ("resnet50", 16)])
def test_evaluation_is_untouched_and_rates_grow_with_depth(name, num_blocks):
    model = small(name).eval()
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    expected = model(images)
    assert apply_stochastic_depth(model, 0.2) == num_blocks
    draw_depth(model)
    torch.testing.assert_close(model(images), expected, rtol=0, atol=0)
    rates = [block.drop_rate for block in blocks_of(model)]
    assert rates == pytest.approx([0.2 * number / num_blocks for number in range(1, num_blocks + 1)])


def test_blocks_are_dropped_as_often_as_their_rate_says():
    model = small()
    apply_stochastic_depth(model, 0.8)
    torch.manual_seed(1)
    counts = torch.zeros(8)
    for _ in range(2000):
        draw_depth(model)
        counts += torch.tensor([float(block.is_dropped) for block in blocks_of(model)])
    torch.testing.assert_close(counts / 2000, torch.arange(1, 9) / 10, atol=0.04, rtol=0)


class PlainBlock(nn.Module):
    """A residual block with torchvision's op, which draws from the same distribution by itself."""

    def __init__(self, block, rate, is_dropped):
        super().__init__()
        self.block, self.drop, self.is_dropped = block, PlainDepth(rate, "batch"), is_dropped

    def forward(self, x):
        block = self.block
        branch = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
        while True:  # until it draws what is asked for
            found = self.drop(branch)
            if bool((found == 0).all()) == self.is_dropped:
                break
        return block.relu(found + (x if block.downsample is None else block.downsample(x)))


def test_outputs_and_gradients_are_those_of_torchvision():
    model = small()
    apply_stochastic_depth(model, 0.6)
    torch.manual_seed(3)
    draw_depth(model)
    dropped = [block.is_dropped for block in blocks_of(model)]
    assert {True, False} == set(dropped)
    plain = copy.deepcopy(model)
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, StochasticBlock):
                setattr(parent, name, PlainBlock(child.block, child.drop_rate, child.is_dropped))
    images = torch.randn(3, 3, 40, 40, dtype=torch.float64)
    found, expected = model(images), plain(images)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    cotangent = torch.randn_like(found)
    for outputs in (found, expected):
        outputs.backward(cotangent)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-9, msg=name)
    first = blocks_of(model)[dropped.index(True)].block
    assert isinstance(first, BasicBlock) and not first.conv1.weight.grad.any()
    counted = [int(block.block.bn1.num_batches_tracked) for block in blocks_of(model)]
    assert counted == [0 if is_dropped else 1 for is_dropped in dropped]
