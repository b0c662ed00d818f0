"""Measure throughput, or what the suite's own logging costs; synthetic batches, no data set needed.

Throughput: training steps of every configuration at every shape (image sizes, sequence lengths), a few steps
of each in turn, as a share of what this device does at best. A name such as optimized+methods.blurpool=false
is a configuration with changes. The figures go to results/throughput/ as JSON, each once it is measured.
A configuration that is out of memory is listed there, the others go on, and the exit code is 1.

examples:
  ttt bench image_classification
  ttt bench image_classification baseline optimized optimized+methods.blurpool=false
  ttt bench image_classification optimized --shapes 96 224 --batch-size 256 --no-parts
  ttt bench image_classification optimized optimized+methods.compile.options.combo_kernels=true
  ttt bench language_bert optimized --batch-size 448 --micro-batch-size 112
  ttt bench language_bert --size mini --seconds 10
  ttt bench language_bert optimized --size mini --logging
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from common.arguments import add_benchmark, add_results
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.measure import figures as files
from common.measure.device_run import NUM_DEVICES, build, load
from common.repository import SIZES, benchmark_module, configurations

if TYPE_CHECKING:
    import torch

    from common.measure.clock import Peaks
    from common.measure.throughput import Failure, Rate
    from common.run.loop import TrainingRun
    from common.training.probes import Projection

LIMIT = 0.005  # of a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_benchmark(parser)
    parser.add_argument("configurations", nargs="*", metavar="CONFIGURATION", help="default: every one")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples a step; default: the configuration's, full / 8"
    )
    parser.add_argument(
        "--micro-batch-size", type=int, metavar="N", help="samples at a time; default: the whole batch"
    )
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="SHAPE", help="image sizes in pixels; default: all"
    )
    parser.add_argument("--no-parts", action="store_true", help="time no piece of a step alone")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each configuration and shape")
    parser.add_argument("--logging", action="store_true", help="measure the cost of logging and timing")
    parser.add_argument("--json", action="store_true", help="for machines")
    add_results(parser)


def main(args: argparse.Namespace) -> int:
    """Measure, print, and keep the figures."""
    benchmark_module(args.benchmark)  # answers an unknown name
    names = args.configurations or configurations(args.benchmark)
    if args.seconds <= 0:
        raise UserError("--seconds must be positive")
    from common.measure.clock import measure_peaks
    from common.measure.throughput import Failure, reserved_bytes, step_memory
    from common.training.memory import is_out_of_memory

    sizes = {name: getattr(args, name) for name in ("size", "batch_size", "micro_batch_size")}
    loaded = [(name, load(args.benchmark, name, **sizes)) for name in names]
    runs: dict[str, TrainingRun] = {}
    memory: dict[str, dict[str, float]] = {}
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as logs:
        peaks = None if args.logging else measure_peaks(find_device())  # while nothing else takes memory
        for name, config in loaded:
            others_bytes = reserved_bytes()
            is_known = not any(method.captures_graphs for run in runs.values() for method in run.methods)
            try:
                runs[name] = build(config, Path(directory), warms_up=args.logging)
            except (UserError, RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failures.append(Failure(configuration=name, shape="", error="out of memory for its weights"))
                continue
            logs.callback(runs[name].log.close)
            memory[name] = {}
            if is_known and not args.logging:
                memory[name] = step_memory(runs[name], others_bytes, args.shapes)
        if peaks is None:
            return max(logging_cost(name, run, args.json) for name, run in runs.items())
        return compare(args, runs, peaks, memory, failures)


def find_device() -> "torch.device":
    """Return the GPU of this process, or the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compare(
    args: argparse.Namespace,
    runs: "dict[str, TrainingRun]",
    peaks: "Peaks",
    memory: dict[str, dict[str, float]],
    failures: "list[Failure]",
) -> int:
    """Print and keep each figure as it is measured, then each configuration's projection."""
    from common.machine import system
    from common.measure import throughput

    console = Console(stderr=args.json, highlight=False, soft_wrap=True)
    figures: dict[str, Any] = {"benchmark": args.benchmark, "size": args.size, "versions": system.versions()}
    figures |= {"peaks": {}, "rates": [], "failed": [], "parts": {}, "projected": {}}

    @cache
    def path() -> Path:  # there is no file before there is a figure
        return files.new_file(args.results / "throughput" / system.hardware_name(), args.benchmark)

    def report(row: "Rate | Failure") -> None:
        if isinstance(row, throughput.Failure):
            figures["failed"].append(dataclasses.asdict(row))
            console.print(f"  {row.shape:>10}  {row.configuration:24} {row.error}")
        else:
            figures["rates"].append(dataclasses.asdict(row))
            console.print(describe(row, samples_name))
        files.write(path(), figures)

    samples_name = benchmark_module(args.benchmark).Benchmark.names.samples
    for failure in failures:
        report(failure)
    if not runs:
        return EXIT_FINDINGS
    first = next(iter(runs.values()))
    figures |= {"batch_size": first.config.global_batch_size, "peaks": dataclasses.asdict(peaks)}
    console.print(
        f"{system.hardware_name()}: {peaks.flops_per_s / 1e12:.2f} TFLOP/s in a bfloat16 matrix product, "
        f"{peaks.bytes_per_s / 1e9:.0f} GB/s in a copy; {first.config.global_batch_size} samples a step"
    )
    throughput.measure(runs, peaks, memory, seconds=args.seconds, shapes=args.shapes, report=report)
    if not args.no_parts:
        figures["parts"] = measure_parts(first, args.seconds, console, report)
    for name, run in runs.items():
        projection = None if args.shapes else project_minutes(name, run, figures)
        if projection is not None:
            figures["projected"][name] = dataclasses.asdict(projection)
            console.print(
                f"{name}: {projection.minutes:.1f} min on {NUM_DEVICES} of it, {projection.assuming}"
            )
    files.write(path(), figures)
    console.print(f"-> {path()}")
    if args.json:
        print(json.dumps(figures))
    return EXIT_FINDINGS if figures["failed"] else EXIT_OK


