"""The averages of the weights, ema and swa: their definition and start; training is not touched."""

import pytest
import torch
from torch import nn

from common.methods.ema import Ema, copy_model, ema_smoothing, update_average
from common.methods.swa import start_average
from common.training.load import load_config
from common.training.registry import build_methods

PUBLISHED = 0.8705505633  # the smoothing of a half-life of 100 steps, every 20


def model_with_buffers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()


def train(model):
    """Change parameters, statistics and gradients."""
    model(torch.randn(6, 3, dtype=torch.float64)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize(
    ("name", "weights"),  # of the model at first and after each of five steps
    [("ema", [0.9**5, *(0.1 * 0.9**number for number in (4, 3, 2, 1, 0))]), ("swa", [0, *[0.2] * 5])],
)
def test_parameters_and_statistics_are_those_of_all_steps_by_their_weights(name, weights):
    model = model_with_buffers()
    average, states = copy_model(model) if name == "ema" else start_average(model), []
    for step in range(6):
        if step:
            train(model)
            average.update_parameters(model) if name == "swa" else update_average(average, model, 0.9)
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    average = average.module if name == "swa" else average
    for key, value in average.state_dict().items():
        if value.is_floating_point():
            expected = sum(weight * state[key] for weight, state in zip(weights, states, strict=True))
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        elif name == "ema":
            assert int(value) == 5  # counters are those of the model
    assert all(each.grad is None for each in average.parameters())
    assert all(each.grad is not None and each.requires_grad for each in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counters_of_batch_norm_do_not_stop_swa_on_a_gpu():
    model = nn.BatchNorm1d(4).cuda()
    mean = start_average(model)
    for _ in range(3):
        model(torch.randn(6, 4, device="cuda"))
        mean.update_parameters(model)
    assert int(mean.n_averaged) == 3
    assert not torch.equal(mean.module.running_mean, model.running_mean)


@pytest.mark.parametrize(("first_step", "start"), [(0, 20), (50, 60)])
def test_ema_starts_with_a_copy_at_the_first_update_and_moves_as_published(first_step, start):
    assert ema_smoothing(100, 20) == pytest.approx(PUBLISHED, abs=1e-10)
    method = Ema("ema", Ema.Config(half_life_steps=100, every_steps=20, first_step=first_step))
    model = model_with_buffers()
    for num_steps in range(1, start):
        method.after_step(model, num_steps)
    assert method.evaluation_model(model) is model
    method.after_step(model, start)
    average, first = method.evaluation_model(model), model[0].weight.detach().clone()
    assert average is not model and average[0].weight.equal(first)
    with torch.no_grad():
        model[0].weight.add_(1)
    for num_steps in range(start + 1, start + 20):
        method.after_step(model, num_steps)
    assert average[0].weight.equal(first)
    method.after_step(model, start + 20)
    torch.testing.assert_close(average[0].weight, first + (1 - PUBLISHED))
    assert model[0].weight.equal(first + 1)


def test_swa_starts_late_and_evaluates_the_mean_of_its_samples():
    settings = ["max_duration=20ba", "evaluate_every=5ba", "schedule.warmup=2ba"]
    settings += ["methods.swa={start: 0.5, every: 4ba}"]
    config = load_config("image_classification", "baseline", size="mini", settings=settings).config
    (method,) = (each for each in build_methods(config) if each.name == "swa")
    model = nn.Linear(1, 1, bias=False)
    for num_steps in range(1, 21):
        nn.init.constant_(model.weight, num_steps)
        method.after_step(model, num_steps)
        sampled = [step for step in (12, 16, 20) if step <= num_steps]
        used = method.evaluation_model(model)
        assert (used is model) == (not sampled)
        assert used.weight.item() == pytest.approx(sum(sampled) / len(sampled) if sampled else num_steps)


def test_parameters_that_are_shared_stay_shared_in_the_copy():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    average = copy_model(model)
    assert average[0].weight is average[1].weight
    before = average[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    update_average(average, model, 0.75)
    torch.testing.assert_close(average[0].weight, before + 0.25)


def test_the_first_sample_of_swa_is_at_its_start_where_the_product_is_inexact():
    settings = ["max_duration=100ba", "evaluate_every=50ba", "schedule.warmup=2ba"]
    settings += ["methods.swa={start: 0.55, every: 1ba}"]
    config = load_config("image_classification", "baseline", size="mini", settings=settings).config
    (method,) = (method for method in build_methods(config) if method.name == "swa")
    assert method.sample_steps(config)[0] == 55
