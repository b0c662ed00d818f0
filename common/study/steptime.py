"""What a step takes: of several states side by side, turn by turn, and of which parts it consists.

Batches are synthetic and in memory, so no loader is waited for; each shape counts with its share of the
training samples. All times are seconds.
"""

import time
from collections.abc import Callable, Iterator
from typing import cast

from torch import Tensor

from common.benchmark import Benchmark
from common.config import RunConfig
from common.errors import UserError
from common.method import Batch
from common.throughput import STEPS_PER_TURN, stepper, synchronize, timed
from common.timed_run import TrainingRun
from common.training import Training, to_device

LONG_STEP_S = 0.1  # one of these is a turn of its own
PART_STEPS = 6  # of each shape, timed part by part
LOADED_STEPS = 24  # with batches from the loader
FIRST_LOADED = 4  # not counted: the loader starts


def buildable(benchmark: type[Benchmark], config: RunConfig) -> None:
    """Build model, methods and optimizer once. Raises UserError where a method refuses."""
    Training(config, benchmark(config, seed=0), seed=0).build(from_scratch=True)


def measure_turns(
    runs: dict[str, TrainingRun], num_turns: int, report: Callable[[int], None]
) -> dict[str, list[float]]:
    """Return the seconds per sample of every run in each turn; in a turn all take the same few steps."""
    steps = {name: steppers(run) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(num_turns):
        for name, shapes in steps.items():
            seconds = (timed(step, runs[name].device) * weight for step, weight in shapes)
            found[name].append(sum(seconds))
        report(turn + 1)
    return found


def steppers(run: TrainingRun) -> list[tuple[Callable[[], object], float]]:
    """Return a turn of each shape and what its seconds count: so that they add up to those of a sample."""
    found = []
    for batch, share in shapes(run):
        once = stepper(run, batch, 1)
        once()  # the optimizer's first
        num_steps = 1 if timed(once, run.device) > LONG_STEP_S else STEPS_PER_TURN
        found.append((stepper(run, batch, num_steps), share / num_steps / batch.num_samples))
    return found


def shapes(run: TrainingRun) -> Iterator[tuple[Batch, float]]:
    """Yield a batch of each shape that this run sees, and its share of the training samples."""
    batches = run.benchmark.bench_batches(run.config.global_batch_size)
    for shape, share in run.benchmark.shape_shares().items():
        if shape not in batches:
            raise UserError(f"no batch of {shape} to measure", where=run.config.configuration)
        yield batches[shape], share


def measure_parts(run: TrainingRun) -> dict[str, float]:
    """Return the share of a step that each part takes, waiting for nothing else; their sum is 1."""
    totals: dict[str, float] = {}
    for batch, share in shapes(run):
        for number in range(1 + PART_STEPS):
            for part, seconds in one_step(run, batch):
                totals[part] = totals.get(part, 0.0) + (seconds * share if number else 0.0)
    return {part: seconds / sum(totals.values()) for part, seconds in totals.items()}


def one_step(run: TrainingRun, batch: Batch) -> Iterator[tuple[str, float]]:
    """Take a step of the whole batch at once, and yield the seconds of each part, in their order."""
    step = run.plan.num_steps - 1
    run.set_rate(step)
    run.clear_gradients()
    values: dict[str, object] = {}

    def prepare() -> None:
        values["batch"] = to_device(run.prepared(batch, run.progress(step)), run.device)

    def forward() -> None:
        ready = cast(Batch, values["batch"])
        with run.autocast(run.config.precision):
            outputs = run.replica(**ready.inputs)
        values["loss"] = run.loss(outputs, ready.targets)

    def optimizer() -> None:
        run.scaler.step(run.optimizer)
        run.scaler.update()
        for method in run.methods:
            method.after_step(run.model, step + 1)

    def backward() -> None:
        run.scaler.scale(cast(Tensor, values["loss"])).backward()  # type: ignore[no-untyped-call]

    parts: list[tuple[str, Callable[[], object]]] = [
        ("host-to-device copy", prepare),
        ("forward pass", forward),
        ("backward pass", backward),
        ("optimizer", optimizer),
    ]
    for name, part in parts:
        yield name, timed(part, run.device)


def measure_waiting(run: TrainingRun) -> float:
    """Return the share of the time in which steps on prepared data wait for the loader."""
    batches = run.benchmark.train_batches()
    waited = worked = 0.0
    for number in range(LOADED_STEPS):
        before = time.perf_counter()
        batch = next(batches)
        between = time.perf_counter()
        run.train_step(batch, run.plan.num_steps - 1)
        synchronize(run.device)
        if number >= FIRST_LOADED:
            waited, worked = waited + between - before, worked + time.perf_counter() - between
    return waited / (waited + worked)
