"""One training step of a small network with batch norm, in float64: what must not change."""

import copy

import torch
from torch import nn

EXACT = {"rtol": 1e-10, "atol": 1e-12}


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
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, **EXACT)
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], **EXACT)
        assert not torch.equal(value, start[name])
