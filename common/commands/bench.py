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
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from common import atomic
from common import config as configs
from common.config import ROOT
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.ranks import ALONE, Place

if TYPE_CHECKING:
    from common.mllog import RunLog
    from common.throughput import Failure, Rate
    from common.timed_run import TrainingRun

LIMIT = 0.005  # of a step
NUM_DEVICES = 8  # of the published systems; one of them, here, takes its share of the batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("benchmark", help=f"one of: {', '.join(configs.benchmarks())}")
    parser.add_argument("configurations", nargs="*", metavar="CONFIGURATION", help="default: every one")
    parser.add_argument("--size", choices=configs.SIZES, default="full")
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
    parser.add_argument("--results", type=Path, default=ROOT / "results", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Measure, print, and keep the figures."""
    configs.benchmark_module(args.benchmark)  # answers an unknown name
    names = args.configurations or configs.configurations(args.benchmark)
    if args.seconds <= 0:
        raise UserError("--seconds must be positive")
    sizes = {name: getattr(args, name) for name in ("size", "batch_size", "micro_batch_size")}
    loaded = [(name, load(args.benchmark, name, **sizes)) for name in names]
    from common.memory import OutOfMemory, is_out_of_memory
    from common.throughput import Failure, reserved_bytes, step_memory

    runs: dict[str, TrainingRun] = {}
    memory: dict[str, dict[str, float]] = {}
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as logs:
        for name, config in loaded:
            others_bytes = reserved_bytes()
            is_known = not any(method.captures_graphs for run in runs.values() for method in run.methods)
            try:
                runs[name] = build(config, Path(directory), warms_up=args.logging)
            except (OutOfMemory, RuntimeError, MemoryError) as error:
                if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
                    raise
                failures.append(Failure(configuration=name, shape="", error="out of memory for its weights"))
                continue
            logs.callback(runs[name].log.close)
            memory[name] = {}
            if is_known and not args.logging:
                memory[name] = step_memory(runs[name], others_bytes, args.shapes)
        if args.logging:
            return max(logging_cost(name, run, args.json) for name, run in runs.items())
        return compare(args, runs, memory, failures)


def load(
    benchmark: str,
    name: str,
    *,
    size: str,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
) -> configs.RunConfig:
    """Return the configuration of a full name, NAME+KEY=VALUE..., with the batch of one device."""
    configuration, *settings = name.split("+")
    if batch_size is None:
        config = configs.load(benchmark, configuration, size=size, settings=settings).config
        batch_size = config.global_batch_size // (NUM_DEVICES if size == "full" else 1)
    if min(batch_size, micro_batch_size or 1) < 1:
        raise UserError("--batch-size and --micro-batch-size must be positive")
    sizes = [f"global_batch_size={batch_size}", f"micro_batch_size={micro_batch_size or 'null'}"]
    return configs.load(benchmark, configuration, size=size, settings=[*sizes, *settings]).config


def build(
    config: configs.RunConfig, directory: Path, place: Place = ALONE, *, warms_up: bool = True
) -> "TrainingRun":
    """Return an initialized run whose log goes to a folder that nobody keeps."""
    from common.mllog import RunLog
    from common.timed_run import Spec, TrainingRun

    number = sum(1 for _ in directory.iterdir())
    log = RunLog(directory / f"result_{number}.txt", state="run")
    spec = Spec(config={}, seed=0, system="bench", result="", label="", expected_s=None)
    benchmark = configs.benchmark_module(config.benchmark).Benchmark(config, seed=0, place=place)
    run = TrainingRun(spec, config, benchmark, log)
    run.initialize(from_scratch=True, warms_up=warms_up)
    return run


def compare(
    args: argparse.Namespace,
    runs: "dict[str, TrainingRun]",
    memory: dict[str, dict[str, float]],
    failures: "list[Failure]",
) -> int:
    """Print and keep each figure as it is measured, then each configuration's projection."""
    from common import system, throughput

    console = Console(stderr=args.json, highlight=False, soft_wrap=True)
    figures: dict[str, Any] = {"benchmark": args.benchmark, "size": args.size, "versions": system.versions()}
    figures |= {"peaks": {}, "rates": [], "failed": [], "parts": {}, "projected": {}}

    @cache
    def path() -> Path:  # there is no file before there is a figure
        return new_file(args.results / "throughput" / system.hardware_name(), args.benchmark)

    def report(row: "Rate | Failure") -> None:
        if isinstance(row, throughput.Failure):
            figures["failed"].append(dataclasses.asdict(row))
            console.print(f"  {row.shape:>10}  {row.configuration:24} {row.error}")
        else:
            figures["rates"].append(dataclasses.asdict(row))
            console.print(describe(row, samples_name))
        write(path(), figures)

    samples_name = configs.benchmark_module(args.benchmark).Benchmark.samples_name
    for failure in failures:
        report(failure)
    if not runs:
        return EXIT_FINDINGS
    first = next(iter(runs.values()))
    peaks = throughput.measure_peaks(first.device)
    figures |= {"batch_size": first.config.global_batch_size, "peaks": dataclasses.asdict(peaks)}
    console.print(
        f"{system.hardware_name()}: {peaks.flops_per_s / 1e12:.2f} TFLOP/s in a bfloat16 matrix product, "
        f"{peaks.bytes_per_s / 1e9:.0f} GB/s in a copy; {first.config.global_batch_size} samples a step"
    )
    throughput.measure(runs, peaks, memory, seconds=args.seconds, shapes=args.shapes, report=report)
    if not args.no_parts:
        figures["parts"] = throughput.measure_parts(
            first.benchmark.bench_parts(),
            first.device,
            seconds=args.seconds,
            report=lambda name, per_s: console.print(f"  {name:46} {per_s:10.1f} {samples_name}/s"),
        )
    for name, run in runs.items():
        rates = [rate for rate in figures["rates"] if rate["configuration"] == name]
        per_s = {rate["shape"]: rate["samples_per_s"] for rate in rates}
        is_whole = not args.shapes and all(row["configuration"] != name for row in figures["failed"])
        projection = run.benchmark.projection(per_s, NUM_DEVICES) if is_whole else None
        if projection is not None:
            figures["projected"][name] = dataclasses.asdict(projection)
            console.print(
                f"{name}: {projection.minutes:.1f} min on {NUM_DEVICES} of it, {projection.assuming}"
            )
    write(path(), figures)
    console.print(f"-> {shown(path())}")
    if args.json:
        print(json.dumps(figures))
    return EXIT_FINDINGS if figures["failed"] else EXIT_OK


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


def keep(figures: dict[str, Any], directory: Path, name: str) -> Path:
    """Write a new file NAME_N.json; an existing one is never overwritten."""
    path = new_file(directory, name)
    write(path, figures)
    return shown(path)


def new_file(directory: Path, name: str) -> Path:
    """Return a new file NAME_N.json, empty so far."""
    from common.launch import create_next

    try:
        directory.mkdir(parents=True, exist_ok=True)
        return create_next(directory, f"{name}_{{}}.json")
    except OSError as error:
        raise UserError(f"cannot write figures here ({error.strerror})", where=str(directory)) from error


def write(path: Path, figures: dict[str, Any]) -> None:
    """Put the figures in the place of what the file held."""
    try:
        atomic.write_text(path, json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write figures here ({error.strerror})", where=str(path)) from error


def shown(path: Path) -> Path:
    """Return a path as people read it, relative to the repository where it lies inside."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def logging_cost(name: str, run: "TrainingRun", as_json: bool) -> int:
    """Measure what the layer costs, and fail when that is more than 0.5 % of a step."""
    step_s, layer_s = time_steps(run)
    block_s = time_block(run.log)
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


def time_steps(run: "TrainingRun", num_steps: int = 60) -> tuple[float, float]:
    """Return the median seconds of a training step and the mean of the layer's calls around it."""
    from common.board import COMPUTING, LOADING

    steps, calls = [], []
    batches = cycle(list(run.benchmark.synthetic_batches()))
    run.clock.start()
    for step in range(num_steps):
        before = time.perf_counter()
        loss = run.train_step(next(batches), step)
        between = time.perf_counter()
        run.slot.enter(step, LOADING)
        run.slot.enter(step, COMPUTING)
        run.clock.step(loss)
        calls.append(time.perf_counter() - between)
        steps.append(between - before)
    run.clock.close()
    return statistics.median(steps), statistics.mean(calls)


def time_block(log: "RunLog", repeats: int = 50) -> float:
    """Return the mean seconds of all the log lines of one block and its evaluation."""
    before = time.perf_counter()
    for _ in range(repeats):
        log.start("block_start", first_epoch_num=1, epoch_count=1)
        log.start("epoch_start", epoch_num=1)
        log.stop("epoch_stop", epoch_num=1)
        log.event("throughput", 1.0, epoch_num=1, samples=1)
        log.event("train_loss", 1.0, epoch_num=1, samples=1)
        log.stop("block_stop", first_epoch_num=1)
        log.start("eval_start", epoch_num=1)
        log.stop("eval_stop", epoch_num=1)
        log.event("eval_accuracy", 0.5, epoch_num=1, samples=1, correct=1, total=2)
    return (time.perf_counter() - before) / repeats
