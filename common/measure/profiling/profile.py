"""Take the steps of a configuration apart, in the real loop with the real loader, a few of each shape.

Batches are the first of each shape; the steps taken on them are those at several points of the training with
this shape, each counted by its share (points.py).
Variants that leave something out take turns with the loop as it is, so that drift and noise cancel: batches
that were just used again (no loader), the same on the device (no transfer), settings of the loader, and no
exchange between ranks.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
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
from common.evidence.records import counted
from common.evidence.text import size_title
from common.machine import system
from common.measure.clock import interleave, measure_peaks, time_call
from common.measure.device_run import of_all_devices, open_run
from common.measure.points import Point, points_of
from common.measure.profiling.feed import Feed
from common.measure.profiling.marks import PARTS, time_parts
from common.measure.profiling.verdict import (
    WAITING,
    Phase,
    Profile,
    Saving,
    compute_saving,
    describe_bottleneck,
    format_phase,
)
from common.measure.throughput import turn_length
from common.run.loop import TrainingRun
from common.training import distributed
from common.training.benchmark import Benchmark
from common.training.method import Batch
from common.training.probes import probes_of
from common.training.ranks import RankInfo
from common.training.step import to_device

Load = Callable[[Sequence[str]], Loaded]  # returns the configuration with more settings

Steps = tuple[Iterator[int], float]  # numbers of the steps at a point, and its share
Turn = tuple[float, dict[str, float]]  # seconds of a step, and of its parts
AS_IT_IS, KEPT = "as it is", "kept batches"
ON_KEPT = ("no transfer", "no communication")  # variants on kept batches
TURN_S, MIN_STEPS, MAX_STEPS = 0.5, 2, 64  # MIN_STEPS at a point
SETTLING = 2  # steps of a turn that are not counted
FASTER = 1.2  # times the rate of the step: the aim of loader settings tried in place of too slow ones


class Profiler:
    """Takes turns of a few steps of a run, as it is and with something left out."""

    def __init__(self, run: TrainingRun, load: Load, *, num_turns: int, delay_s: float) -> None:
        self.run, self.load, self.num_turns, self.delay_s = run, load, num_turns, delay_s
        self.probes, self.peaks = probes_of(run.benchmark), measure_peaks(run.device)
        self.most_steps = distributed.broadcast(min(MAX_STEPS, math.ceil(TURN_S / run.step_s)))
        self.num_steps = MIN_STEPS  # of a turn
        self.left_out: dict[str, str] = {}
        run.set_rate(0)
        run.set_rate = lambda step: None  # the learning rate stays 0: weights stay sound in any phase
        choices = self.probes.without_loading()
        self.variants = {name: self.change_benchmark(settings) for name, settings in choices.items()}

    def change_benchmark(self, settings: Sequence[str]) -> Benchmark:
        return type(self.run.benchmark)(self.load(settings).config, seed=0, rank_info=self.run.rank_info)

    def turn(
        self, next_batch: Callable[[], Batch], steps: Sequence[Steps], *, exchanged: bool = True
    ) -> Turn:
        """Train on a turn of batches, some with the steps of each point; returns the weighted means."""
        step_s, parts_s = 0.0, dict.fromkeys(PARTS, 0.0)
        with nullcontext() if exchanged else distributed.no_sync(self.run.replica):
            for numbers, share in steps:
                seconds, parts = time_parts(
                    self.run, next_batch, numbers, settling=SETTLING, num_steps=self.num_steps
                )
                step_s += share * seconds
                parts_s = {name: parts_s[name] + share * part_s for name, part_s in parts.items()}
        return step_s, parts_s

    def list_trials(
        self, feed: Feed, others: dict[str, Feed], points: Sequence[Point]
    ) -> dict[str, Callable[[], Turn]]:
        """Return the turns of the loop as it is and of each variant, by name."""
        run, used = self.run, list[Batch]()
        steps = [(cycle(point.window), point.share) for point in points]
        num_batches = len(points) * (SETTLING + self.num_steps)

        def load_and_keep() -> Batch:
            used.append(next(feed))
            return used[-1]

        def take_as_it_is() -> Turn:
            used.clear()
            feed.skip_prefetched(num_batches)
            return self.turn(load_and_keep, steps)

        def take_kept(*, transferred: bool = True, exchanged: bool = True) -> Turn:
            batches = iter(used if transferred else [to_device(batch, run.device) for batch in used])
            return self.turn(batches.__next__, steps, exchanged=exchanged)

        def take_other(other: Feed) -> Turn:
            other.skip_prefetched(num_batches)
            return self.turn(other.__next__, steps)

        trials = {AS_IT_IS: take_as_it_is, KEPT: take_kept}
        if run.device.type == "cuda":
            trials["no transfer"] = partial(take_kept, transferred=False)
        if run.rank_info.world_size > 1:
            trials["no communication"] = partial(take_kept, exchanged=False)
        return trials | {f"no {name}": partial(take_other, other) for name, other in others.items()}

    def measure_phase(self, shape: str, steps: range) -> Phase:
        """Take the steps of one shape apart; a turn takes about `TURN_S`, at most a quarter of the steps."""
        run, size = self.run, self.run.config.global_batch_size
        points = points_of(run, shape)
        most = min(self.most_steps, len(steps) // 4) // len(points) - SETTLING
        self.num_steps = turn_length(run.methods, max(MIN_STEPS, most))
        with ExitStack() as loaders:

            def open_feed(benchmark: Benchmark) -> Feed:
                return loaders.enter_context(closing(Feed(benchmark, steps, self.delay_s)))

            feed = open_feed(run.benchmark)
            others: dict[str, Feed] = {}
            for name, benchmark in self.variants.items():
                try:
                    others[name] = open_feed(benchmark)
                except UserError as error:  # there is no memory for the images of a second loader
                    self.left_out[name] = error.what
            loader_per_s = feed.measure_rate()
            turns = interleave(self.list_trials(feed, others, points), rounds=self.num_turns)
        times = {name: [seconds for seconds, _ in results] for name, results in turns.items()}
        step_s, savings = statistics.fmean(times[AS_IT_IS]), compute_savings(times)
        parts_s = {name: statistics.fmean(parts[name] for _, parts in turns[AS_IT_IS]) for name in PARTS}
        unaccounted_s = step_s - sum(parts_s.values())
        if "no communication" in savings:  # else it hides in the backward pass
            parts_s["communication"] = max(0.0, savings["no communication"].share * step_s)
            parts_s["backward"] -= parts_s["communication"]
        work, per_device = self.probes.work(shape), size / step_s / run.rank_info.world_size
        bytes_share = per_device * work.num_bytes / self.peaks.bytes_per_s if work.num_bytes else None
        return Phase(
            shape=shape,
            share=self.probes.shape_shares()[shape],
            batch=size,
            step_ms=step_s * 1e3,
            deviation=statistics.stdev(times[AS_IT_IS]) / step_s,
            num_turns=self.num_turns,
            parts_ms={name: seconds * 1e3 for name, seconds in parts_s.items()},
            unaccounted_ms=unaccounted_s * 1e3,
            loader_per_s=loader_per_s,
            first_pass_per_s=feed.first_pass_per_s,
            is_first_pass=self.probes.loads_once and not feed.keeps,
            step_per_s=size / statistics.fmean(times[KEPT]),
            savings=savings,
            flops_share=per_device * work.flops / self.peaks.flops_per_s,
            bytes_share=bytes_share,
        )

    def measure_cures(self, phase: Phase, steps: range) -> dict[str, float]:
        """Return the samples/s of other settings of a loader that is too slow in a phase, each alone."""
        cures = {}
        choices = self.probes.other_loaders(FASTER * phase.step_per_s / phase.loader_per_s)
        for name, settings in choices.items():
            try:
                benchmark = self.change_benchmark(settings)
                benchmark.prepare_loader()
            except UserError:  # this machine lacks what these settings need
                continue
            if benchmark.config != self.run.config:
                with closing(Feed(benchmark, steps, self.delay_s)) as feed:
                    cures[name] = feed.measure_rate()
        return cures

    def write_trace(self, steps: range, path: Path) -> None:
        """Write a Chrome trace of a few steps of the loop as it is, on rank 0."""
        self.num_steps = MIN_STEPS
        with closing(Feed(self.run.benchmark, steps, self.delay_s)) as feed:
            feed.skip_prefetched(SETTLING + self.num_steps)
            with torch.profiler.profile() as profiler:
                self.turn(feed.__next__, [(cycle(steps), 1.0)])
        if self.run.rank_info.rank == 0:
            profiler.export_chrome_trace(str(path))


def compute_savings(times: dict[str, list[float]]) -> dict[str, Saving]:
    """Compare each variant with the loop as it is; those on kept batches get the loader's time added."""
    whole, kept = times[AS_IT_IS], times[KEPT]
    savings = {}
    for name, seconds in times.items():
        if name in ON_KEPT:
            seconds = [a - b + c for a, b, c in zip(whole, kept, seconds, strict=True)]
        if name != AS_IT_IS:
            savings[name] = compute_saving(whole, seconds)
    return savings


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
        config, samples_name = run.config, run.benchmark.names.samples
        console.print(
            f"{config.benchmark} {config.configuration} {size_title(config.size)} on "
            f"{system.hardware_name()}: {config.global_batch_size} {samples_name} a step, "
            f"{counted(rank_info.world_size, 'rank')}"
        )
        run.benchmark.prepare_loader()
        profiler = Profiler(run, load, num_turns=num_turns, delay_s=delay_ms / 1e3)
        figures = profile_run(profiler, trace, console)
    return {
        "benchmark": config.benchmark,
        "configuration": config.configuration,
        "size": config.size,
        "config": config.stated(mode="json"),
        "delay_data_ms": delay_ms,
        "batch_size": config.global_batch_size,
        "num_ranks": rank_info.world_size,
        "versions": system.versions(),
        "commit": repository.commit(),
        **figures,
    }


