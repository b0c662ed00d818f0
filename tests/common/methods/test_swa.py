"""Stochastic weight averaging: the plain mean, when it is sampled, and that training is not touched."""

import pytest
import torch
from torch import nn

from common.methods.swa import averaged
from common.training.load import load_config
from common.training.registry import build_methods


def loaded(*settings):
    settings = ["max_duration=20ba", "evaluate_every=5ba", "schedule.warmup=2ba", *settings]
    return load_config("image_classification", "baseline", size="mini", settings=settings).config


def test_the_mean_of_parameters_and_statistics_is_the_plain_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    mean, seen = averaged(model), []
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(6, 3, dtype=torch.float64)).sum().backward()
        mean.update_parameters(model)
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
    assert int(mean.n_averaged) == 5
    for name, value in mean.module.state_dict().items():
        if value.is_floating_point():
            expected = torch.stack([each[name] for each in seen]).mean(dim=0)
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
            assert not torch.equal(value, model.state_dict()[name])
    assert all(each.grad is None for each in mean.parameters())
    assert all(each.grad is not None and each.requires_grad for each in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counters_of_batch_norm_do_not_stop_it_on_a_gpu():
    model = nn.BatchNorm1d(4).cuda()
    mean = averaged(model)
    for _ in range(3):
        model(torch.randn(6, 4, device="cuda"))
        mean.update_parameters(model)
    assert int(mean.n_averaged) == 3
    assert not torch.equal(mean.module.running_mean, model.running_mean)


def test_samples_start_late_and_are_evaluated():
    config = loaded("methods.swa={start: 0.5, every: 4ba}")
    (method,) = (each for each in build_methods(config) if each.name == "swa")
    model = nn.Linear(1, 1, bias=False)
    for num_steps in range(1, 21):
        nn.init.constant_(model.weight, num_steps)
        method.after_step(model, num_steps)
        sampled = [step for step in (12, 16, 20) if step <= num_steps]
        used = method.evaluation_model(model)
        assert (used is model) == (not sampled)
        expected = sum(sampled) / len(sampled) if sampled else num_steps
        assert used.weight.item() == pytest.approx(expected)
