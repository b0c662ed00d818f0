"""Channels last: another order in memory, the same numbers."""

import copy

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.methods.channels_last import ChannelsLast, apply_channels_last


def test_outputs_stay_and_the_layout_changes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)).double()
    converted = copy.deepcopy(model)
    assert apply_channels_last(converted) == 2
    assert converted[2].weight.is_contiguous(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    found = converted(images.contiguous(memory_format=torch.channels_last))
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, model(images))


def test_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(UserError, match="methods.channels_last"):
        ChannelsLast("channels_last", ChannelsLast.Config()).model(nn.Linear(2, 2))
