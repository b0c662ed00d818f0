"""A bench: the throughput of configurations side by side, printed and kept figure by figure."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common.config.schema import RunConfig
from common.errors import UserError
from common.evidence.text import size_title
from common.files import save_json
from common.machine import system
from common.measure import throughput
from common.measure.clock import interleave, measure_peaks, time_call, warm_up
from common.measure.device_run import NUM_DEVICES, open_run, warn_without_gpu
from common.measure.figures import keep
from common.measure.throughput import Failure, Rate, reserved_bytes, step_memory
from common.repository import benchmark_module
from common.run.loop import TrainingRun
from common.training.memory import is_out_of_memory
from common.training.probes import probes_of


def bench(
    configs: Sequence[tuple[str, RunConfig]],
    *,
    results: Path,
    seconds: float,
    shapes: Sequence[str],
    has_parts: bool,
    project: Callable[[str, dict[str, Any]], dict[str, Any] | None],
    console: Console,
) -> dict[str, Any]:
    """Measure configurations of one benchmark, by their full names; returns all figures.

    `project` predicts the minutes to the target from the figures, see common/study/predict/devices.py.
    The file of the figures is written again after each of them: an interrupted bench keeps what it measured.
    """
    config = configs[0][1]
    warn_without_gpu(config.size, console)
    samples_name = benchmark_module(config.benchmark).Benchmark.names.samples
    figures: dict[str, Any] = {"benchmark": config.benchmark, "size": config.size}
    figures |= {"versions": system.versions(), "peaks": {}, "rates": [], "failed": [], "parts": {}}
    figures["projected"] = {}

    @cache
    def path() -> Path:  # there is no file before there is a figure
        return keep(figures, results / "throughput" / system.hardware_name(), config.benchmark)

    def report(row: Rate | Failure) -> None:
        if isinstance(row, Failure):
            figures["failed"].append(asdict(row))
            console.print(f"  {row.shape:>10}  {row.configuration:24} {row.error}")
        else:
            figures["rates"].append(asdict(row))
            console.print(format_rate(row, samples_name))
        save_json(path(), figures)

    peaks = measure_peaks(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # all memory is free
    with ExitStack() as stack:
        runs, memory = open_runs(configs, shapes, stack, report)
        if not runs:
            return figures
        first = next(iter(runs.values()))
        figures |= {"batch_size": first.config.global_batch_size, "peaks": asdict(peaks)}
        batch_sizes = dict.fromkeys(str(run.config.global_batch_size) for run in runs.values())
        console.print(
            f"{config.benchmark} {size_title(config.size)} on {system.hardware_name()}: "
            f"{peaks.flops_per_s / 1e12:.2f} TFLOP/s in a {peaks.dtype} matrix product, "
            f"{peaks.bytes_per_s / 1e9:.0f} GB/s in a copy; {', '.join(batch_sizes)} samples a step"
        )
        measured = throughput.measure(
            runs, peaks, memory, seconds=seconds, shapes=shapes, report=console.print
        )
        for row in measured:
            report(row)
        if any(rate["tokens_per_s"] for rate in figures["rates"]):
            console.print("tokens/s leaves padding out")
        for name, per_s in measure_parts(first, seconds, report) if has_parts else ():
            if not figures["parts"]:
                console.print(f"parts of a step of {next(iter(runs))}, each timed alone:")
            console.print(f"  {name:46} {per_s:10.1f} {samples_name}/s")
            figures["parts"][name] = per_s
            save_json(path(), figures)
        if not shapes:
            project_runs(list(runs), figures, project, console)
    save_json(path(), figures)
    console.print(f"-> {path()}")
    return figures


def open_runs(
    configs: Sequence[tuple[str, RunConfig]],
    shapes: Sequence[str],
    stack: ExitStack,
    report: Callable[[Failure], None],
) -> tuple[dict[str, TrainingRun], dict[str, dict[str, float]]]:
    """Return the runs that fit into memory, and the memory of the first one's steps by shape; report others.

    A later run also uses memory that is free between the tensors of earlier ones: its need is not measured.
    """
    runs: dict[str, TrainingRun] = {}
    memory: dict[str, dict[str, float]] = {}
    for name, config in configs:
        others_bytes = reserved_bytes()
        try:
            runs[name] = stack.enter_context(open_run(config, warms_up=False))
        except (UserError, RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            report(Failure(configuration=name, shape="", error="out of memory for its weights"))
            continue
        memory[name] = step_memory(runs[name], others_bytes, shapes) if len(runs) == 1 else {}
    return runs, memory


def measure_parts(
    run: TrainingRun, seconds: float, report: Callable[[Failure], None]
) -> Iterator[tuple[str, float]]:
    """Yield each piece of a step with its samples/s alone, until memory is short."""
    try:
        for part in probes_of(run.benchmark).bench_parts():
            warm_up(part.call)
            (times,) = interleave({0: partial(time_call, part.call, run.device)}, seconds=seconds).values()
            yield part.name, part.num_samples / statistics.mean(times)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        report(Failure(configuration="pieces of a step", shape="", error="out of memory"))


def project_runs(
    names: Sequence[str],
    figures: dict[str, Any],
    project: Callable[[str, dict[str, Any]], dict[str, Any] | None],
    console: Console,
) -> None:
    for name in names:
        if projection := project(name, figures):
            figures["projected"][name] = projection
            minutes, low, high = (projection[key] for key in ("minutes", "low", "high"))
            of = f"{minutes:.1f} min ({low:.1f} to {high:.1f}) on {NUM_DEVICES} of it"
            console.print(f"{name}: {of}, {projection['assuming']}")


def format_rate(rate: Rate, samples_name: str, predicted_per_s: float | None = None) -> str:
    predicted = "" if predicted_per_s is None else f" (predicted: {predicted_per_s:.1f})"
    memory = "" if rate.memory_gb is None else f"  {rate.memory_gb:6.1f} GB"
    traffic = "" if rate.bytes_share is None else f"  {rate.bytes_share:4.0%} of the copy"
    tokens = "" if rate.tokens_per_s is None else f"  {rate.tokens_per_s:9.0f} tokens/s"
    return (
        f"  {rate.shape:>10}  {rate.configuration:24} {rate.samples_per_s:9.1f} {samples_name}/s"
        f"{predicted}{tokens}"
        f" {rate.step_ms:8.2f} ms {rate.flops_per_s / 1e12:7.3g} TFLOP/s, "
        f"{rate.flops_share:.0%} of the matrix product{traffic}{memory}"
    )
