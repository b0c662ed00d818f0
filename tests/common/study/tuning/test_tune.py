"""The search for speed-ups on a tiny model with deliberate changes."""

import math
import random
import time
import weakref

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.study.tuning import subjects
from common.study.tuning.subjects import SubjectProcess
from common.study.tuning.traces import Trace, distance, distance_of_tensors, take_trace
from common.study.tuning.tune import Change, Search, TimeUpError, median_gain, time_limit, write_table

SIZE = 8
JITTER = random.Random(0)  # of turns, as of a machine that does other things too


class Trained:
    """A model whose state says how long a turn takes, and how wrong it is."""

    def __init__(self, state, dtype=torch.float32, ends_in_turn=None):
        settings = {"repeats": 20.0, "scale": 1.0}
        settings |= {key: float(value) for key, value in (text.split("=") for text in state)}
        self.repeats, self.scale, self.turns_left = settings["repeats"], settings["scale"], ends_in_turn
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1)).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inputs = torch.randn(64, SIZE, dtype=torch.float64).to(dtype)

    def step(self, number=0):
        self.optimizer.zero_grad()
        loss = self.model(self.inputs).square().mean() * self.scale
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def turn(self):
        if self.turns_left is not None:
            self.turns_left -= 1
            if self.turns_left == 0:
                raise UserError("its process died")
        return self.repeats * JITTER.uniform(0.9, 1.1)

    def close(self):
        self.repeats = None


class Bench:
    """Builds `Trained` models from states; `first` are other arguments for the first model."""

    def __init__(self, raises=None, **first):
        self.raises, self.first, self.num_built = raises or {}, first, 0

    def build(self, state, *, has_loader):
        self.num_built += 1
        if self.num_built == 1 and self.first:
            return Trained(state + self.first.get("more", ()), ends_in_turn=self.first.get("ends_in_turn"))
        return Trained(state)

    def trace(self, state, *, is_exact):
        if state and state[-1] in self.raises:
            raise self.raises[state[-1]]
        dtype = torch.float64 if is_exact else torch.float32
        trained = Trained(state, dtype)
        return take_trace(trained.model, trained.step, 3, dtype)


def changed(name, *, values=(), **options):
    return Change(name=name, adds=tuple(f"{key}={value}" for key, value in dict(values).items()), **options)


FASTER = changed("faster", values={"repeats": 5})


def search(*changes, seconds=60, bench=None):
    """Search; returns also the outcome of each change by its name."""
    reported = []
    done = Search(bench or Bench(), seconds=seconds, report=reported.append).run(changes)
    assert reported == done.tried
    return done, {tried.change.name: tried for tried in done.tried}


def test_the_faster_is_kept_the_slower_the_wrong_and_the_broken_are_refused_with_their_reason():
    raises = {
        "a=1": UserError("no convolution in this model"),
        "b=1": RuntimeError("a kernel\nand its trace"),
    }
    done, tried = search(
        FASTER,
        changed("slower", values={"repeats": 40}),
        changed("wrong", values={"repeats": 1, "scale": 1.001}),
        changed("absent", missing="not available: no C++ compiler"),
        changed("unfit", values={"a": 1}),
        changed("broken", values={"b": 1}),
        bench=Bench(raises),
    )
    assert done.state == FASTER.adds
    outcomes = {name: (result.outcome, result.why.partition(",")[0]) for name, result in tried.items()}
    assert outcomes == {
        "faster": ("kept", "faster"),
        "slower": ("refused", "slower"),  # than what was kept
        "wrong": ("refused", "differs: by 1.0e-03"),
        "absent": ("not tried", "not available: no C++ compiler"),
        "unfit": ("not tried", "not available: no convolution in this model"),
        "broken": ("refused", "not available: RuntimeError: a kernel"),
    }
    assert tried["faster"].gain.low > 1.3 and tried["slower"].gain.high < 1
    assert tried["faster"].difference == "float32 same bits; float64 same bits"
    assert all(name in write_table(done) for name in (*tried, "tuning took"))


def test_what_changes_training_is_kept_for_its_time_or_by_its_card_and_not_beside_an_alternative():
    done, tried = search(
        changed("smaller", is_exact=False, evidence="costs quality", values={"repeats": 2, "scale": 2.0}),
        changed("better", is_exact=False, evidence="higher quality", values={"repeats": 10}),
        changed("other", is_exact=False, evidence="as good", conflicts_with=("better",)),
        changed("exact", values={"repeats": 1}),
    )
    assert tried["smaller"].why == "faster" and tried["better"].why == "by its card: higher quality"
    assert tried["exact"].outcome == "kept"  # compared with the training as it is now
    assert tried["other"].why == "an alternative to better, which is kept"
    assert "CHANGES TRAINING" in write_table(done)


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
    rounded = changed("rounded", values={"repeats": 8, "scale": 1 + 1e-6})
    _, tried = search(rounded, changed("wrong", values={"repeats": 1, "scale": 1.2}), bench=bench)
    assert tried["rounded"].outcome == "kept" and "same bits" not in tried["rounded"].difference
    assert ("not compared exactly" in tried["rounded"].difference) == isinstance(bench, NotExactly)
    assert tried["wrong"].why.startswith("differs: by ") and "1.0e-02 allowed" in tried["wrong"].why


