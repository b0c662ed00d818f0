"""The search for speed-ups: on a tiny model with deliberate changes, and on a model of one's own."""

import math
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.config import ROOT
from common.errors import UserError
from common.study.tune import Change, Search, Trace, apart, distance, median_gain, table, take_trace
from common.throughput import timed
from common.tune import optimize

SIZE = 192


class Trained:
    """A model whose state says how many times too often it computes, and how wrongly."""

    def __init__(self, state, dtype):
        torch.manual_seed(1)
        self.state = state
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1)).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inputs = torch.randn(64, SIZE, dtype=torch.float64).to(dtype)

    def step(self, number=0):
        self.optimizer.zero_grad()
        for _ in range(self.state["repeats"]):
            loss = self.model(self.inputs).square().mean() * self.state["scale"]
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def turn(self):
        return timed(self.step, torch.device("cpu"))

    def close(self):
        self.state = None


class Bench:
    """Builds it from a state."""

    def build(self, state, change):
        return Trained(state, torch.float32)

    def trace(self, state, *, is_exact):
        dtype = torch.float64 if is_exact else torch.float32
        trained = Trained(state, dtype)
        return take_trace(trained.model, trained.step, 3, dtype)


def changed(name, *, keeps_mathematics=True, evidence="", missing="", apart_from=(), **values):
    return Change(
        name=name,
        apply=lambda state: state | values,
        keeps_mathematics=keeps_mathematics,
        evidence=evidence,
        missing=missing,
        apart_from=apart_from,
    )


def failing(error):
    def apply(state):
        raise error

    return Change(name=type(error).__name__, apply=apply)


def searched(*changes, seconds=60):
    told = []
    start = {"repeats": 20, "scale": 1.0}
    found = Search(Bench(), start, seconds=seconds, report=told.append).run(changes)
    assert told == found.tried
    return found, {each.name: each for each in found.tried}


def test_the_faster_is_kept_the_slower_the_wrong_and_the_broken_are_refused_with_their_reason():
    found, tried = searched(
        changed("faster", repeats=5),
        changed("slower", repeats=40),
        changed("wrong", repeats=1, scale=1.001),
        changed("absent", missing="not available: no C++ compiler"),
        failing(UserError("no 2-d convolution in this model")),
        failing(RuntimeError("a kernel\nand its trace")),
    )
    assert found.kept == ["faster"] and found.state == {"repeats": 5, "scale": 1.0}
    assert tried["faster"].gain.low > 1.3 and tried["faster"].why == "faster"
    assert tried["faster"].difference == "float32 same bits; float64 same bits"
    assert tried["slower"].gain.high < 1 and tried["slower"].why == "slower"  # than what was kept
    assert tried["wrong"].why.startswith("differs: by 1.0e-03")
    assert tried["absent"].why == "not available: no C++ compiler"
    assert tried["UserError"].why == "not available: no 2-d convolution in this model"
    assert tried["RuntimeError"].why == "not available: RuntimeError: a kernel"
    text = table(found.tried, found.seconds)
    assert all(name in text for name in tried) and "tuning took" in text


def test_what_changes_training_is_kept_for_its_time_or_by_its_card_and_not_beside_an_alternative():
    _, tried = searched(
        changed("smaller", keeps_mathematics=False, evidence="costs quality", repeats=2, scale=2.0),
        changed("better", keeps_mathematics=False, evidence="higher quality", repeats=3),
        changed("other", keeps_mathematics=False, evidence="as good", apart_from=("better",)),
        changed("exact", repeats=1),
    )
    assert tried["smaller"].why == "faster" and tried["better"].why == "by its card: higher quality"
    assert tried["exact"].is_kept  # compared with the training as it is now
    assert tried["other"].why == "an alternative to better, which is kept"
    assert "CHANGES TRAINING" in table(list(tried.values()), 1)


def test_a_search_ends_with_its_time():
    found, tried = searched(changed("faster", repeats=5), seconds=0)
    assert found.kept == [] and tried["faster"].why == "the time for tuning is up"

    def forever(state):
        while True:
            math.sqrt(2)

    found, tried = searched(Change(name="endless", apply=forever), seconds=0.3)
    assert tried["endless"].why == "the time for tuning is up" and found.seconds < 2


def test_the_interval_of_a_median_is_two_of_the_sorted_ratios():
    gain = median_gain([1.0 + number / 100 for number in range(12)])
    assert (gain.low, gain.high) == pytest.approx((1.01, 1.10))  # the second and the eleventh: 99.4 %
    assert gain.median == pytest.approx(1.055)
    eight = median_gain([1.1] * 7 + [0.9])
    assert (eight.low, eight.high) == (0.9, 1.1)  # all eight must be faster
    assert median_gain([1.2] * 7).low == 0


def test_joined_and_renamed_parameters_are_compared_by_their_values():
    q, k, other = torch.randn(3, 4), torch.randn(3, 4), torch.randn(5)
    plain = {"query": q, "key": k, "other": other}
    joined = {"qk": torch.cat([q, k]), "other": other}
    assert apart(joined, plain) == 0
    assert apart({"qk": torch.cat([q, k + 0.01]), "other": other}, plain) > 1e-3
    assert apart({"qk": q, "other": other}, plain) == math.inf
    trace = Trace(losses=[1.0], gradients=plain, updates=plain, dtype=torch.float32)
    assert distance(trace, trace) == 0
    lost = Trace(losses=[math.nan], gradients=plain, updates=plain, dtype=torch.float32)
    assert math.isnan(distance(lost, trace))


def convolutional():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def images(number=24):
    torch.manual_seed(3)
    return TensorDataset(torch.randn(number, 3, 16, 16), torch.randint(5, (number,)))


def test_a_model_of_ones_own_is_tuned_and_keeps_its_weights():
    model, loader = convolutional(), DataLoader(images(), batch_size=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    tuned = optimize(model, loader, nn.CrossEntropyLoss(), torch.optim.AdamW, seconds=6)
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert tuned.model is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name in ("channels_last", "fused_optimizer", "loader_workers_2", "compile"):
        assert name in tuned.report
    losses = []
    for inputs, targets in tuned.loader:
        losses.append(nn.functional.cross_entropy(tuned.model(inputs), targets))
        losses[-1].backward()
        tuned.optimizer.step()
    assert len(losses) == len(tuned.loader) == 3


def test_a_loader_that_is_used_up_by_reading_is_refused():
    batches = (batch for batch in [(torch.ones(2, 3), torch.ones(2, 1))])
    with pytest.raises(UserError, match="only once"):
        optimize(nn.Linear(3, 1), batches, nn.MSELoss(), torch.optim.AdamW)


def test_the_example_of_the_readme_runs_and_is_short():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "from common.tune import optimize" in code and len(code.splitlines()) <= 10
    names = {}
    exec(code.replace("seconds=60", "seconds=4"), names)
    assert isinstance(names["tuned"].model, nn.Module)
