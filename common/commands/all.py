"""Prepare the data, time baseline and optimized of both benchmarks in turn, audit, score and report.

Runs alternate (baseline, optimized, baseline, ...), so that a slow spell of the machine meets both. Results
go to results/, the page to report/index.html; nothing that exists is overwritten.

examples:
  ttt all
  ttt all --runs official
  ttt all --benchmarks language_bert --runs 1
  ttt all --set submission.hardware=my-laptop --set submission.org=Example
"""

import argparse
import dataclasses
import sys
import time

from common import config as configs
from common.commands import check, data, report, score
from common.commands.run import add_force, add_nproc
from common.config import ROOT
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError, nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    known = configs.benchmarks()
    parser.add_argument("--benchmarks", nargs="+", default=known, metavar="NAME", help="which benchmarks")
    parser.add_argument("--configurations", nargs="+", default=["baseline", "optimized"], metavar="NAME")
    parser.add_argument(
        "--size", choices=configs.SIZES, default="mini", help="full needs prepared data and GPUs"
    )
    parser.add_argument(
        "--runs", default="3", metavar="N", help="runs of each, or official: 5 (resnet), 10 (bert)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of every configuration"
    )
    add_nproc(parser)
    add_force(parser)


def main(args: argparse.Namespace) -> int:
    """Do everything; the exit code is the first that was not 0."""
    from common import launch, ranks, system
    from common.doctor.preflight import preflight

    if ranks.place().world_size > 1:
        raise UserError("ttt all starts its ranks itself", hint="use --nproc, not torchrun or srun")
    for benchmark in args.benchmarks:
        if benchmark not in configs.benchmarks():
            raise UserError(f"unknown benchmark '{benchmark}'", hint=nearest(benchmark, configs.benchmarks()))
    started = time.monotonic()
    sets = {}
    for benchmark in args.benchmarks:
        for name in args.configurations:
            loaded = configs.load(benchmark, name, size=args.size, settings=args.set)
            run_set = launch.plan_run_set(
                loaded,
                results=ROOT / "results",
                runs=args.runs,
                seed=None,
                num_ranks=launch.choose_ranks(loaded.config, args.nproc),
            )
            found = preflight(loaded.config, run_set.directory, is_forced=args.force)
            sets[benchmark, name] = dataclasses.replace(run_set, preflight=found)
            system.write_description(loaded.config, ROOT / "systems")
        data.prepare(loaded.config)
        launch.check_data(loaded)
    codes = []
    for number in range(max(run_set.num_runs for run_set in sets.values())):
        for run_set in sets.values():
            if number < run_set.num_runs:
                codes.append(launch.run_once(run_set, number, sys.argv[1:]))
                if codes[-1] == EXIT_INTERRUPTED:
                    return EXIT_INTERRUPTED
    folders = [str((run_set.directory).relative_to(ROOT)) for run_set in sets.values()]
    codes.append(run_command(check, folders))
    codes.append(run_command(score, folders))
    codes.append(run_command(report, folders))
    print(f"all done in {(time.monotonic() - started) / 60:.1f} minutes")
    return next((code for code in codes if code), EXIT_OK)


def run_command(command: object, arguments: list[str]) -> int:
    """Run another command with these arguments."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    return int(command.main(parser.parse_args(arguments)))  # type: ignore[attr-defined]
