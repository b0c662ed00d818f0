"""The line at the start of a run that names its bottleneck, and the times that it is calculated from."""

import math
import time
from dataclasses import replace

import pytest
from rich.console import Console

from common.measure.device_run import build
from common.run.stepclock import StepClock, bottleneck
from common.training.load import load_config

SMALL = ["global_batch_size=8", "schedule.warmup=5ba", "max_duration=60ba"]
SMALL += ["evaluate_every=60ba", "evaluate_from=60ba"]


@pytest.mark.parametrize(
    ("waited_s", "computed_s", "loading_s", "line"),
    [
        (0.5, 1.0, None, "loader 100 or more, step alone 105, together 100; 5% of the time waits: the step"),
        (8.0, 1.0, None, "loader 100, step alone 500, together 100; 80% of the time waits: the loader"),
        (8.0, 4.0, None, "loader 100, step alone 250, together 100; 80% of the time waits: the loader"),
        (0.0, 12.0, None, "loader 100 or more, step alone 100, together 100; 0% of the time waits: the step"),
        (0.5, 1.0, 2.0, "loader alone 500, step alone 105, together 100; 5% of the time waits: the step"),
        (8.0, 1.0, 9.0, "loader alone 111, step alone 500, together 100; 80% of the time waits: the loader"),
    ],
)
def test_rates_alone_and_together(waited_s, computed_s, loading_s, line):
    found = bottleneck(1000, elapsed_s=10.0, waited_s=waited_s, computed_s=computed_s, loading_s=loading_s)
    assert found == f"{line} is the bottleneck"


RATES = "sequences/s: loader {}, step alone 160, together {} of the time waits: the {} is the bottleneck"


@pytest.mark.parametrize(
    ("wait_s", "line"),
    [
        (0.0, RATES.format("160 or more", "160; 0%", "step")),
        (0.15, RATES.format("alone 53", "40; 75%", "loader")),
    ],
)
def test_a_run_names_what_holds_it_up(wait_s, line, tmp_path, capsys, monkeypatch):
    """Real steps of 8 sequences, which take 0.05 s and wait for `wait_s` by a clock of the test's own."""
    run = build(load_config("language_bert", "optimized", size="mini", settings=SMALL).config, tmp_path)
    batch, train_step, now = next(run.benchmark.synthetic_batches()), run.train_step, [0.0]
    run.step_s = 0.01

    def passes(seconds, value):
        now[0] += seconds
        return value

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run, "train_step", lambda *each: passes(0.05, train_step(*each)))
    loaded = replace(batch, loading_s=wait_s)
    run.train_block((passes(wait_s, loaded) for _ in range(60)), 0, 60)
    run.log.close()
    assert f"  {line}\n" in capsys.readouterr().out
    assert "loss" not in run.progress_line(1, 1.0, math.nan)  # it has not arrived from a GPU yet


def test_the_pace_of_a_resumed_block_counts_no_gap(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = StepClock(lambda *_: "", Console())
    clock.resume(num_steps=60, steps_before_block=50, block_start=0.0)
    now[0] += 10
    clock.num_steps += 20
    assert clock.pace() == 2 and clock.steps_per_s() == 30 / 1010


def test_a_long_warm_up_says_now_and_then_how_far_it_is(tmp_path, capsys, monkeypatch):
    """The clock of this test moves 6 s with each shape, so every second shape has a line."""
    run = build(load_config("language_bert", "optimized", size="mini", settings=SMALL).config, tmp_path)
    now, add_gradients = [run.started], run.add_gradients
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shapes = list(run.shapes()) * 5
    monkeypatch.setattr(run, "shapes", lambda: iter(shapes))

    def compute(batch, step, *, exchanged):
        now[0] += 2.0  # a shape is computed three times
        return add_gradients(batch, step, exchanged=exchanged)

    monkeypatch.setattr(run, "add_gradients", compute)
    for shown in (False, True):
        run.shows_warm_up = shown
        run.warm_up()
    run.log.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "warmed up" in line]
    seen = ((30, 0), (42, 2), (54, 4))  # seconds and shapes of the second warm-up
    assert lines == [f"  {seconds} s: {number} of 5 shapes are warmed up" for seconds, number in seen]
