"""Find what disturbed a run: other programs, a host that took processors back, slow GPUs.

The log of the run says so, or it is slower than the other runs of its set, its siblings, by more than these
differ among themselves.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from common.evidence import intervals
from common.evidence.intervals import ALPHA
from common.evidence.log import Log
from common.evidence.records import Event, counted, finite, printable

SPARE = 0.3  # cores that other programs, or a host, may take
JUMP = 1.75  # times slower than its siblings in one block
SLOWER = 1.25  # the least that counts: a run against its siblings, or its second half against its first
FEWEST = 5  # runs whose spread tells the usual one
SLOWED = {  # NVML's clocks event reasons, a bit each: why a GPU runs below its clock
    0x08: "slowed down by its hardware",
    0x20: "slowed down by its temperature",
    0x40: "too hot",
    0x80: "braked by its power supply",
}


class Disturbance(NamedTuple):
    """The `machine_load` record of a disturbed block, and the disturbance in words."""

    event: Event
    text: str


def disturbed_blocks(log: Log) -> list[Disturbance]:
    """Return the blocks of steps that shared their processors or GPUs, or whose GPUs were slowed down."""
    return [
        Disturbance(event, ", ".join(texts))
        for event in log.events("machine_load")
        if (texts := [*disturbed_cores(event), *disturbed_gpus(event)])
    ]


def disturbed_cores(event: Event) -> Iterator[str]:
    """Say who took CPU cores that a block of steps needed."""
    others = finite(event.value) or 0.0
    cores, steal, threads = (event.number(key) or 0.0 for key in ("cores", "steal", "threads"))
    computing = 0.0 if event.metadata.get("gpus") else threads  # beside a GPU the threads wait
    if others > SPARE and others + computing > cores + SPARE:
        beside = counted(round(threads), "thread")
        yield f"other programs used {others:.1f} of {cores:g} cores, beside {beside}"
    if steal > SPARE:
        yield f"the host took {steal:.1f} of {cores:g} cores"


def disturbed_gpus(event: Event) -> Iterator[str]:
    """Say what slowed down or shared the GPU of a rank."""
    gpus = event.metadata.get("gpus")
    for rank, gpu in enumerate(gpus if isinstance(gpus, list) else []):
        if not isinstance(gpu, Mapping):
            continue
        reasons, processes = gpu.get("reasons"), gpu.get("other_processes")
        bits = reasons if isinstance(reasons, int) else 0
        yield from (f"GPU of rank {rank} {why}" for bit, why in SLOWED.items() if bits & bit)
        if isinstance(processes, int) and processes > 0:
            yield f"other processes on the GPU of rank {rank}: {processes}"


def summarize_disturbance(log: Log) -> str:
    """Return a line about the disturbance of a run; '' without one."""
    blocks, num_blocks = disturbed_blocks(log), len(log.events("machine_load"))
    lowered = log.last("threads_lowered")
    if lowered:
        number, step = (printable(value, 40) for value in (lowered.value, lowered.metadata.get("step")))
        return (
            f"other programs came: threads lowered to {number} from step {step} on: this time is no measure"
        )
    if not blocks:
        return ""
    of = f"{len(blocks)} of {counted(num_blocks, 'block')}"
    return f"disturbed in {of} ({blocks[0].text}): this time is no measure"


def disturbed_runs(logs: Sequence[Log]) -> dict[int, str]:
    """Say why runs of a set count as disturbed, by index: by their own log, or beside their siblings."""
    rates = [rates_of(log) for log in logs]
    texts = slow_runs(rates)
    texts |= {index: text for index, log in enumerate(logs) if (text := summarize_disturbance(log))}
    return dict(sorted(texts.items()))


def rates_of(log: Log) -> dict[float, float]:
    """Return the samples/s of each block by the samples at its end."""
    rates = {}
    for event in log.events("throughput"):
        samples, rate = event.number("samples"), finite(event.value)
        if samples is not None and rate is not None and rate > 0:
            rates[samples] = rate
    return rates


def slow_runs(rates: Sequence[Mapping[float, float]]) -> dict[int, str]:
    """Return the indexes of the runs that were slower than the others of one recipe, with the reason.

    `rates` are those of `rates_of`. A run counts if the rate of a block is below 1 / 1.75 of the median of
    the other runs at the same sample. Of 5 or more runs one also counts if it, or its second half, is slower
    by 25 % or more, and by more than is usual among its siblings (`find_outliers`: Student's t for one
    further value, Holm's correction for the number of runs). Where undisturbed runs of one recipe differ as
    much, one is flagged more often than in 5 % of sets: common/study/SIMULATIONS.md.
    """
    slowness = [compare_with_siblings(rates, index) for index in range(len(rates))]
    texts = {}
    for index, blocks in enumerate(slowness):
        worst = max(blocks, key=blocks.__getitem__, default=None)
        if worst is not None and blocks[worst] > math.log(JUMP):
            times = math.exp(blocks[worst])
            texts[index] = f"{times:.1f} times slower than its siblings before sample {worst:,.0f}"
    levels = {index: statistics.fmean(blocks.values()) for index, blocks in enumerate(slowness) if blocks}
    drifts = {
        index: compute_drift(list(blocks.values()))
        for index, blocks in enumerate(slowness)
        if len(blocks) > 1
    }
    for what, figures in (("slower than its siblings", levels), ("slower in its second half", drifts)):
        for index in find_outliers(figures):
            texts.setdefault(index, f"{math.exp(figures[index]):.2f} times {what}")
    return texts


def compare_with_siblings(rates: Sequence[Mapping[float, float]], index: int) -> dict[float, float]:
    """Compute log(median rate of the other runs / rate of this run) of each block, by sample."""
    blocks = {}
    for place, rate in rates[index].items():
        others = [other[place] for number, other in enumerate(rates) if number != index and place in other]
        if others:
            blocks[place] = math.log(statistics.median(others) / rate)
    return blocks


def compute_drift(blocks: Sequence[float]) -> float:
    half = len(blocks) // 2
    return statistics.fmean(blocks[-half:]) - statistics.fmean(blocks[:half])


def find_outliers(figures: Mapping[int, float]) -> list[int]:
    """Return the keys of the figures (logarithms of ratios) that are outliers, by 25 % or more.

    A figure is compared with the others near the median if these are enough: two disturbed runs would hide
    each other.
    """
    if len(figures) < FEWEST:
        return []
    centre, p_values = statistics.median(figures.values()), []
    for index, value in figures.items():
        others = [other for number, other in figures.items() if number != index]
        near = [other for other in others if abs(other - centre) < math.log(SLOWER)]
        p_values.append(intervals.outlier_p_value(value, near if len(near) >= FEWEST - 1 else others))
    adjusted = zip(figures, intervals.holm(p_values), strict=True)
    return [index for index, p in adjusted if p < ALPHA / 2 and figures[index] > math.log(SLOWER)]
