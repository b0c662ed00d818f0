"""Times of a training step for `ttt ablate`: of several states side by side, and of its parts.

Batches are synthetic and in memory, so that no step waits for a loader. Steps are those at several points of
the training, see points.py. All times are seconds.
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle, repeat

from common.config.schema import RunConfig
from common.measure.clock import interleave, time_call
from common.measure.profiling.feed import Feed
from common.measure.profiling.marks import time_parts
from common.measure.throughput import bench_batches, loaded_points, steppers, time_sample, turn_length
from common.repository import benchmark_module
from common.run.loop import TrainingRun
from common.training.method import Batch
from common.training.step import Training

PART_OF = {  # the part that ablate names, by the part that marks name
    "batch methods": "host-to-device copy",
    "host to device": "host-to-device copy",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer",
}
PART_STEPS = 6  # at each point, timed part by part, at least
LOADED_STEPS = 24  # with batches from the loader
FIRST_LOADED = 4  # not counted: the loader starts


def buildable(config: RunConfig) -> None:
    """Build model, methods and optimizer once. Raises UserError where a method refuses."""
    benchmark = benchmark_module(config.benchmark).Benchmark(config, seed=0)
    Training(config, benchmark, seed=0).build(from_scratch=True)


def measure_turns(
    runs: dict[str, TrainingRun], num_turns: int, report: Callable[[int], None]
) -> dict[str, list[float]]:
    """Return the seconds per sample of every run in each turn; each turn begins with another run."""
    trials = {name: partial(time_sample, steppers(run), run.device) for name, run in runs.items()}
    return interleave(trials, rounds=num_turns, rotates=True, report=report)


def measure_parts(run: TrainingRun) -> dict[str, float]:
    """Return the share of a step that each part takes on batches in memory; their sum is 1."""
    totals = dict.fromkeys(PART_OF.values(), 0.0)
    num_steps = turn_length(run.methods, PART_STEPS)
    for point, batch in loaded_points(run, bench_batches(run)):  # the first actions of methods settle
        next_batch = repeat(batch).__next__
        _, parts = time_parts(run, next_batch, cycle(point.window), settling=1, num_steps=num_steps)
        for part, name in PART_OF.items():
            totals[name] += parts[part] * point.share
    return {part: seconds / sum(totals.values()) for part, seconds in totals.items()}


def measure_waiting(run: TrainingRun) -> float | None:
    """Return the share of the time in which steps on prepared data wait for the loader.

    A loader that keeps what it reads has made its first pass; None where that takes too long.
    """
    num_steps = run.plan.num_steps
    steps = range(max(0, num_steps - LOADED_STEPS), num_steps)
    with closing(Feed(run.benchmark, steps)) as feed:
        if feed.probes.loads_once and not feed.keeps and run.config.steps_per_epoch < num_steps:
            return None
        numbers, ready = iter(steps), list[Batch]()
        calls: dict[str, Callable[[], object]] = {
            "load": lambda: ready.append(next(feed)),
            "train": lambda: run.train_step(ready.pop(), next(numbers)),
        }
        trials = {name: partial(time_call, call, run.device) for name, call in calls.items()}
        times = interleave(trials, rounds=len(steps))
    waited, worked = (sum(seconds[min(FIRST_LOADED, len(steps) // 2) :]) for seconds in times.values())
    return waited / (waited + worked)
