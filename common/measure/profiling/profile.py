"""Take the steps of a configuration apart, in the real loop with the real loader, a few of each shape.

Variants that leave something out take turns with the loop as it is, so that drift and noise cancel: batches
that were just used again (no loader), the same on the device (no transfer), settings of the loader, and no
exchange between ranks.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common import repository
from common.config.schema import Loaded
from common.data.preparation import check_data
from common.errors import UserError
from common.machine import system
from common.measure.clock import Peaks, interleave, measure_peaks, synchronize, time_call
from common.measure.device_run import open_run
from common.measure.profiling.feed import Feed
from common.measure.profiling.marks import Marks, mark_parts
from common.measure.profiling.verdict import (
    WAITING,
    Phase,
    Profile,
    Saving,
    compute_saving,
    describe_bottleneck,
    format_phase,
)
from common.run.loop import TrainingRun
from common.training import distributed
from common.training.benchmark import Benchmark
from common.training.method import Batch
from common.training.probes import probes_of
from common.training.ranks import RankInfo
from common.training.step import to_device

Load = Callable[[Sequence[str]], Loaded]  # returns the configuration with more settings

Turn = tuple[float, dict[str, float]]  # seconds of a step, and of its parts
AS_IT_IS, KEPT = "as it is", "kept batches"
ON_KEPT = ("no transfer", "no communication")  # variants on kept batches
TURN_S, MIN_STEPS, MAX_STEPS = 0.5, 4, 64
SETTLING = 2  # steps of a turn that are not counted
FASTER = 1.2  # than the step has to be a loader that is tried in place of one that is too slow


class Loop:
    """The loop of a run, a turn of a few steps at a time."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.marks = run, Marks(run.device)
        self.most = distributed.broadcast(min(MAX_STEPS, math.ceil(TURN_S / run.step_s)))
        self.num_steps = MIN_STEPS
        run.set_rate(0)
        run.set_rate = lambda step: None  # weights stay sound at any step of any phase

    def fit(self, steps: range) -> None:
        """Make a turn about `TURN_S` long, but no longer than a quarter of the steps."""
        self.num_steps = max(MIN_STEPS, min(self.most, len(steps) // 4 - SETTLING))

    @property
    def num_batches(self) -> int:
        return SETTLING + self.num_steps

    def turn(self, batches: Callable[[], Batch], steps: Iterator[int], *, exchanged: bool = True) -> Turn:
        """Train on a turn of batches."""
        run, marks = self.run, self.marks
        with (
            mark_parts(run, marks),
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
        parts = {name: part_s / self.num_steps for name, part_s in marks.pop_seconds().items()}
        return seconds / self.num_steps, parts


@dataclass
class Turns:
    """Seconds of a step in each turn: of each variant, and of the parts of the loop as it is."""

    loader_per_s: float
    times: dict[str, list[float]]
    parts: list[dict[str, float]]

    def mean(self, name: str) -> float:
        return statistics.fmean(self.times[name])

    def savings(self) -> dict[str, Saving]:
        """Return the saving of each variant; those on kept batches get the time of the loader back."""
        whole, kept = self.times[AS_IT_IS], self.times[KEPT]
        savings = {}
        for name, times in self.times.items():
            if name in ON_KEPT:
                times = [a - b + c for a, b, c in zip(whole, kept, times, strict=True)]
            if name != AS_IT_IS:
                savings[name] = compute_saving(whole, times)
        return savings


def take_turns(loop: Loop, feed: Feed, others: dict[str, Feed], num_turns: int) -> Turns:
    """Interleave turns of the loop as it is and of each variant."""
    run, numbers, used = loop.run, cycle(feed.steps), list[Batch]()

    def trial(
        open_batches: Callable[[], Callable[[], Batch]], *, exchanged: bool = True
    ) -> Callable[[], Turn]:
        return lambda: loop.turn(open_batches(), numbers, exchanged=exchanged)

    def load_and_keep() -> Batch:
        used.append(next(feed))
        return used[-1]

    def open_feed() -> Callable[[], Batch]:
        used.clear()
        feed.skip_prefetched(loop.num_batches)
        return load_and_keep

    def open_other(other: Feed) -> Callable[[], Batch]:
        other.skip_prefetched(loop.num_batches)
        return other.__next__

    trials = {AS_IT_IS: trial(open_feed), KEPT: trial(lambda: iter(used).__next__)}
    if run.device.type == "cuda":
        trials["no transfer"] = trial(lambda: iter([to_device(batch, run.device) for batch in used]).__next__)
    if run.rank_info.world_size > 1:
        trials["no communication"] = trial(lambda: iter(used).__next__, exchanged=False)
    trials |= {f"no {name}": trial(partial(open_other, other)) for name, other in others.items()}
    loader_per_s = feed.measure_rate()
    turns = interleave(trials, rounds=num_turns)
    return Turns(
        loader_per_s=loader_per_s,
        times={name: [seconds for seconds, _ in results] for name, results in turns.items()},
        parts=[parts for _, parts in turns[AS_IT_IS]],
    )


def measure_phase(
    loop: Loop,
    shape: str,
    steps: range,
    variants: dict[str, Benchmark],
    *,
    num_turns: int,
    delay_s: float,
    peaks: Peaks,
) -> Phase:
    """Take the steps of one shape apart. `variants` have another loader each."""
    run, size = loop.run, loop.run.config.global_batch_size
    loop.fit(steps)
    with ExitStack() as loaders:
        feed = loaders.enter_context(closing(Feed(run.benchmark, steps, delay_s)))
        others = {
            name: loaders.enter_context(closing(Feed(benchmark, steps, delay_s)))
            for name, benchmark in variants.items()
        }
        turns = take_turns(loop, feed, others, num_turns)
    savings, step_s = turns.savings(), turns.mean(AS_IT_IS)
    parts_s = {name: statistics.fmean(parts[name] for parts in turns.parts) for name in turns.parts[0]}
    unaccounted_s = step_s - sum(parts_s.values())
    if "no communication" in savings:  # else it hides in the backward pass
        parts_s["communication"] = max(0.0, savings["no communication"].share * step_s)
        parts_s["backward"] -= parts_s["communication"]
    work, per_device = feed.probes.work(shape), size / step_s / run.rank_info.world_size
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


def measure_cures(
    phase: Phase, steps: range, load: Load, run: TrainingRun, delay_s: float
) -> dict[str, float]:
    """Return the samples/s of other settings of a loader that is too slow in a phase, each alone."""
    cures = {}
    choices = probes_of(run.benchmark).other_loaders(FASTER * phase.step_per_s / phase.loader_per_s)
    for name, settings in choices.items():
        try:
            benchmark = change_benchmark(run, load, settings)
            benchmark.prepare_loader()
        except UserError:  # this machine lacks what these settings need
            continue
        if benchmark.config != run.config:
            with closing(Feed(benchmark, steps, delay_s)) as feed:
                cures[name] = feed.measure_rate()
    return cures


def change_benchmark(run: TrainingRun, load: Load, settings: Sequence[str]) -> Benchmark:
    return type(run.benchmark)(load(settings).config, seed=0, rank_info=run.rank_info)


def write_trace(loop: Loop, steps: range, path: Path) -> None:
    """Write a Chrome trace of a few steps of the loop as it is, on rank 0."""
    loop.num_steps = MIN_STEPS
    activities = [torch.profiler.ProfilerActivity.CPU]
    if loop.run.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with closing(Feed(loop.run.benchmark, steps)) as feed:
        feed.skip_prefetched(loop.num_batches)
        with torch.profiler.profile(activities=activities) as profiler:
            loop.turn(feed.__next__, cycle(steps))
    if loop.run.rank_info.rank == 0:
        profiler.export_chrome_trace(str(path))


def profile(
    load: Load, rank_info: RankInfo, *, num_turns: int, delay_ms: float, trace: Path | None, console: Console
) -> dict[str, Any]:
    """Profile a configuration with all ranks that were started; returns its figures, and prints them.

    `load` returns it with more settings, and with the batch of these ranks.
    """
    loaded = load(())
    if rank_info.rank == 0:
        check_data(loaded)
    with distributed.process_group(rank_info), open_run(loaded.config, rank_info) as run:
        run.clock.console, run.clock.live = Console(quiet=True), None
        return profile_run(run, load, num_turns=num_turns, delay_ms=delay_ms, trace=trace, console=console)


def profile_run(
    run: TrainingRun, load: Load, *, num_turns: int, delay_ms: float, trace: Path | None, console: Console
) -> dict[str, Any]:
    """Measure every phase, then the evaluation, then other settings of a loader that is too slow."""
    config, samples_name = run.config, run.benchmark.names.samples
    delay_s = delay_ms / 1e3
    console.print(
        f"{config.benchmark} {config.configuration} {config.size} on {system.hardware_name()}: "
        f"{config.global_batch_size} {samples_name} a step, {run.rank_info.world_size} rank(s)"
    )
    run.benchmark.prepare_loader()
    probes, loop, peaks = probes_of(run.benchmark), Loop(run), measure_peaks(run.device)
    variants = {
        name: change_benchmark(run, load, settings) for name, settings in probes.without_loading().items()
    }
    steps_of: dict[str, range] = {}  # in which each shape is trained on first
    phases: list[Phase] = []
    for shape, steps in probes.phases():
        if shape not in steps_of:
            steps_of[shape] = steps
            phases.append(
                measure_phase(loop, shape, steps, variants, num_turns=num_turns, delay_s=delay_s, peaks=peaks)
            )
            console.print(*format_phase(phases[-1], samples_name), sep="\n")
    first_s, later_s = (time_call(run.evaluate, run.device) for _ in range(2))  # later ones may keep data
    cures: dict[str, float] = {}
    if any(phase.waiting_share >= WAITING for phase in phases):
        worst = max(phases, key=lambda phase: phase.waiting_share)
        cures = measure_cures(worst, steps_of[worst.shape], load, run, delay_s)
    result = Profile(
        samples_name=samples_name,
        phases=tuple(phases),
        cures=cures,
        is_compressed=config.gradient_compression != "none",
    )
    num_evaluations = len(run.plan.evaluation_steps)
    evaluations_s = first_s + (num_evaluations - 1) * later_s
    training_s = result.training_s(run.plan.num_steps * config.global_batch_size)
    console.print(
        f"evaluation: {first_s:.2f} s the first time, {later_s:.2f} s later; {num_evaluations} of them "
        f"are {evaluations_s / (evaluations_s + training_s):.1%} of a run over the whole budget "
        f"({training_s:.0f} s of training)",
        describe_bottleneck(result),
        sep="\n",
    )
    if trace:
        longest = max(phases, key=lambda phase: phase.per_sample_ms)
        write_trace(loop, steps_of[longest.shape], trace)
        console.print(f"trace of {longest.shape} -> {trace} (chrome://tracing, ui.perfetto.dev)")
    return {
        "benchmark": config.benchmark,
        "configuration": config.configuration,
        "size": config.size,
        "config": json.loads(config.model_dump_json()),
        "delay_data_ms": delay_ms,
        "batch_size": config.global_batch_size,
        "num_ranks": run.rank_info.world_size,
        "versions": system.versions(),
        "commit": repository.commit(),
        "peaks": asdict(peaks),
        "phases": [asdict(phase) for phase in phases],
        "shares": result.shares(),
        "evaluation_s": (first_s, later_s),
        "loaders": cures,
        "verdict": describe_bottleneck(result),
    }
