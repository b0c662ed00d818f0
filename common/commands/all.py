"""Prepare the data, time baseline and optimized of both benchmarks in turn, audit, score and report.

Runs alternate (baseline, optimized, baseline, ...), so that a slow spell of the machine affects both.
Results go to results/, the page to report/index.html; with --results or --systems elsewhere, the page goes to
report/ beside the system descriptions. No result is overwritten.

examples:
  ttt run --all --size mini
  ttt run --all --runs official --continue
  ttt run --all --size mini --data /raid/mlperf --results /lustre/runs/results
  ttt run --all --size mini --benchmarks language_bert --runs 1
  ttt run --all --size mini --set submission.hardware=my-laptop submission.org=Example
"""

import argparse
import os
import sys
import time
from pathlib import Path

from common.arguments import add_shared
from common.commands import data, score
from common.data.preparation import check_data
from common.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, UserError
from common.evidence.audit import audit_paths
from common.evidence.report import page_path, write_report
from common.evidence.submission import official
from common.machine import system
from common.run import launch, run_sets
from common.training import ranks
from common.training.load import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "--benchmarks")
    names = "configurations of each benchmark, see 'ttt list'"
    default = ["baseline", "optimized"]
    parser.add_argument("--configurations", nargs="+", default=default, metavar="NAME", help=names)
    add_shared(parser, "--size")
    add_shared(parser, "--runs", default="3")
    add_shared(parser, "--set", help="change a key of every configuration")
    add_shared(parser, "--nproc")
    run_sets.add_options(parser)
    add_shared(parser, "--data", "--results", "--systems")


def main(args: argparse.Namespace) -> int:
    """Take every step in turn; returns the first exit code that was not 0.

    Raises UserError before the first run where the page cannot be written.
    """
    if ranks.read_rank_info().world_size > 1:
        raise UserError("ttt run --all starts its ranks itself", hint="use --nproc, not torchrun or srun")
    beside = Path(os.path.relpath(args.systems.parent))
    page = page_path(beside / "report", "index.html", "choose another folder with --results or --systems")
    started = time.monotonic()
    sets = {}
    for benchmark in args.benchmarks:
        for name in args.configurations:
            loaded = load_config(benchmark, name, size=args.size, settings=args.set)
            loaded, num_ranks = launch.verify_recipe(loaded, args.nproc)
            sets[benchmark, name] = launch.plan_run_set(
                loaded, results=args.results.resolve(), runs=args.runs, seed=None, num_ranks=num_ranks
            )
    with run_sets.lock_folders([planned.directory for planned in sets.values()]):
        for key, planned in sets.items():
            sets[key] = run_sets.apply_options(planned, args)
            system.write_description(planned.loaded.config, args.systems, planned.system)
        by_folder = {planned.loaded.config.data_directory: planned.loaded for planned in sets.values()}
        for loaded in by_folder.values():
            data.prepare(loaded.config)
            check_data(loaded)
        codes = [run_sets.run_all(list(sets.values()), sys.argv[1:], fail_fast=args.fail_fast)]
    if codes[0] == EXIT_INTERRUPTED:
        return EXIT_INTERRUPTED
    folders = [Path(os.path.relpath(run_set.directory)) for run_set in sets.values()]
    folders = [folder for folder in folders if any(folder.glob("result_*.txt"))]
    if not folders:  # every run failed before its clock, and a line said why
        return codes[0]
    audited = official.judge_sets(audit_paths(folders, systems=args.systems))
    print(*(line for entry in audited for line in entry.lines()), sep="\n")
    codes.append(EXIT_OK if all(entry.passes for entry in audited) else EXIT_FINDINGS)
    codes.append(score.show(folders))
    write_report(page, audited)
    print(f"all done in {(time.monotonic() - started) / 60:.1f} minutes")
    return next((code for code in codes if code), EXIT_OK)
