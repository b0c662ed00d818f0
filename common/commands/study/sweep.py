"""Measure trade-off curves: train configurations on shares of their budget, quality against time and cost.

A budget scales the training and its whole schedule: warm-up, milestones, image sizes; 1 is the recipe as it
is. Runs go to the end of their budget, past the target, and lie in results/study/<study>/, which no score
reads. Before anything runs a table says what is there and how long the rest will take; a finished run is
never made again, and the same command goes on after an interruption.

With --trials each configuration gets as many quasi-random trials of learning rate, warm-up, weight decay and
length of the schedule, which stop at the target; the best of each is kept as a YAML file to run by its path.

At the end it prints, and keeps beside the logs as JSON and SVG: each configuration's curve with intervals
over the seeds, time at equal quality, quality at equal time, and where one curve crosses another.

examples:
  ttt sweep language_bert baseline optimized --size mini --budgets 0.25,0.5,0.75,1 --seeds 3
  ttt sweep image_classification baseline optimized --size mini --dry-run
  ttt sweep language_bert baseline optimized --size mini --price 0.35
  ttt sweep language_bert baseline baseline+ema optimized-fused_qkv --size mini
  ttt sweep language_bert baseline optimized --size mini --trials 8 --seeds 2 --study trials
"""

import argparse
import os
from pathlib import Path

from common.arguments import add_shared, positive, whole_number
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from common.files import save_with_picture
from common.repository import benchmark_module
from common.run import run_sets
from common.study import cells, sweep, trials

NO_RUNS = "of this machine, these cells and this size"
BUDGETS = "0.25,0.33,0.5,0.67,0.8,1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark")
    names = "the first is compared with; NAME+METHOD adds a method, NAME-METHOD leaves one out"
    add_shared(parser, "configurations", nargs="+", help=names)
    parser.add_argument("--budgets", help=f"shares of the training; default: {BUDGETS}")
    parser.add_argument("--price", type=positive, metavar="DOLLARS", help="price of an hour of this machine")
    about = "search hyperparameters of each configuration in place of budgets"
    parser.add_argument("--trials", type=whole_number(2, trials.MAX_TRIALS), metavar="K", help=about)
    finished = "run nothing: answer from the runs that are finished, whatever code made them"
    parser.add_argument("--answers", action="store_true", help=finished)
    cells.add_options(parser, study="sweep")
    run_sets.add_fail_fast(parser)


def main(args: argparse.Namespace) -> int:
    if args.trials and (args.budgets is not None or args.price is not None):
        raise UserError("--trials answers neither --budgets nor --price", hint="leave them out")
    return cells.print_report(args, make_sweep)


def make_sweep(args: argparse.Namespace) -> tuple[int, Path | None]:
    """Return the exit code, and the path of the answers where there are some."""
    sweep.check_configurations(args)
    if args.trials:
        cells_of_sweep = trials.trial_cells(args)
    else:
        budgets = sweep.parse_budgets(args.budgets or BUDGETS)
        cells_of_sweep = sweep.sweep_cells(args.benchmark, args.configurations, budgets)
    study = cells.from_arguments(args, cells_of_sweep)
    code = cells.run(study, args) if args.dry_run or not args.answers else EXIT_OK
    if args.dry_run or code == EXIT_INTERRUPTED:
        return code, None
    logs = cells.finished_cells(study)
    if args.answers and not any(logs.values()):
        what = f"{os.path.relpath(study.folder)} has no finished runs {NO_RUNS}"
        raise UserError(what, hint=cells.NO_ANSWERS)
    if args.trials:
        ranked = trials.rank_trials(study, logs)
        trials.show(ranked, study.title)
        paths = [*trials.save(study, ranked)]
    else:
        answers = sweep.compare_curves(study, logs, args.price)
        if answers is None:
            return code, None
        quality_name = benchmark_module(args.benchmark).Benchmark.names.quality
        sweep.show(answers, quality_name, study.title)
        picture = sweep.draw(answers, quality_name, study.title)
        paths = [*save_with_picture(study.report, answers, picture)]
    print(*cells.list_warnings(logs), *(f"-> {os.path.relpath(path)}" for path in paths), sep="\n")
    return code, paths[0]