def profile_run(profiler: Profiler, trace: Path | None, console: Console) -> dict[str, Any]:
    """Measure every phase, then the evaluation, then other settings of a loader that is too slow."""
    run, samples_name = profiler.run, profiler.run.benchmark.names.samples
    steps_of: dict[str, range] = {}  # in which each shape is trained on first
    phases: list[Phase] = []
    for shape, steps in profiler.probes.phases():
        if shape not in steps_of:
            steps_of[shape] = steps
            phases.append(profiler.measure_phase(shape, steps))
            console.print(*format_phase(phases[-1], samples_name), sep="\n")
    for name, reason in profiler.left_out.items():
        console.print(f"not tried: no {name}: {reason}")
    first_s, later_s = (time_call(run.evaluate, run.device) for _ in range(2))  # later ones may keep data
    worst = max(phases, key=lambda phase: phase.waiting_share)
    is_slow = worst.waiting_share >= WAITING
    result = Profile(
        samples_name=samples_name,
        phases=tuple(phases),
        cures=profiler.measure_cures(worst, steps_of[worst.shape]) if is_slow else {},
        is_compressed=run.config.gradient_compression != "none",
    )
    whole = of_all_devices(run.config, run.rank_info.world_size)
    verdict, num_evaluations = describe_bottleneck(result), len(whole.plan().evaluation_steps)
    evaluations_s = first_s + (num_evaluations - 1) * later_s
    training_s = result.training_s(whole.plan().num_steps * whole.global_batch_size)
    console.print(
        f"evaluation: {first_s:.2f} s the first time, {later_s:.2f} s later; {num_evaluations} of them "
        f"are {evaluations_s / (evaluations_s + training_s):.1%} of a run over the whole budget "
        f"({training_s:.0f} s of training)",
        verdict,
        sep="\n",
    )
    if trace:
        longest = max(phases, key=lambda phase: phase.per_sample_ms)
        profiler.write_trace(steps_of[longest.shape], trace)
        console.print(f"trace of {longest.shape} -> {trace} (chrome://tracing, ui.perfetto.dev)")
    return {
        "peaks": asdict(profiler.peaks),
        "phases": [asdict(phase) for phase in phases],
        "shares": result.shares(),
        "evaluation_s": (first_s, later_s),
        "loaders": result.cures,
        "verdict": verdict,
    }
