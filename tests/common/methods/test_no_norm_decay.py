"""No weight decay on norms and biases: who decays, in each optimizer."""

import pytest
import torch
from torch import nn

from common.config.schema import OptimizerConfig
from common.methods.no_norm_decay import split_decay
from common.training.optim import build_optimizer


@pytest.mark.parametrize("name", ["sgd", "decoupled_sgd", "adamw"])
def test_matrices_decay_and_vectors_do_not(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build_optimizer(model, OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5))
    assert split_decay(optimizer) == 3
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):  # the decay survives a step
        optimizer.step()
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert changed == [True, False, False, False]
    factor = {"sgd": None, "decoupled_sgd": 0.5**2, "adamw": 0.95**2}[name]
    if factor:
        torch.testing.assert_close(model[0].weight.detach(), before[0] * factor)
