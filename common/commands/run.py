"""Time one configuration of a benchmark from run_start to its target quality, N times.

Each run is one process and one result file, results/<system>/<resnet|bert>/result_N.txt, which is never
overwritten. A run that does not reach its target ends `aborted`, is kept, and makes the exit code 1.

examples:
  ttt run language_bert optimized --size mini --runs 3
  ttt run image_classification baseline --size mini --set optimizer.learning_rate=0.1
  ttt run image_classification optimized --size full --dry-run
"""

import argparse
import sys
from pathlib import Path

from common import config as configs
from common.config import ROOT, SIZES, Loaded
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError

BYTES_PER_PARAMETER = {
    "adamw": 16,
    "sgd": 12,
    "decoupled_sgd": 12,
}  # float32 weight, gradient, optimizer state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("benchmark", help=f"one of: {', '.join(configs.benchmarks())}")
    parser.add_argument("configuration", help="baseline, optimized, or another YAML file of the benchmark")
    parser.add_argument("--size", choices=SIZES, default="full", help="mini: a proxy for CPU, minutes")
    parser.add_argument(
        "--runs", default="1", metavar="N", help="a number, or official: 5 (resnet), 10 (bert)"
    )
    parser.add_argument(
        "--seed", type=seed, help="seed of the first run, the next ones count up; default: random"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key, such as optimizer.learning_rate",
    )
    parser.add_argument(
        "--index", type=seed, metavar="N", help="write result_N.txt; default: the next free one"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", help=argparse.SUPPRESS)
    parser.add_argument("--systems", type=Path, default=ROOT / "systems", help=argparse.SUPPRESS)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the merged configuration and the plan, then stop"
    )


def seed(text: str) -> int:
    """Parse a number from 0 to 2^31 - 1."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to {2**31 - 1}")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Run the set; the exit code is the first that was not 0."""
    loaded = configs.load(args.benchmark, args.configuration, size=args.size, settings=args.set)
    if args.dry_run:
        print(dry_run(loaded))
        return EXIT_OK
    from common import launch, system

    run_set = launch.plan_run_set(loaded, results=args.results.resolve(), runs=args.runs, seed=args.seed)
    launch.check_data(loaded)
    if args.index is not None and run_set.num_runs > 1:
        raise UserError("--index names one result; use it with --runs 1")
    system.write_description(loaded.config, args.systems.resolve())
    codes = []
    for number in range(run_set.num_runs):
        codes.append(launch.run_once(run_set, number, sys.argv[1:], args.index))
        if codes[-1] == EXIT_INTERRUPTED:
            break
    return next((code for code in codes if code), EXIT_OK)


def dry_run(loaded: Loaded) -> str:
    """Return the merged configuration, the origin of each key, the planned steps, evaluations and memory."""
    config, plan = loaded.config, loaded.config.plan()
    lines = ["# configuration"]
    lines += [f"{line}" for line in configs.to_yaml(config).splitlines()]
    lines.append("# where each key was written")
    lines += [f"#   {'.'.join(path)}: {where}" for path, where in sorted(loaded.origins.items()) if path]
    lines += [f"# changed by {change}" for change in loaded.changes]
    evaluations = plan.evaluation_steps
    lines += [
        "# plan",
        f"#   steps: {plan.num_steps:,} of {config.global_batch_size} samples; "
        f"{plan.steps_per_epoch:,} per epoch, {plan.warmup_steps:,} of warm-up",
        f"#   evaluations: {len(evaluations)}, after steps {', '.join(map(str, evaluations[:8]))}"
        + (" ..." if len(evaluations) > 8 else ""),
        f"#   memory: {memory(loaded)}",
    ]
    return "\n".join(lines)


def memory(loaded: Loaded) -> str:
    """Return what parameters, gradients and optimizer states take, counted on a model without storage."""
    import torch

    config = loaded.config
    benchmark = configs.benchmark_module(config.benchmark).Benchmark(config, seed=0)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in benchmark.build_model().parameters())
    gigabytes = parameters * BYTES_PER_PARAMETER[config.optimizer.name] / 1e9
    return (
        f"{gigabytes:.2f} GB for {parameters:,} parameters with gradients and optimizer state; "
        "activations come on top"
    ) + (f"; {benchmark.resident_bytes / 1e9:.0f} GB of decoded data" if benchmark.resident_bytes else "")
