"""The search for speed-ups: on a tiny model with deliberate changes, and on a model of one's own."""

import math
import random
import re
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.errors import UserError
from common.repository import ROOT
from common.study.tuning.traces import Trace, apart, distance, take_trace
from common.study.tuning.tune import Change, Refused, Search, TimeUpError, median_gain, table, time_limit
from common.study.tuning.tune_model import ModelBench, optimize, with_workers

SIZE = 8
JITTER = random.Random(0)  # of turns, as of a machine that does other things too


class Trained:
    """A model whose state says how long a turn takes, and how wrong it is."""

    def __init__(self, state, dtype):
        torch.manual_seed(1)
        self.state = state
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1)).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inputs = torch.randn(64, SIZE, dtype=torch.float64).to(dtype)

    def step(self, number=0):
        self.optimizer.zero_grad()
        loss = self.model(self.inputs).square().mean() * self.state["scale"]
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def turn(self):
        return self.state["repeats"] * JITTER.uniform(0.9, 1.1)

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


def changed(name, *, is_exact=True, evidence="", missing="", conflicts_with=(), **values):
    return Change(
        name=name,
        apply=lambda state: state | values,
        is_exact=is_exact,
        evidence=evidence,
        missing=missing,
        conflicts_with=conflicts_with,
    )


def failing(error):
    def apply(state):
        raise error

    return Change(name=type(error).__name__, apply=apply)


def searched(*changes, seconds=60, bench=None):
    told = []
    start = {"repeats": 20, "scale": 1.0}
    found = Search(bench or Bench(), start, seconds=seconds, report=told.append).run(changes)
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
    assert found.kept_names == ["faster"] and found.state == {"repeats": 5, "scale": 1.0}
    assert tried["faster"].gain.low > 1.3 and tried["faster"].why == "faster"
    assert tried["faster"].difference == "float32 same bits; float64 same bits"
    assert tried["slower"].gain.high < 1 and tried["slower"].why == "slower"  # than what was kept
    assert tried["wrong"].why.startswith("differs: by 1.0e-03")
    assert tried["absent"].why == "not available: no C++ compiler"
    assert tried["UserError"].why == "not available: no 2-d convolution in this model"
    assert tried["RuntimeError"].why == "not available: RuntimeError: a kernel"
    outcomes = {name: each.outcome for name, each in tried.items()}
    assert outcomes == {
        "faster": "kept",
        "slower": "refused",
        "wrong": "refused",
        "absent": "not tried",
        "UserError": "not tried",
        "RuntimeError": "refused",
    }
    text = table(found.tried, found.seconds)
    assert all(name in text for name in tried) and "tuning took" in text


def test_what_changes_training_is_kept_for_its_time_or_by_its_card_and_not_beside_an_alternative():
    _, tried = searched(
        changed("smaller", is_exact=False, evidence="costs quality", repeats=2, scale=2.0),
        changed("better", is_exact=False, evidence="higher quality", repeats=10),
        changed("other", is_exact=False, evidence="as good", conflicts_with=("better",)),
        changed("exact", repeats=1),
    )
    assert tried["smaller"].why == "faster" and tried["better"].why == "by its card: higher quality"
    assert tried["exact"].is_kept  # compared with the training as it is now
    assert tried["other"].why == "an alternative to better, which is kept"
    assert "CHANGES TRAINING" in table(list(tried.values()), 1)


class InFloat32(Bench):
    """Trains in the precision that is exact where it runs, as fp32 on a GPU."""

    def trace(self, state, *, is_exact):
        return super().trace(state, is_exact=False)


class NotExactly(Bench):
    """Cannot train in another precision, as kernels that take bf16 only."""

    def trace(self, state, *, is_exact):
        if is_exact:
            raise UserError("the attention kernels of GPUs take bf16 or fp16")
        return super().trace(state, is_exact=is_exact)


@pytest.mark.parametrize("bench", [InFloat32(), NotExactly()])
def test_without_a_more_exact_precision_a_change_may_be_off_by_rounding_but_not_more(bench):
    _, tried = searched(
        changed("rounded", repeats=8, scale=1 + 1e-6), changed("wrong", repeats=1, scale=1.2), bench=bench
    )
    assert tried["rounded"].is_kept and "same bits" not in tried["rounded"].difference
    assert ("not compared exactly" in tried["rounded"].difference) == isinstance(bench, NotExactly)
    assert tried["wrong"].why.startswith("differs: by ") and "1.0e-02 allowed" in tried["wrong"].why


class Unlucky(Bench):
    """Its first process is slower than all that follow."""

    num_built = 0

    def build(self, state, change):
        self.num_built += 1
        return super().build(
            state | {"repeats": state["repeats"] * (3 if self.num_built == 1 else 1)}, change
        )


