"""Compare two configurations pair by pair, until the question is decided.

A run of each in turn, with the same seed, compares seconds and samples to the target and the quality at the
end; with --steps new processes of both time training steps in turns, which needs no data and no training to
the target. After each pair a test whose error rate holds at every stop says of each measure: B is better,
worse, equivalent within the margin, or how many more pairs would decide. It ends when all is decided, when
--max-runs pairs cannot decide it, or when you interrupt it: what is there is reported, and the same command
goes on. JSON and plot lie in results/study/compare-A-B/.

A and B are configurations with changes, such as baseline, baseline+ema or optimized-fused_qkv, or YAML files.

examples:
  ttt compare language_bert baseline optimized --size mini --steps
  ttt compare image_classification baseline baseline+ema --size mini --measures quality
  ttt compare language_bert optimized optimized-fused_qkv --size mini --max-runs 8 --margin 0.1
  ttt compare language_bert baseline optimized --size mini --dry-run
"""

import argparse

from common.arguments import add_shared, share
from common.errors import UserError
from common.study import cells
from common.study.compare import compare
from common.study.compare.comparison import OF_RUNS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark")
    parser.add_argument("a", metavar="A", help="the configuration that B is compared with")
    parser.add_argument("b", metavar="B", help="the configuration that is judged")
    parser.add_argument("--steps", action="store_true", help="compare throughput only, by pairs of steps")
    known, decided = list(OF_RUNS), f"what the runs decide, some of: {', '.join(OF_RUNS)}; default: all"
    parser.add_argument("--measures", nargs="+", choices=known, metavar="M", help=decided)
    equal = "ratios that differ from 1 by less count as equal"
    parser.add_argument("--margin", type=share, default=0.05, metavar="X", help=equal)
    equal = "qualities that differ by less count as equal"
    parser.add_argument("--quality-margin", type=share, default=0.005, metavar="X", help=equal)
    cells.add_options(
        parser, study="", runs="--max-runs", num_runs=20, of_runs="at most so many pairs of runs or of steps"
    )


def main(args: argparse.Namespace) -> int:
    unused = "--measures" if args.measures else "--nproc" if (args.nproc or 1) > 1 else ""
    if args.steps and unused:
        what = "--steps compares throughput alone, on one device"
        raise UserError(what, where=unused, hint="leave one of them out")
    args.measures = args.measures or list(OF_RUNS)
    return cells.print_report(args, compare.compare)