def measure_parts(
    run: "TrainingRun", seconds: float, console: Console, report: "Callable[[Failure], None]"
) -> dict[str, float]:
    """Print and return the samples a second of each piece of a step alone; none where memory is short."""
    from common.measure import throughput
    from common.training.memory import is_out_of_memory
    from common.training.probes import probes_of

    unit = f"{run.benchmark.names.samples}/s"
    try:
        return throughput.measure_parts(
            probes_of(run.benchmark).bench_parts(),
            run.device,
            seconds=seconds,
            report=lambda name, per_s: console.print(f"  {name:46} {per_s:10.1f} {unit}"),
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        report(throughput.Failure(configuration="pieces of a step", shape="", error="out of memory"))
        return {}


def project_minutes(name: str, run: "TrainingRun", figures: dict[str, Any]) -> "Projection | None":
    """Return the minutes of a whole training; None where a shape of it failed or nothing says how long."""
    from common.training.probes import probes_of

    if any(row["configuration"] == name for row in figures["failed"]):
        return None
    rates = [rate for rate in figures["rates"] if rate["configuration"] == name]
    return probes_of(run.benchmark).projection(
        {rate["shape"]: rate["samples_per_s"] for rate in rates}, NUM_DEVICES
    )


def describe(rate: "Rate", samples_name: str) -> str:
    """Return one line of the table."""
    memory = "" if rate.memory_gb is None else f"  {rate.memory_gb:6.1f} GB"
    traffic = "" if rate.bytes_share is None else f"  {rate.bytes_share:4.0%} of copy"
    tokens = "" if rate.tokens_per_s is None else f"  {rate.tokens_per_s:9.0f} tokens/s"
    return (
        f"  {rate.shape:>10}  {rate.configuration:24} {rate.samples_per_s:9.1f} {samples_name}/s{tokens}"
        f" {rate.step_ms:8.2f} ms {rate.flops_per_s / 1e12:7.2f} TFLOP/s, {rate.flops_share:.0%} of product"
        f"{traffic}{memory}"
    )


def logging_cost(name: str, run: "TrainingRun", as_json: bool) -> int:
    """Measure what the layer costs, and fail when that is more than 0.5 % of a step."""
    from common.measure.logging_cost import time_block, time_steps

    step_s, layer_s = time_steps(run)
    block_s = time_block(run)
    between = run.config.steps(run.config.evaluate_every)
    share = (layer_s + block_s / between) / step_s
    if as_json:
        found = {
            "step_ms": step_s * 1e3,
            "layer_us": layer_s * 1e6,
            "block_us": block_s * 1e6,
            "share": share,
        }
        print(json.dumps({"configuration": name} | found))
    else:
        print(
            f"{name}: step {step_s * 1e3:.2f} ms; logging and timing {layer_s * 1e6:.1f} us a step "
            f"and {block_s * 1e6:.0f} us a block of {between} steps: {share:.4%} (limit {LIMIT:.1%})"
        )
    return EXIT_OK if share <= LIMIT else EXIT_FINDINGS
