"""Throughput of configurations side by side: training steps on synthetic batches, shape by shape."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from common.benchmark import Part
from common.errors import UserError
from common.method import Batch, Method
from common.timed_run import TrainingRun

STEPS_PER_TURN = 4  # the host may run ahead of the device, as in training
LAST_STEPS = 20  # of a training, which are timed: what happens every 4, 10 or 20 of them has its share
WARM_UP_TURNS = 2  # compile, record and replay captured graphs, choose kernels
GEMM_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 27}
PEAK_REPEATS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What this device does at best, measured: a bfloat16 matrix product, and a copy (read and write)."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One configuration at one shape. Shares are of the device's peaks; padding counts nowhere.

    `deviation` is that of a turn of steps, relative, over `num_turns`. Memory is that of `step_memory`.
    """

    configuration: str
    shape: str
    samples_per_s: float
    tokens_per_s: float | None
    step_ms: float
    deviation: float
    num_turns: int
    flops_per_s: float
    flops_share: float
    bytes_share: float | None
    memory_gb: float | None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, to its end on the device."""
    synchronize(device)
    before = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - before


def measure_peaks(device: torch.device) -> Peaks:
    """Time the two; the best of several calls counts."""
    size, num_bytes = GEMM_SIZE[device.type], COPY_BYTES[device.type]
    matrix = torch.randn(size, size, device=device).bfloat16()
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = min(timed(lambda: matrix @ matrix, device) for _ in range(PEAK_REPEATS))
    copy_s = min(timed(lambda: target.copy_(source), device) for _ in range(PEAK_REPEATS))
    return Peaks(flops_per_s=2 * size**3 / product_s, bytes_per_s=2 * num_bytes / copy_s)


def measure(
    runs: dict[str, TrainingRun],
    peaks: Peaks,
    memory: dict[str, dict[str, float]],
    *,
    seconds: float,
    report: Callable[[Rate], None],
) -> list[Rate]:
    """Time every configuration at every shape for about `seconds` each, a few steps of each in turn.

    `runs` are initialized; the shapes are those of the benchmark; `memory` is the `step_memory` of each.
    """
    rates = []
    batches = {name: run.benchmark.bench_batches(run.config.global_batch_size) for name, run in runs.items()}
    first, *others = batches
    for name in others:
        if batches[name].keys() != batches[first].keys():
            shapes = (f"{each} at {', '.join(batches[each])}" for each in (first, name))
            raise UserError(f"one bench has one set of shapes, found {' and '.join(shapes)}")
    for shape in batches[first]:
        lengths = {name: turn_length(run.methods) for name, run in runs.items()}
        steps = {name: stepper(run, batches[name][shape], lengths[name]) for name, run in runs.items()}
        for step in steps.values():
            for _ in range(WARM_UP_TURNS):
                step()
        times: dict[str, list[float]] = {name: [] for name in runs}
        ends = time.perf_counter() + seconds * len(runs)
        while time.perf_counter() < ends or len(next(iter(times.values()))) < 2:
            for name, step in steps.items():
                times[name].append(timed(step, runs[name].device) / lengths[name])
        for name in runs:
            step_s = statistics.median(times[name])
            per_s, work = batches[name][shape].num_samples / step_s, runs[name].benchmark.work(shape)
            rate = Rate(
                configuration=name,
                shape=shape,
                samples_per_s=per_s,
                tokens_per_s=per_s * work.num_tokens if work.num_tokens else None,
                step_ms=step_s * 1e3,
                deviation=statistics.stdev(times[name]) / step_s,
                num_turns=len(times[name]),
                flops_per_s=per_s * work.flops,
                flops_share=per_s * work.flops / peaks.flops_per_s,
                bytes_share=per_s * work.num_bytes / peaks.bytes_per_s if work.num_bytes else None,
                memory_gb=memory[name].get(shape),
            )
            report(rate)
            rates.append(rate)
    return rates


def measure_parts(
    parts: Iterable[Part], device: torch.device, *, seconds: float, report: Callable[[str, float], None]
) -> dict[str, float]:
    """Return the samples per second of each part by its name, timed for about `seconds`."""
    rates = {}
    for part in parts:
        for _ in range(WARM_UP_TURNS):
            part.call()
        times, ends = [timed(part.call, device)], time.perf_counter() + seconds
        while time.perf_counter() < ends:
            times.append(timed(part.call, device))
        rates[part.name] = part.num_samples / statistics.mean(times)
        report(part.name, rates[part.name])
    return rates


def turn_length(methods: Iterable[Method], at_least: int = STEPS_PER_TURN) -> int:
    """Return a number of steps in which methods that act every few steps do so as often as in training.

    What happens less often than every `LAST_STEPS` steps is left out: it is nearly nothing of a step.
    """
    period = math.lcm(*(method.period for method in methods if method.period <= LAST_STEPS))
    return math.ceil(at_least / period) * period


def stepper(run: TrainingRun, batch: Batch, num_steps: int) -> Callable[[], object]:
    """Return a function that takes a turn of training steps: the last ones of a training, over and over.

    The batch is one of `bench_batches`, where a loader that keeps up would have it.
    """
    numbers = last_steps(run)

    def step() -> None:
        for number in itertools.islice(numbers, num_steps):
            run.train_step(batch, number)

    return step


def last_steps(run: TrainingRun) -> Iterator[int]:
    """Yield the numbers of the last steps of a training without end."""
    num_steps = run.plan.num_steps
    return itertools.cycle(range(max(0, num_steps - LAST_STEPS), num_steps))


def reserved_bytes() -> int:
    """Return the memory that is taken on this GPU, without what torch keeps for later; 0 without one."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def step_memory(run: TrainingRun, others_bytes: int) -> dict[str, float]:
    """Return by shape the most memory in GB that a run has taken while it trained on that; empty on a CPU.

    That is all that the process has reserved but `others_bytes`, which were taken before the run was built.
    Inputs of all shapes count, and captured graphs of the shapes before it: they stay. After another run that
    captures graphs it would be too little: all graphs share their memory.
    """
    found: dict[str, float] = {}
    if run.device.type != "cuda":
        return found
    for shape, batch in run.benchmark.bench_batches(run.config.global_batch_size).items():
        torch.cuda.empty_cache()  # forgets what a larger shape has left
        torch.cuda.reset_peak_memory_stats()
        step = stepper(run, batch, turn_length(run.methods))
        for _ in range(WARM_UP_TURNS):
            step()
        synchronize(run.device)
        found[shape] = (torch.cuda.max_memory_reserved() - others_bytes) / 1e9
    return found
