"""Layer freezing: layers freeze in order and in time, and the others train as without frozen ones."""

import copy

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.methods.layer_freezing import LayerFreezing, freeze_layers, frozen_share
from common.training.method import Batch
from tests.common.methods.one_step import at


def small():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)), nn.Tanh(), nn.Linear(3, 3)).double()


def frozen(model):
    """Return the numbers of layers with a parameter that is not trained."""
    trained = [all(parameter.requires_grad for parameter in layer.parameters()) for layer in model]
    return [number for number, is_trained in enumerate(trained) if not is_trained]


def test_the_share_grows_linearly_after_the_start():
    found = [frozen_share(done, 0.5, 0.8) for done in (0, 0.5, 0.75, 1)]
    assert found == pytest.approx([0, 0, 0.4, 0.8])


@pytest.mark.parametrize("before", [set(), {0, 2}], ids=["none", "frozen by something else"])
def test_the_first_layers_stop_and_the_last_never_does(before):
    model = small()
    for number in before:
        model[number].weight.requires_grad_(False)
    for share, count in ((0, 0), (0.39, 1), (0.4, 2), (1, 5), (0.2, 1), (0, 0)):
        assert freeze_layers(model, share) == count
        assert frozen(model) == sorted(before | set(range(count)))
    assert model[2].bias.requires_grad


def test_a_parameter_of_two_layers_is_that_of_the_first():
    model = small()
    model[4].weight = model[0].weight
    freeze_layers(model, 0.2)
    assert not model[4].weight.requires_grad and model[4].bias.requires_grad
    for share in (1, 0):
        freeze_layers(model, share)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_frozen_layers_stay_and_the_others_train_as_if_alone(kind):
    model = small()
    alone = copy.deepcopy(model)
    names = {"lr": 0.1, "weight_decay": 0.1}
    optimizers = [kind(model.parameters(), **names), kind(alone[2:].parameters(), **names)]
    freeze_layers(model, 0.4)
    inputs = torch.randn(6, 3, dtype=torch.float64)
    for _ in range(4):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            each(inputs).square().sum().backward()
            optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_what_is_frozen_depends_on_the_step_alone():
    method = LayerFreezing("layer_freezing", LayerFreezing.Config(start=0.5))
    model = method.model(small())
    given = Batch(inputs={}, targets={}, num_samples=1)
    for step, expected in ((90, [0, 1, 2, 3]), (0, []), (65, [0]), (50, []), (99, [0, 1, 2, 3])):
        assert method.batch(given, at(step)) is given
        assert frozen(model) == expected
    method.batch(given, None)
    assert frozen(model) == [0, 1, 2, 3]


def test_several_ranks_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="methods.layer_freezing: trains on one rank only"):
        LayerFreezing("layer_freezing", LayerFreezing.Config()).model(small())
