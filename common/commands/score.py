"""Minutes to target by MLPerf's rule: the mean of the runs without the fastest and the slowest.

Each score comes with a 95 % interval, its two factors (samples to target, samples per second of training),
its speed-up over the baseline of the same hardware, processor, benchmark, size and target, and the smallest
difference that so many runs could show. If there are more runs than needed, the window with the median score
counts. Published scores follow. Where MLCommons' scaling.json lies beside the results, the label also has the
score times the factor in it; for a closed set without that file `ttt reproduce` computes the factor.

A second table says where the mean run's minutes went, from log lines alone:
minutes = samples / (60 x samples/s) + evaluation + start-up + overshoot.

In a narrow terminal the table has only minutes and speed-up with their intervals; --wide prints every column.

examples:
  ttt score
  ttt score --wide
  ttt score results/8xA100-baseline results/8xA100-optimized
  ttt score --json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from common.arguments import add_shared
from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence.compare.reported import reported
from common.evidence.log import load
from common.evidence.score import score, score_json, speedups
from common.evidence.text import SPEEDUP, notes, print_scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "paths", "--results")
    resumed = "count runs that went on from a checkpoint, in place of their interrupted logs"
    parser.add_argument("--include-resumed", action="store_true", help=resumed)
    disturbed = "leave out the runs that other programs or slow steps disturbed; MLPerf's rule counts them"
    parser.add_argument("--leave-out-disturbed", action="store_true", help=disturbed)
    parser.add_argument("--wide", action="store_true", help="print every column, also where they do not fit")
    add_shared(parser, "--json")


def main(args: argparse.Namespace) -> int:
    options = {"include_resumed": args.include_resumed, "include_disturbed": not args.leave_out_disturbed}
    return show(args.paths, as_json=args.json, is_wide=args.wide, **options)


def show(paths: Sequence[Path], *, as_json: bool = False, is_wide: bool = False, **options: bool) -> int:
    """Print the scores of the sets below the paths, counted by the `options` of `score`.

    The exit code is 1 if no set has a score.
    """
    measured = [score(run_set, **options) for run_set in load(paths, is_brief=True)]
    published = reported()
    faster = speedups(measured) | speedups(published)
    lines = [*notes(measured + published), SPEEDUP]
    if as_json:
        rows = [score_json(entry, faster.get(entry.source)) for entry in measured + published]
        print(json.dumps({"scores": rows, "notes": lines}, indent=2, allow_nan=False))
    else:
        print_scores(measured + published, faster, lines, is_wide=is_wide)
    return EXIT_OK if any(entry.minutes for entry in measured) else EXIT_FINDINGS