def test_a_gain_has_to_show_again_between_new_processes():
    bench = Unlucky()
    _, tried = searched(changed("nothing"), changed("faster", repeats=5), bench=bench)
    assert tried["nothing"].gain.median < 1.5  # not the 3 of the first two processes
    assert tried["faster"].is_kept and bench.num_built == 4 + 3


class Dying(Trained):
    """Ends in its third turn."""

    num_turns = 0

    def turn(self):
        self.num_turns += 1
        if self.num_turns == 3:
            raise UserError("its process died")
        return super().turn()


class Mortal(Bench):
    """Builds it once."""

    has_built = False

    def build(self, state, change):
        kind, self.has_built = Trained if self.has_built else Dying, True
        return kind(state, torch.float32)


def test_what_died_in_a_race_is_replaced():
    _, tried = searched(changed("first", repeats=5), changed("second", repeats=5), bench=Mortal())
    assert tried["first"].why == "not available: its process died" and tried["second"].is_kept


def test_the_statistics_of_a_batch_norm_are_compared_too():
    def trace_steps(momentum):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum))
        model.register_buffer("constant", torch.ones(2))
        inputs, optimizer = torch.randn(8, 3), torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number):
            optimizer.zero_grad()
            loss = model(inputs).pow(3).mean()
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return take_trace(model, step, 2, torch.float32)

    plain, other = trace_steps(0.1), trace_steps(0.2)
    assert plain.buffers.keys() == {"1.running_mean", "1.running_var"}
    assert plain.losses == other.losses and apart(other.updates, plain.updates) == 0
    assert distance(other, plain) == pytest.approx(1.0, rel=1e-3) and distance(plain, trace_steps(0.1)) == 0


def test_a_search_ends_with_its_time():
    found, tried = searched(changed("faster", repeats=5), seconds=0)
    assert found.kept_names == [] and "the time for tuning was up" in tried["faster"].why
    assert "not tried" in table(found.tried, 1) and "refused" not in table(found.tried, 1)

    def forever(state):
        while True:
            math.sqrt(2)

    found, tried = searched(Change(name="endless", apply=forever), seconds=0.3)
    assert tried["endless"].why.endswith("before it was measured") and found.seconds < 2
    assert tried["endless"].outcome == "not tried"


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
    drawn, limits = torch.random.get_rng_state(), dynamo_limits()
    tuned = optimize(model, loader, nn.CrossEntropyLoss(), torch.optim.AdamW, seconds=6)
    assert torch.equal(drawn, torch.random.get_rng_state()) and dynamo_limits() == limits
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


def dynamo_limits():
    config = torch._dynamo.config
    return config.recompile_limit, config.fail_on_recompile_limit_hit


class Noisy(TensorDataset):
    """Augments at random."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + torch.randn(()), label


def of_loader(data):
    """Compare a loader with two workers, and return its own generator and what came of it."""
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    bench = ModelBench(
        model=convolutional(), loader=loader, loss=nn.CrossEntropyLoss(), make_optimizer=torch.optim.AdamW
    )
    before = generator.get_state()
    with torch.random.fork_rng():
        search = Search(bench, (), seconds=60, report=print)
        state = ("loader_workers_2",)
        try:
            return search.compare(state, is_exact=True)
        finally:
            assert torch.equal(before, generator.get_state())


def test_a_loader_with_its_own_generator_is_compared_and_one_that_draws_at_random_is_not():
    assert of_loader(images()) == "float64 same bits"
    with pytest.raises(Refused, match="the data set draws at random: not compared"):
        of_loader(Noisy(*images().tensors))


def test_more_workers_leave_the_other_settings_of_a_loader():
    more = with_workers(DataLoader(images(), num_workers=1, timeout=30, prefetch_factor=3), 2)
    assert (more.num_workers, more.timeout, more.prefetch_factor) == (2, 30, 3)


def test_a_loader_that_is_used_up_by_reading_is_refused():
    batches = (batch for batch in [(torch.ones(2, 3), torch.ones(2, 1))])
    with pytest.raises(UserError, match="only once"):
        optimize(nn.Linear(3, 1), batches, nn.MSELoss(), torch.optim.AdamW)


def test_the_example_of_the_readme_runs_and_is_short():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "common/study/README.md").read_text(), re.S)
    assert "from common.study.tuning.tune_model import optimize" in code and len(code.splitlines()) <= 10
    names = {}
    exec(code.replace("seconds=60", "seconds=4"), names)
    assert isinstance(names["tuned"].model, nn.Module)


def wait(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


def test_the_time_is_up_also_where_python_drops_what_is_raised():
    class Slow:
        def __del__(self):
            ends = time.monotonic() + 0.3
            while time.monotonic() < ends:
                pass

    with pytest.raises(TimeUpError), time_limit(0.1):
        Slow()
        wait(5)
