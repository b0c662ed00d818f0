"""Inspect a configuration on this device.

graphs: 60 steps compiled and captured beside the same steps eagerly, with optimizer, averages and an
evaluation, on synthetic batches; exit code 1 where losses or gradients differ, a graph was skipped or broken,
or something was compiled late. Rounding to bf16 alone changes ResNet's gradients by their norm: add
+precision=fp32 there.

kernels: a profiler's trace of steps on synthetic batches, summed by class of kernel; --trace keeps it.

startup: the seconds of initialisation, with every form compiled, and of an evaluation, on synthetic batches.

neighbour: the seconds of short real runs on prepared data: alone, beside a busy process, and beside one that
comes under way, with several settings of OpenMP in turn. It needs a machine that nobody else uses. The
figures are kept in results/throughput/.

examples:
  ttt inspect graphs image_classification optimized+precision=fp32 --shapes 96 176
  ttt inspect kernels language_bert optimized --batch-size 56 --trace trace.json.gz
  ttt inspect startup language_bert optimized --size mini
  ttt inspect neighbour language_bert optimized --size mini --rounds 3 --pairs 12
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common.arguments import add_shared, whole_number
from common.config import schema as configs
from common.errors import EXIT_FINDINGS, EXIT_OK
from common.files import check_folder
from common.measure.device_run import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    part = parser.get_default("part")
    add_shared(parser, "benchmark", "configuration", "--size")
    if part == "neighbour":
        number, steps = whole_number(0, 100), whole_number(2, 10**6)
        parser.add_argument("--steps", type=steps, default=900, metavar="N", help="steps of a run")
        parser.add_argument("--rounds", type=number, default=3, metavar="N", help="runs of each kind")
        pairs = "pairs of quiet runs: with a thread on every core, then with as many as are free, as usual"
        parser.add_argument("--pairs", type=number, default=0, metavar="N", help=pairs)
        add_shared(parser, "--data", "--results")
    else:
        add_shared(parser, "--batch-size", "--micro-batch-size")
    if part in ("graphs", "kernels"):
        sizes = "image sizes in pixels, lengths in tokens; default: all"
        parser.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE", help=sizes)
    if part == "kernels":
        parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the last Chrome trace")
    add_shared(parser, "--json")


def main(args: argparse.Namespace) -> int:
    if args.part == "neighbour":
        return time_neighbour(args)
    if args.part == "kernels" and args.trace:
        check_folder(args.trace, "--trace")
    config = load(
        args.benchmark,
        args.configuration,
        size=args.size,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size,
    )
    figures = inspect(args, config)
    print(json.dumps(figures) if args.json else describe(figures))
    return EXIT_OK if figures.get("is_ok", True) else EXIT_FINDINGS


def inspect(args: argparse.Namespace, config: configs.RunConfig) -> dict[str, Any]:
    if args.part == "graphs":
        from common.measure.captured import compare_with_eager

        return compare_with_eager(config, args.shapes)
    if args.part == "kernels":
        from common.measure.profiling.trace import summarize_trace

        return summarize_trace(config, args.shapes, file=args.trace)
    from common.measure.overhead import measure_startup

    return measure_startup(config)


def time_neighbour(args: argparse.Namespace) -> int:
    from common.machine import system
    from common.measure import figures as files
    from common.measure.neighbour import measure_neighbour

    figures = measure_neighbour(
        args.benchmark,
        args.configuration,
        size=args.size,
        num_steps=args.steps,
        rounds=args.rounds,
        num_pairs=args.pairs,
    )
    path = files.keep(
        figures, args.results / "throughput" / system.hardware_name() / "neighbour", "neighbour"
    )
    print(json.dumps(figures) if args.json else f"{figures['table']}\n\n-> {path}")
    return EXIT_OK


def describe(figures: dict[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", describe(value, f"{indent}  ")]
        elif not isinstance(value, list):
            lines.append(f"{indent}{name:40} {f'{value:.4g}' if isinstance(value, float) else value}")
    return "\n".join(lines)
