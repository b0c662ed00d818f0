"""Measure throughput, or what the suite's own logging costs; synthetic batches, no data set needed.

Throughput: training steps of every configuration at every shape (image sizes, sequence lengths), a few steps
of each in turn, as a share of what this device does at best. A name such as optimized+methods.blurpool=false
is a configuration with changes. The figures go to results/throughput/ as JSON, each once it is measured.
A configuration that is out of memory is listed there, the others go on, and the exit code is 1.

examples:
  ttt bench image_classification
  ttt bench image_classification baseline optimized optimized+methods.blurpool=false
  ttt bench image_classification optimized --shapes 96 224 --batch-size 256 --no-parts
  ttt bench image_classification optimized optimized+methods.compile.options.combo_kernels=false
  ttt bench language_bert optimized --batch-size 448 --micro-batch-size 112
  ttt bench language_bert --size mini --seconds 10
  ttt bench language_bert optimized --size mini --logging
"""

import argparse
import json
from typing import Any

from common.arguments import add_shared, positive
from common.config.schema import RunConfig
from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence.text import line_console
from common.measure.device_run import load
from common.repository import benchmark_module, configurations
from common.training.registry import refuse_process_wide

LIMIT = 0.005  # of a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark", "configurations", "--size", "--batch-size", "--micro-batch-size")
    sizes = "image sizes in pixels, lengths in tokens; default: all"
    parser.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE", help=sizes)
    parser.add_argument("--no-parts", action="store_true", help="leave out the pieces of a step")
    each_time = "for each configuration and shape"
    parser.add_argument("--seconds", type=positive, default=3.0, metavar="S", help=each_time)
    parser.add_argument("--logging", action="store_true", help="measure the cost of logging and timing")
    add_shared(parser, "--json", "--results")


def main(args: argparse.Namespace) -> int:
    benchmark_module(args.benchmark)  # raises UserError for an unknown name
    names = args.configurations or configurations(args.benchmark)
    sizes = {name: getattr(args, name) for name in ("size", "batch_size", "micro_batch_size")}
    configs = [(name, load(args.benchmark, name, **sizes)) for name in names]
    refuse_process_wide([config for _, config in configs])
    if args.logging:
        return print_logging_costs(configs, args.json)
    from common.measure.bench import bench
    from common.study.predict.devices import project

    figures = bench(
        configs,
        results=args.results,
        seconds=args.seconds,
        shapes=args.shapes,
        has_parts=not args.no_parts,
        project=project,
        console=line_console(stderr=args.json),
    )
    if args.json and figures["peaks"]:
        print(json.dumps(figures))
    return EXIT_FINDINGS if figures["failed"] else EXIT_OK


def print_logging_costs(configs: list[tuple[str, RunConfig]], as_json: bool) -> int:
    """Measure what logging costs; the exit code is 1 where that is more than 0.5 % of a step."""
    from common.measure.device_run import open_run
    from common.measure.overhead import measure_logging

    costs: list[dict[str, Any]] = []
    for name, config in configs:
        with open_run(config) as run:
            cost = measure_logging(run)
        costs.append({"configuration": name} | cost)
        if not as_json:
            print(
                f"{name}: step {cost['step_ms']:.2f} ms; logging and timing {cost['layer_us']:.1f} us a step "
                f"and {cost['block_us']:.0f} us a block of {cost['block_steps']} steps: {cost['share']:.4%} "
                f"(limit {LIMIT:.1%})"
            )
    if as_json:
        print(json.dumps(costs))
    return EXIT_OK if all(cost["share"] <= LIMIT for cost in costs) else EXIT_FINDINGS
