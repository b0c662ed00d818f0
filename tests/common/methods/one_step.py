"""One training step of a small network with batch norm, in float64; a step by its number."""

import copy

import torch
from torch import nn

from common.training.method import Progress

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def at(step):
    """Return the progress of a training of 100 steps."""
    return Progress(step=step, num_steps=100, epoch=0, num_epochs=1, seed=5)


def network():
    """Return convolutions, batch norm and ReLU."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    return nn.Sequential(*layers).double()


def assert_same_step(model, plain, images):
    """Compare loss, gradients, statistics and weights after a step of each."""
    start, losses = copy.deepcopy(plain.state_dict()), []
    for each in (plain, model):
        each.zero_grad()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        loss = each(images).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, **EXACT)
    gradients = ([parameter.grad for parameter in each.parameters()] for each in (model, plain))
    torch.testing.assert_close(*gradients, **EXACT)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), **EXACT)
    assert not any(torch.equal(value, start[name]) for name, value in model.state_dict().items())
