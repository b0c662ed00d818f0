"""What a step takes: of several states side by side, turn by turn, and of which parts it consists.

Batches are synthetic and in memory, so no loader is waited for; each shape counts with its share of the
training samples. All times are seconds.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import cast

from torch import Tensor

from common.config.schema import RunConfig
from common.errors import UserError
from common.measure.profiling.profile import Feed
from common.measure.throughput import STEPS_PER_TURN, last_steps, stepper, synchronize, timed, turn_length
from common.run.loop import TrainingRun
from common.training.benchmark import Benchmark
from common.training.method import Batch, Method
from common.training.step import WARM_UP_CALLS, Training, to_device

LONG_STEP_S = 0.1  # one of these is a turn of its own, unless a method acts every few
PART_STEPS = 6  # of each shape, timed part by part, at least
LOADED_STEPS = 24  # with batches from the loader
FIRST_LOADED = 4  # not counted: the loader starts


def buildable(benchmark: type[Benchmark], config: RunConfig) -> None:
    """Build model, methods and optimizer once. Raises UserError where a method refuses."""
    Training(config, benchmark(config, seed=0), seed=0).build(from_scratch=True)


def measure_turns(
    runs: dict[str, TrainingRun], num_turns: int, report: Callable[[int], None]
) -> dict[str, list[float]]:
    """Return the seconds per sample of every run in each turn; each turn begins with another run."""
    steps = {name: steppers(run) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(num_turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds = (timed(step, runs[name].device) * weight for step, weight in steps[name])
            found[name].append(sum(seconds))
        report(turn + 1)
    return found


def steppers(run: TrainingRun) -> list[tuple[Callable[[], object], float]]:
    """Return a turn of each shape and what its seconds count: so that they add up to those of a sample."""
    found = []
    for batch, share in shapes(run):
        once = stepper(run, batch, 1)
        for _ in range(WARM_UP_CALLS):
            once()
        num_steps = steps_of_turn(run.methods, timed(once, run.device))
        turn = stepper(run, batch, num_steps)
        turn()  # what methods begin with
        found.append((turn, share / num_steps / batch.num_samples))
    return found


def steps_of_turn(methods: Iterable[Method], step_s: float) -> int:
    """Return how many steps that long are a turn."""
    return turn_length(methods, 1 if step_s > LONG_STEP_S else STEPS_PER_TURN)


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
        count = turn_length(run.methods, PART_STEPS)
        for number, step in enumerate(itertools.islice(last_steps(run), 1 + count)):
            for part, seconds in one_step(run, batch, step):
                totals[part] = totals.get(part, 0.0) + (seconds * share if number else 0.0)
    return {part: seconds / sum(totals.values()) for part, seconds in totals.items()}


def one_step(run: TrainingRun, batch: Batch, step: int) -> Iterator[tuple[str, float]]:
    """Take a step of the whole batch at once, and yield the seconds of each part, in their order."""
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


def measure_waiting(run: TrainingRun) -> float | None:
    """Return the share of the time in which steps on prepared data wait for the loader.

    A loader that keeps what it reads has made its first pass; None where that takes too long.
    """
    num_steps = run.plan.num_steps
    steps = range(max(0, num_steps - LOADED_STEPS), num_steps)
    waited = worked = 0.0
    with closing(Feed(run.benchmark, steps)) as feed:
        if run.benchmark.loads_once and not feed.keeps and run.config.steps_per_epoch < num_steps:
            return None
        for number, step in enumerate(steps):
            before = time.perf_counter()
            batch = next(feed)
            between = time.perf_counter()
            run.train_step(batch, step)
            synchronize(run.device)
            if number >= min(FIRST_LOADED, len(steps) // 2):
                waited, worked = waited + between - before, worked + time.perf_counter() - between
    return waited / (waited + worked)
