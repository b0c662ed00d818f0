"""The moving average: published smoothing, buffers, and that training is not touched."""

import pytest
import torch
from torch import nn

from common.methods.ema import Ema, copy_model, ema_smoothing, update_average


def test_smoothing_is_the_published_one() -> None:
    assert ema_smoothing(100, 20) == pytest.approx(0.8705505633, abs=1e-10)


def model_with_buffers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()


def test_parameters_and_buffers_follow_their_definition() -> None:
    model = model_with_buffers()
    average = copy_model(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(6, 3, dtype=torch.float64))  # moves the running statistics
        update_average(average, model, 0.9)
        for name, value in model.state_dict().items():
            is_float = value.is_floating_point()
            expected[name] = 0.9 * expected[name] + 0.1 * value if is_float else value.clone()
    assert int(average.state_dict()["1.num_batches_tracked"]) == 5
    torch.testing.assert_close(dict(average.state_dict()), expected)


@pytest.mark.parametrize(("first_step", "start"), [(0, 20), (50, 60)])
def test_method_starts_with_a_copy_at_the_first_update(first_step: int, start: int) -> None:
    method = Ema("ema", Ema.Config(half_life_steps=100, every_steps=20, first_step=first_step))
    model = model_with_buffers()
    model(torch.randn(6, 3, dtype=torch.float64)).sum().backward()
    for num_steps in range(1, start):
        method.after_step(model, num_steps)
    assert method.evaluation_model(model) is model
    method.after_step(model, start)
    average, first = method.evaluation_model(model), model[0].weight.detach().clone()
    assert average is not model and average[0].weight.equal(first)
    assert all(each.grad is None for each in average.parameters())
    with torch.no_grad():
        model[0].weight.add_(1)
    for num_steps in range(start + 1, start + 20):
        method.after_step(model, num_steps)
    assert average[0].weight.equal(first)
    method.after_step(model, start + 20)
    torch.testing.assert_close(average[0].weight, first + (1 - 0.8705505633))
    assert model[0].weight.equal(first + 1) and model[0].weight.grad is not None


def test_shared_parameters_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    average = copy_model(model)
    assert average[0].weight is average[1].weight
    with torch.no_grad():
        model[0].weight.add_(1)
    before = average[0].weight.clone()
    update_average(average, model, 0.75)
    torch.testing.assert_close(average[0].weight, before + 0.25)
