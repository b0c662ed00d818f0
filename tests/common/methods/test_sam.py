"""Sharpness-aware gradients against their definition."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.methods.sam import Sam, sharpness_aware_gradients
from tests.common.methods.one_step import at


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    inputs, labels = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3

    def loss():
        return F.cross_entropy(model(inputs), labels)

    return model, loss


def gradients_at(model, loss, scale=1.0):
    def again():
        model.zero_grad()
        (scale * loss()).backward()

    return again


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_are_those_a_distance_uphill(scale):
    model, loss = small()
    parameters = list(model.parameters())
    plain = torch.autograd.grad(loss(), parameters)
    norm = torch.cat([each.flatten() for each in plain]).norm()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter, gradient in zip(parameters, plain, strict=True):
            parameter += 0.5 * gradient / norm
    expected = torch.autograd.grad(loss(), parameters)
    model.load_state_dict(before)

    again = gradients_at(model, loss, scale)
    again()
    sharpness_aware_gradients(model.parameters(), again, rho=0.5)
    for parameter, gradient, other in zip(parameters, expected, plain, strict=True):
        torch.testing.assert_close(parameter.grad, scale * gradient, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(parameter.grad, scale * other, rtol=1e-3)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_where_a_gradient_overflowed_nothing_is_moved():
    model, loss = small()
    again, before = gradients_at(model, loss), copy.deepcopy(model.state_dict())
    again()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model[0].weight.grad[0, 0] = torch.inf
    sharpness_aware_gradients(model.parameters(), again)
    torch.testing.assert_close([each.grad for each in model.parameters()], plain, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_parameters_without_a_gradient_are_left_alone():
    model, loss = small()
    model[0].requires_grad_(False)
    again = gradients_at(model, loss)
    again()
    sharpness_aware_gradients(model.parameters(), again)
    assert model[0].weight.grad is None and model[2].weight.grad is not None


def test_every_tenth_step_takes_a_second_pass():
    model, loss = small()
    again, calls = gradients_at(model, loss), []
    method = Sam("sam", Sam.Config())
    again()
    for step in range(30):
        method.gradients(model, at(step), lambda step=step: (calls.append(step), again()))
    assert calls == [9, 19, 29]