def test_a_gain_has_to_show_again_between_new_processes():
    bench = Bench(more=("repeats=60",))  # the first process is slower than all that follow
    _, tried = search(changed("nothing"), FASTER, bench=bench)
    assert tried["nothing"].gain.median < 1.5  # not the 3 of the first two processes
    assert tried["faster"].outcome == "kept" and bench.num_built == 4 + 3


def test_what_died_in_a_race_is_replaced():
    _, tried = search(FASTER, changed("second", values={"repeats": 5}), bench=Bench(ends_in_turn=3))
    assert tried["faster"].why == "not available: its process died" and tried["second"].outcome == "kept"


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
    assert plain.losses == other.losses and distance_of_tensors(other.updates, plain.updates) == 0
    assert distance(other, plain) == pytest.approx(1.0, rel=1e-3) and distance(plain, trace_steps(0.1)) == 0


def test_joined_and_renamed_parameters_are_compared_by_their_values():
    q, k, other = torch.randn(3, 4), torch.randn(3, 4), torch.randn(5)
    plain = {"query": q, "key": k, "other": other}
    joined = {"qk": torch.cat([q, k]), "other": other}
    assert distance_of_tensors(joined, plain) == 0
    assert distance_of_tensors({"qk": torch.cat([q, k + 0.01]), "other": other}, plain) > 1e-3
    assert distance_of_tensors({"qk": q, "other": other}, plain) == math.inf
    trace, lost = (
        Trace(losses=[loss, 1.0], gradients=plain, updates=plain, dtype=torch.float32)
        for loss in (1.0, math.nan)
    )
    assert distance(trace, trace) == 0 and math.isnan(distance(lost, trace))


def wait(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


def test_a_search_ends_with_its_time_also_within_a_change():
    done, tried = search(FASTER, seconds=0)
    assert done.state == () and tried["faster"].outcome == "not tried"
    bench = Bench()
    bench.build = lambda state, has_loader: wait(10)
    done, tried = search(FASTER, seconds=0.3, bench=bench)
    assert tried["faster"].why.endswith("before it was measured") and done.took_s < 5
    assert tried["faster"].outcome == "not tried" and "not tried" in write_table(done)


def test_a_limit_lets_an_import_end_so_that_no_half_module_stays(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    wait_there = "import time\nend = time.monotonic() + 0.3\nwhile time.monotonic() < end:\n    pass\n"
    (tmp_path / "slow_module.py").write_text(f"{wait_there}is_whole = True\n")
    with pytest.raises(TimeUpError), time_limit(0.1):
        import slow_module

        time.sleep(5)
    assert slow_module.is_whole


def test_the_time_is_up_also_where_python_drops_what_is_raised():
    class Slow:
        def __del__(self):
            ends = time.monotonic() + 0.3
            while time.monotonic() < ends:
                pass

    class Kept:
        pass

    def _remove(_):  # the name of the callback in weakref.WeakSet
        ends = time.monotonic() + 0.3
        while time.monotonic() < ends:
            pass

    for drop in (Slow, lambda: weakref.ref(Kept(), _remove)):
        with pytest.raises(TimeUpError), time_limit(0.1):
            drop()
            wait(5)


def test_the_interval_of_a_median_is_two_of_the_sorted_ratios():
    gain = median_gain([1.0 + number / 100 for number in range(12)])
    assert gain == pytest.approx((1.055, 1.01, 1.10))  # the second and the eleventh: 99.4 %
    assert median_gain([1.1] * 7 + [0.9])[1:] == (0.9, 1.1)  # all eight must be faster
    assert median_gain([1.2] * 7).low == 0


class Steady:
    def turn(self):
        return 0.5


class Fails:
    def turn(self):
        raise UserError("too large")


def test_turns_are_taken_in_a_process_apart_and_a_failure_is_told(capfd, monkeypatch):
    monkeypatch.setattr(subjects, "GRACE_S", 60)  # a busy machine takes long to end a process
    apart, fails = SubjectProcess(Steady), SubjectProcess(Fails)
    assert apart.turn() == 0.5
    with pytest.raises(UserError, match="too large"):
        fails.turn()
    apart.pipe.send("turn")
    assert apart.pipe.poll(60)  # its answer is never read, which resets the connection
    for subject in (apart, fails):
        subject.close()
        assert subject.process.exitcode == 0
    assert capfd.readouterr().err == ""
