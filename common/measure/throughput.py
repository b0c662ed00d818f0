"""Throughput of configurations side by side: steps on synthetic batches, shape by shape; see points.py."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from common.errors import UserError
from common.measure.clock import Peaks, interleave, synchronize, time_call, warm_up
from common.measure.points import Point, common_period, points_of
from common.run.loop import TrainingRun
from common.training import distributed
from common.training.memory import OutOfMemory
from common.training.method import Batch, Method
from common.training.probes import probes_of

STEPS_PER_TURN = 4  # at a point, at least: the host may run ahead of the device, as in training
LONG_WARM_UP_S = 5.0  # of a configuration at a shape
LONG_STEP_S = {"cpu": 0.1, "cuda": 0.6}  # a longer step is a turn alone, unless a method acts every few

Steps = list[tuple[Callable[[], object], float]]  # of steps, at each point, and the weight of its seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One configuration at one shape. Shares are of the device's peaks; padding counts nowhere.

    `deviation` is that of a turn of steps, relative, over `num_turns`. Memory is that of `step_memory`.
    """

    configuration: str
    shape: str
    batch_size: int
    samples_per_s: float
    tokens_per_s: float | None
    step_ms: float
    deviation: float
    num_turns: int
    flops_per_s: float
    flops_share: float
    bytes_share: float | None
    memory_gb: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A configuration that could not be timed, and why; `shape` is empty where none could."""

    configuration: str
    shape: str
    error: str


def measure(
    runs: dict[str, TrainingRun],
    peaks: Peaks,
    memory: dict[str, dict[str, float]],
    *,
    seconds: float,
    shapes: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[Rate | Failure]:
    """Yield each configuration at each shape, timed for about `seconds`, a few steps of each in turn.

    `runs` are initialized; the shapes are those of the benchmark, or the `shapes` named; `memory` is the
    `step_memory` of each. A configuration that is out of memory at a shape is a Failure there. `report` is
    given a line where the first steps of one took long.
    """
    batches = {name: bench_batches(run, shapes) for name, run in runs.items()}
    for shape in dict.fromkeys(itertools.chain.from_iterable(batches.values())):
        trials = {}
        for name, run in runs.items():
            if shape not in batches[name]:
                continue
            started = time.monotonic()
            try:
                trials[name] = partial(time_sample, steppers(run, shape), run.device)
                if (warm_up_s := time.monotonic() - started) > LONG_WARM_UP_S:
                    report(f"  {shape:>10}  {name:24} warmed up in {warm_up_s:.0f} s")
            except OutOfMemory as error:
                free_memory(run)
                yield Failure(configuration=name, shape=shape, error=error.what)
        for name, samples_s in interleave(trials, rounds=2, seconds=seconds * len(trials)).items():
            times = [sample_s * batches[name][shape].num_samples for sample_s in samples_s]
            step_s, work = statistics.median(times), probes_of(runs[name].benchmark).work(shape)
            per_s = batches[name][shape].num_samples / step_s
            yield Rate(
                configuration=name,
                shape=shape,
                batch_size=runs[name].config.global_batch_size,
                samples_per_s=per_s,
                tokens_per_s=per_s * work.num_tokens if work.num_tokens else None,
                step_ms=step_s * 1e3,
                deviation=statistics.stdev(times) / step_s,
                num_turns=len(times),
                flops_per_s=per_s * work.flops,
                flops_share=per_s * work.flops / peaks.flops_per_s,
                bytes_share=per_s * work.num_bytes / peaks.bytes_per_s if work.num_bytes else None,
                memory_gb=memory[name].get(shape),
            )


def bench_batches(run: TrainingRun, shapes: Sequence[str] = ()) -> dict[str, Batch]:
    """Return the benchmark's batches by the name of their shape, or those of the `shapes` named.

    The first word of a name is enough. Raises UserError for a shape that the benchmark does not have.
    """
    batches = probes_of(run.benchmark).bench_batches(run.config.global_batch_size)
    names = {name.split()[0]: name for name in batches} | {name: name for name in batches}
    for shape in shapes:
        if shape not in names:
            raise UserError(f"no shape '{shape}'", where="--shapes", hint=f"known: {', '.join(batches)}")
    chosen = [names[shape] for shape in shapes] or list(batches)
    return {name: batches[name] for name in chosen}


def steppers(run: TrainingRun, shape: str | None = None) -> Steps:
    """Return warm turns of steps, with weights, at the points of a training, or of one shape.

    The weighted seconds of all turns add up to those of a sample (`time_sample`).
    """
    batches, turns = bench_batches(run), Steps()
    for point, batch in loaded_points(run, batches, shape):
        once = stepper(run, batch, point, 1)
        warm_up(once)
        num_steps = distributed.broadcast(steps_of_turn(run.methods, time_call(once, run.device)))
        turn = stepper(run, batch, point, num_steps)
        if num_steps > 1:
            turn()  # the first actions of methods that act every few steps
        turns.append((turn, point.share / num_steps / batch.num_samples))
    return turns


def time_sample(turns: Steps, device: torch.device) -> float:
    """Return the seconds of a sample, on average over the training."""
    return sum(time_call(turn, device) * weight for turn, weight in turns)


def loaded_points(
    run: TrainingRun, batches: dict[str, Batch], shape: str | None = None
) -> Iterator[tuple[Point, Batch]]:
    """Yield `points_of` a run, with the batch of `bench_batches` that the loader would yield at each."""
    for point in points_of(run, shape):
        if point.loaded not in batches:
            raise UserError(f"no batch of {point.loaded} to measure", where=run.config.configuration)
        yield point, batches[point.loaded]


def steps_of_turn(methods: Iterable[Method], step_s: float) -> int:
    """Return the number of steps at a point in a turn, by the seconds of a step.

    Several of a GPU's steps cost little, and in the first of them the GPU waits until the host has a batch.
    """
    long_step_s = LONG_STEP_S["cuda" if torch.cuda.is_available() else "cpu"]
    return turn_length(methods, 1 if step_s > long_step_s else STEPS_PER_TURN)


def turn_length(methods: Iterable[Method], at_least: int = STEPS_PER_TURN) -> int:
    """Return a number of steps, whole periods of the methods that act every few steps."""
    period = common_period(methods)
    return math.ceil(at_least / period) * period


def stepper(run: TrainingRun, batch: Batch, point: Point, num_steps: int) -> Callable[[], object]:
    """Return a function that takes a turn of training steps: those of a point, over and over.

    The batch is one of `bench_batches`, where a loader that keeps up would have it.
    """
    numbers = itertools.cycle(point.window)

    def step() -> None:
        for number in itertools.islice(numbers, num_steps):
            run.train_step(batch, number)

    return step


def free_memory(run: TrainingRun) -> None:
    run.optimizer.zero_grad()
    torch.cuda.empty_cache()


def reserved_bytes() -> int:
    """Return the memory in use on this GPU, without torch's cache; 0 without a GPU."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def step_memory(run: TrainingRun, others_bytes: int, shapes: Sequence[str] = ()) -> dict[str, float]:
    """Return the peak memory in GB of training on each shape; empty on a CPU.

    It is the peak that the process has reserved, less `others_bytes`, which were reserved before the run was
    built. Inputs of all shapes count, and CUDA graphs of the shapes before it: they stay. After another run
    it would be too little. A shape that is out of memory has no entry.
    """
    peak_gb: dict[str, float] = {}
    if run.device.type != "cuda":
        return peak_gb
    batches = bench_batches(run)
    for shape in bench_batches(run, shapes):
        torch.cuda.empty_cache()  # frees the cached memory of a larger shape
        torch.cuda.reset_peak_memory_stats()
        try:
            for point, batch in loaded_points(run, batches, shape):
                warm_up(stepper(run, batch, point, turn_length(run.methods, 1)))
        except OutOfMemory:
            free_memory(run)
            continue
        synchronize(run.device)
        peak_gb[shape] = (torch.cuda.max_memory_reserved() - others_bytes) / 1e9
    return peak_gb
