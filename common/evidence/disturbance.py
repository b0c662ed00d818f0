"""Finds in a log what disturbed its run: other programs, a host that took processors back, slow GPUs."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from common.evidence.log import Log
from common.evidence.records import Event, finite

SPARE = 0.3  # cores that other programs, or a host, may take
SLOWED = {  # NVML's bits for why a GPU runs below its clock
    0x08: "slowed down by its hardware",
    0x20: "slowed down by its temperature",
    0x40: "too hot",
    0x80: "braked by its power supply",
}


class Disturbance(NamedTuple):
    """The record of a block that says so, and what happened."""

    event: Event
    text: str


def disturbed_blocks(log: Log) -> list[Disturbance]:
    """Return the blocks of steps that did not have the machine that they computed on for themselves."""
    return [
        Disturbance(event, ", ".join(texts))
        for event in log.events("machine_load")
        if (texts := [*disturbed_cores(event), *disturbed_gpus(event)])
    ]


def disturbed_cores(event: Event) -> Iterator[str]:
    """Yield who took processors that a block needed."""
    others, cores, steal, threads = (
        finite(value) or 0.0
        for value in (event.value, *(event.metadata.get(key) for key in ("cores", "steal", "threads")))
    )
    computing = 0.0 if event.metadata.get("gpus") else threads  # beside a GPU they wait
    if others > SPARE and others + computing > cores + SPARE:
        yield f"other programs used {others:.1f} of {cores:g} cores, beside {threads:g} threads"
    if steal > SPARE:
        yield f"the host took {steal:.1f} of {cores:g} cores"


def disturbed_gpus(event: Event) -> Iterator[str]:
    """Yield what was wrong with the GPU of each rank."""
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
    """Return one line about a run that was disturbed; empty for one that was not."""
    blocks, num_blocks = disturbed_blocks(log), len(log.events("machine_load"))
    lowered = log.last("threads_lowered")
    if lowered:
        number, step = lowered.value, lowered.metadata.get("step")
        return f"other programs came: {number} thread(s) from step {step} on: this time is no measure"
    if not blocks:
        return ""
    return f"{len(blocks)} of {num_blocks} blocks were disturbed ({blocks[0].text}): this time is no measure"
