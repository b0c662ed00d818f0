"""Take the steps of a configuration apart, in the real loop with the real loader, a few of each shape.

Variants that leave something out take turns with the loop as it is, so that drift and noise cancel: batches
that were just used again (no loader), the same on the device (no transfer), settings of the loader, and no
exchange between ranks.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch

from common.measure.clock import Peaks, interleave, synchronize, time_call
from common.measure.profiling.marks import Marks, taken_apart
from common.measure.profiling.verdict import WAITING, Phase, Saving, paired
from common.run.loop import TrainingRun
from common.training import distributed
from common.training.benchmark import Benchmark
from common.training.method import Batch
from common.training.probes import probes_of
from common.training.step import to_device

Turn = tuple[float, dict[str, float]]  # seconds of a step, and of its parts
AS_IT_IS, KEPT = "as it is", "kept batches"
ON_KEPT = ("no transfer", "no communication")  # variants on kept batches
TURN_S, MIN_STEPS, MAX_STEPS = 0.5, 4, 64
SETTLING = 2  # steps of a turn that are not counted
KEPT_AHEAD = 4  # batches that a loader which keeps what it reads has prepared, at most
RATE_S, MIN_BATCHES = 1.0, 3
PASS_S = 30.0  # most that a first pass over the data may take, for a loader that keeps what it reads


class Feed:
    """A loader's batches in the steps of one phase, from its first step again when they are through.

    A loader that keeps what it reads has made a pass over the data first, if that is short enough. `delay_s`
    is for each batch that is read: with several readers they come that much faster.
    """

    def __init__(self, benchmark: Benchmark, steps: range, delay_s: float = 0.0) -> None:
        self.benchmark, self.probes, self.steps = benchmark, probes_of(benchmark), steps
        self.delay_s = delay_s / self.probes.num_readers
        self.first_pass_per_s: float | None = None
        self.open()

    def open(self) -> None:
        """Start the loader anew."""
        per_epoch: int = self.benchmark.config.steps_per_epoch
        self.keeps = False
        self.position = self.steps.start
        if self.probes.loads_once and per_epoch < self.steps.stop:
            self.position = max(0, self.steps.start - per_epoch)
        self.batches = self.benchmark.train_batches(self.position)
        self.due = 0.0
        if self.probes.loads_once and per_epoch < self.steps.stop:
            self.first_pass_per_s, self.keeps = self.pulled(PASS_S, per_epoch)
            if self.position < self.steps.start:  # too long a pass: stay in the first one
                self.close()
                self.position = self.steps.start
                self.batches = self.benchmark.train_batches(self.position)

    def __next__(self) -> Batch:
        batch = next(self.batches)
        self.position += 1
        if self.delay_s and not self.keeps:
            time.sleep(max(0.0, self.due - time.perf_counter()))
            self.due = time.perf_counter() + self.delay_s
        return batch

    def ready(self, num_batches: int) -> None:
        """Let so many batches follow that belong to the phase, none of them prepared during a pause."""
        if self.position + num_batches > self.steps.stop:
            self.close()
            self.open()
        left = self.steps.stop - self.position - num_batches
        for _ in range(min(self.most_ahead, left)):
            next(self.batches)
            self.position += 1

    @property
    def most_ahead(self) -> int:
        """How many batches the loader may have prepared: a DataLoader's workers have two each."""
        return KEPT_AHEAD if self.probes.loads_once else 2 * self.probes.num_readers + 1

    def pulled(self, seconds: float, most: int) -> tuple[float, bool]:
        """Return samples/s of batches that nobody trains on, and whether all of them came in that time."""
        size: int = self.benchmark.config.global_batch_size
        next(self)  # starts what has to be started
        count, before = 0, time.perf_counter()
        while count + 1 < most and (count < MIN_BATCHES or time.perf_counter() - before < seconds):
            next(self)
            count += 1
        return count * size / (time.perf_counter() - before), count + 1 == most

    def rate(self) -> float:
        """Return the samples/s of the loader alone."""
        self.ready(MIN_BATCHES + 1)
        most = max(MIN_BATCHES + 1, (self.steps.stop - self.position) // 3)  # leaves some for the turns
        return self.pulled(RATE_S, most)[0]

    def close(self) -> None:
        """End its threads and processes."""
        self.batches.close()  # type: ignore[attr-defined]


class Bench:
    """The loop of a run, a turn of a few steps at a time."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.marks = run, Marks(run.device)
        self.most = distributed.broadcast(min(MAX_STEPS, math.ceil(TURN_S / run.step_s)))
        self.num_steps = MIN_STEPS
        run.set_rate(0)
        run.set_rate = lambda step: None  # weights stay sound at any step of any phase

    def fit(self, steps: range) -> None:
        """Let a turn take its time, but no more than a quarter of the steps."""
        self.num_steps = max(MIN_STEPS, min(self.most, len(steps) // 4 - SETTLING))

    @property
    def num_batches(self) -> int:
        """What a turn takes."""
        return SETTLING + self.num_steps

    def turn(self, batches: Callable[[], Batch], steps: Iterator[int], *, exchanged: bool = True) -> Turn:
        """Train on a turn of batches."""
        run, marks = self.run, self.marks
        with (
            taken_apart(run, marks),
            nullcontext() if exchanged else distributed.no_sync(run.replica),
        ):
            for number in range(self.num_batches):
                if number == SETTLING:
                    synchronize(run.device)
                    marks.steps = []
                    before = time.perf_counter()
                marks.start()
                batch = batches()
                marks.end("data wait")
                loss = run.train_step(batch, next(steps))
                marks.end("optimizer")
                run.clock.step(loss)
                marks.end("logging")
            synchronize(run.device)
            seconds = time.perf_counter() - before
        parts = {name: taken / self.num_steps for name, taken in marks.taken().items()}
        return seconds / self.num_steps, parts


@dataclass
class Turns:
    """Seconds of a step in each turn: of each variant, and of the parts of the loop as it is."""

    loader_per_s: float
    times: dict[str, list[float]]
    parts: list[dict[str, float]]

    def mean(self, name: str) -> float:
        """Return the mean over the turns of a variant."""
        return statistics.fmean(self.times[name])

    def savings(self) -> dict[str, Saving]:
        """Return what each variant saves of a step; some leave the loader out too, which is put back."""
        whole, kept = self.times[AS_IT_IS], self.times[KEPT]
        found = {}
        for name, times in self.times.items():
            if name in ON_KEPT:
                times = [a - b + c for a, b, c in zip(whole, kept, times, strict=True)]
            if name != AS_IT_IS:
                found[name] = paired(whole, times)
        return found


def take_turns(bench: Bench, feed: Feed, others: dict[str, Feed], num_turns: int) -> Turns:
    """Interleave turns of the loop as it is and of each variant."""
    run, numbers, used = bench.run, cycle(feed.steps), list[Batch]()

    def trial(
        open_batches: Callable[[], Callable[[], Batch]], *, exchanged: bool = True
    ) -> Callable[[], Turn]:
        return lambda: bench.turn(open_batches(), numbers, exchanged=exchanged)

    def load_and_keep() -> Batch:
        used.append(next(feed))
        return used[-1]

    def open_feed() -> Callable[[], Batch]:
        used.clear()
        feed.ready(bench.num_batches)
        return load_and_keep

    def open_other(other: Feed) -> Callable[[], Batch]:
        other.ready(bench.num_batches)
        return other.__next__

    trials = {AS_IT_IS: trial(open_feed), KEPT: trial(lambda: iter(used).__next__)}
    if run.device.type == "cuda":
        trials["no transfer"] = trial(lambda: iter([to_device(batch, run.device) for batch in used]).__next__)
    if run.place.world_size > 1:
        trials["no communication"] = trial(lambda: iter(used).__next__, exchanged=False)
    trials |= {f"no {name}": trial(partial(open_other, other)) for name, other in others.items()}
    loader_per_s = feed.rate()
    turns = interleave(trials, rounds=num_turns)
    return Turns(
        loader_per_s=loader_per_s,
        times={name: [seconds for seconds, _ in results] for name, results in turns.items()},
        parts=[parts for _, parts in turns[AS_IT_IS]],
    )


def measure_phase(
    bench: Bench,
    shape: str,
    steps: range,
    variants: dict[str, Benchmark],
    *,
    num_turns: int,
    delay_s: float,
    peaks: Peaks,
) -> Phase:
    """Take the steps of one shape apart. `variants` have another loader each."""
    run, size = bench.run, bench.run.config.global_batch_size
    bench.fit(steps)
    with ExitStack() as loaders:
        feed = loaders.enter_context(closing(Feed(run.benchmark, steps, delay_s)))
        others = {
            name: loaders.enter_context(closing(Feed(benchmark, steps, delay_s)))
            for name, benchmark in variants.items()
        }
        turns = take_turns(bench, feed, others, num_turns)
    savings, step_s = turns.savings(), turns.mean(AS_IT_IS)
    parts_s = {name: statistics.fmean(each[name] for each in turns.parts) for name in turns.parts[0]}
    unaccounted_s = step_s - sum(parts_s.values())
    if "no communication" in savings:  # else it hides in the backward pass
        parts_s["communication"] = max(0.0, savings["no communication"].share * step_s)
        parts_s["backward"] -= parts_s["communication"]
    work, per_device = feed.probes.work(shape), size / step_s / run.place.world_size
    return Phase(
        shape=shape,
        share=feed.probes.shape_shares()[shape],
        batch=size,
        step_ms=step_s * 1e3,
        deviation=statistics.stdev(turns.times[AS_IT_IS]) / step_s,
        num_turns=num_turns,
        parts_ms={name: seconds * 1e3 for name, seconds in parts_s.items()},
        unaccounted_ms=unaccounted_s * 1e3,
        loader_per_s=turns.loader_per_s,
        first_pass_per_s=feed.first_pass_per_s,
        is_first_pass=feed.probes.loads_once and not feed.keeps,
        step_per_s=size / turns.mean(KEPT),
        savings=savings,
        flops_share=per_device * work.flops / peaks.flops_per_s,
        bytes_share=per_device * work.num_bytes / peaks.bytes_per_s if work.num_bytes else None,
    )


def measure_loaders(choices: dict[str, Benchmark], steps: range, delay_s: float) -> dict[str, float]:
    """Return the samples/s of other loaders alone."""
    found = {}
    for name, benchmark in choices.items():
        with closing(Feed(benchmark, steps, delay_s)) as feed:
            found[name] = feed.rate()
    return found


def waits(phase: Phase) -> bool:
    """Return whether the loader of a phase is too slow."""
    return phase.parts_ms["data wait"] >= WAITING * phase.step_ms


def measure_evaluation(run: TrainingRun) -> tuple[float, float]:
    """Return the seconds of the first evaluation, and of one that may find what the first one kept."""
    return time_call(run.evaluate, run.device), time_call(run.evaluate, run.device)


def write_trace(bench: Bench, steps: range, path: Path) -> None:
    """Write a Chrome trace of a few steps of the loop as it is, on rank 0."""
    bench.num_steps = MIN_STEPS
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.run.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with closing(Feed(bench.run.benchmark, steps)) as feed:
        feed.ready(bench.num_batches)
        with torch.profiler.profile(activities=activities) as profiler:
            bench.turn(feed.__next__, cycle(steps))
    if bench.run.place.rank == 0:
        profiler.export_chrome_trace(str(path))
