"""The time of a training, estimated from steps at a few points, against the time of all of its steps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.measure import clock, steptime, throughput
from common.measure.clock import Peaks
from common.measure.points import MIN_POINTS, WINDOW_STEPS, points_of
from common.methods.layer_freezing import FROZEN_HERE
from common.training.method import Progress
from common.training.probes import probes_of
from common.training.registry import build_methods
from tests.runs import make_benchmark

PEAKS = Peaks(dtype="float32", flops_per_s=1.0, bytes_per_s=1.0)
NUM_LAYERS = 40


class FakeRun:
    """A run whose steps take the seconds that their work would: what its methods make of model and batch."""

    def __init__(self, monkeypatch, benchmark, method, configuration="baseline"):
        self.benchmark = make_benchmark(benchmark, configuration, f"methods.{method}")
        self.config = self.benchmark.config
        self.methods, self.plan = build_methods(self.config), self.config.plan()
        self.device, self.now = torch.device("cpu"), 0.0
        self.model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(NUM_LAYERS)))
        for used in self.methods:
            if used.name in ("layer_freezing", "selective_backprop"):
                used.model(self.model)
            if used.name == "selective_backprop":  # its own rule of when; the losses are of no importance
                used.batch = lambda batch, progress, used=used: self.select(used, batch, progress)
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)

    def select(self, method, batch, progress):
        self.looks = method.is_selecting(progress)
        kept = int(batch.num_samples * method.settings.keep) if self.looks else batch.num_samples
        return SimpleNamespace(inputs=batch.inputs, num_samples=kept)

    def train_step(self, batch, step):
        """A forward pass of a sample of full shape takes 1 s, both gradients of all layers 1 s each."""
        self.looks, plan = False, self.plan
        progress = Progress(step=step, num_steps=plan.num_steps, epoch=plan.epoch(step), num_epochs=1)
        whole, num_whole = batch.inputs, batch.num_samples
        for method in self.methods:
            batch = method.batch(batch, progress)
        work = batch.num_samples
        if "input_ids" in whole:  # attention is a third of the work of a whole sequence
            length, longest = (x["input_ids"].shape[1] for x in (batch.inputs, whole))
            work *= (2 * length / longest + (length / longest) ** 2) / 3
        layers = [any(getattr(x, FROZEN_HERE, False) for x in layer.parameters()) for layer in self.model]
        self.now += num_whole * self.looks + work * (1 + 2 * (1 - sum(layers) / NUM_LAYERS))

    def seconds(self, steps):
        batches, before = throughput.bench_batches(self), self.now
        for step in steps:
            self.train_step(batches[probes_of(self.benchmark).loaded_shape(step)], step)
        return (self.now - before) / len(steps) / self.config.global_batch_size


@pytest.mark.parametrize(
    ("benchmark", "method", "misses"),
    [
        ("image_classification", "selective_backprop={}", 0.03),
        ("image_classification", "selective_backprop={start: 0.2, end: 0.85, whole_every: 0}", 0.1),
        ("image_classification", "layer_freezing={}", 0.4),
        ("image_classification", "layer_freezing={start: 0.1, level: 0.7}", 0.2),
        ("language_bert", "seq_length_warmup={}", 0.2),
        ("language_bert", "seq_length_warmup={duration: 1}", 0.8),
        ("language_bert", "seq_length_warmup={how: segment}", 0.0),
    ],
)
def test_points_give_the_time_of_a_whole_run_to_5_percent(monkeypatch, benchmark, method, misses):
    run = FakeRun(monkeypatch, benchmark, method)
    num_steps = run.plan.num_steps
    whole = run.seconds(range(num_steps))
    assert abs(run.seconds(range(num_steps - 20, num_steps)) / whole - 1) >= misses  # the last steps do not
    for timed in steptime.measure_turns({"it": run}, 3, lambda turn: None)["it"]:  # ttt ablate
        assert timed == pytest.approx(whole, rel=0.05)
    rates = list(throughput.measure({"it": run}, PEAKS, {"it": {}}, seconds=0))  # ttt bench
    (rate,) = (rate for rate in rates if rate.shape in probes_of(run.benchmark).shape_shares())
    assert 1 / rate.samples_per_s == pytest.approx(whole, rel=0.05)


def test_long_steps_are_few_and_a_long_start_is_reported(monkeypatch):
    """At a point a slow step warms up twice, is timed once, and then is a turn by itself."""
    run, lines, steps = FakeRun(monkeypatch, "language_bert", "seq_length_warmup={how: segment}"), [], []
    monkeypatch.setattr(throughput, "LONG_WARM_UP_S", -1.0)
    monkeypatch.setattr(throughput, "time_call", lambda step, device: step() or 1.0)
    monkeypatch.setattr(run, "train_step", lambda batch, number: steps.append(number))
    list(throughput.measure({"it": run}, PEAKS, {"it": {}}, seconds=0, report=lines.append))
    assert len(steps) == len(points_of(run)) * (3 + 2)  # two rounds
    assert len(lines) == 1 and "warmed up" in lines[0]


def planned_run(benchmark, *settings):
    made = make_benchmark(benchmark, *settings)
    return SimpleNamespace(benchmark=made, methods=build_methods(made.config), plan=made.config.plan())


@pytest.mark.parametrize(
    ("benchmark", "configuration", "settings", "starts"),
    [
        ("image_classification", "baseline", [], [0, 88, 176, 264]),
        ("image_classification", "optimized", [], [0, 44, 77, 110]),  # 56 px up to step 44
        ("image_classification", "optimized", ["budget=0.5"], [0, 22, 38, 55]),
        ("image_classification", "optimized", ["budget=2"], [0, 88, 154, 220]),
        ("image_classification", "baseline", ["methods.selective_backprop={}"], [0, 88, 176, 317]),
        ("language_bert", "baseline", ["methods.seq_length_warmup={}"], [0, 135, 270, 405, 540]),
    ],
)
def test_parts_end_where_shapes_and_methods_change(benchmark, configuration, settings, starts):
    run = planned_run(benchmark, configuration, *settings)
    points, num_steps = points_of(run), run.plan.num_steps
    ends = [*starts[1:], num_steps]
    assert len(points) >= MIN_POINTS
    for point, first, last in zip(points, starts, ends, strict=True):
        assert point.share == pytest.approx((last - first) / num_steps)
        assert first <= point.window.start and point.window.stop <= last and len(point.window) <= WINDOW_STEPS
        assert point.window.start + point.window.stop == pytest.approx(first + last, abs=20)
        assert benchmark != "image_classification" or point.loaded == point.shape
    expected = probes_of(run.benchmark).shape_shares()
    shares = {shape: sum(p.share for p in points if p.shape == shape) for shape in expected}
    assert shares == pytest.approx(expected)


def test_a_shape_that_a_method_makes_is_timed_on_the_batch_of_the_loader():
    resizing = "{initial_scale: 0.5, delay_fraction: 0.4, finetune_fraction: 0.2, size_increment_px: 28"
    resizing = f"methods.progressive_resizing={resizing}, interpolation: nearest}}"
    run = planned_run("image_classification", "baseline", resizing)
    points = points_of(run)
    assert {point.shape for point in points} == {"56 px", "84 px", "112 px"}
    assert {point.loaded for point in points} == {"112 px"}
    method, batch = run.methods[-1], run.benchmark.noise(2, 112)
    for point in points:
        for step in point.window:
            epochs = {"epoch": run.plan.epoch(step), "num_epochs": run.plan.num_epochs}
            resized = method.batch(batch, Progress(step=step, num_steps=1, **epochs))
            assert f"{resized.inputs['x'].shape[-1]} px" == point.shape


def test_shares_of_one_shape_add_up_to_1_also_of_one_that_training_does_not_have():
    run = planned_run("image_classification", "optimized")
    for shape, num in (("56 px", 1), ("84 px", 3), ("112 px", 3)):
        points = points_of(run, shape)
        assert len(points) == num and sum(point.share for point in points) == pytest.approx(1)
        assert {(point.shape, point.loaded) for point in points} == {(shape, shape)}
