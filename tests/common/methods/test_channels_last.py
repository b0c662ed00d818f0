"""Channels last: another order in memory, the same numbers."""

import torch

from common.methods.channels_last import apply_channels_last
from tests.common.methods.one_step import assert_same_step, network


def test_the_layout_changes_and_a_step_stays_what_it_was() -> None:
    model = network()
    assert apply_channels_last(model) == 2
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 9, 7, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    assert_same_step(model, network(), images)
    assert model(images).is_contiguous(memory_format=torch.channels_last)
