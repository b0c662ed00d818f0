"""Write one HTML page with scores, plots, findings and the differences of the configurations.

The page needs nothing but itself: no script, no network. It also shows the published results, as reported,
and the ledgers of `ttt ablate` that lie below the paths.

--plot writes one picture instead, an SVG for a page or a slide: quality against time, a line for each run.

examples:
  ttt report
  ttt report results/8xA100-baseline results/8xA100-optimized --out report
  ttt report results/reference-2cpu-mini-baseline results/reference-2cpu-mini-optimized --plot quality.svg
"""

import argparse

from common.arguments import add_shared, repository_path, svg_file
from common.errors import EXIT_OK
from common.evidence.audit import audit_paths
from common.evidence.ledger import find_ledgers
from common.evidence.log import load
from common.evidence.report import page_path, write_plot, write_report
from common.evidence.submission import official


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "paths", "--results", "--systems")
    written = parser.add_mutually_exclusive_group()
    page = "the page, NAME.html, or a folder for index.html; default: report/ of the repository"
    add_shared(written, "--out", help=page, default=repository_path("report"), metavar="PATH")
    plot = "write the plot of quality against time instead"
    written.add_argument("--plot", type=svg_file, metavar="FILE.svg", help=plot)
    skipped = "skip the official checkers (up to 1 s a log)"
    parser.add_argument("--no-official", action="store_true", help=skipped)


def main(args: argparse.Namespace) -> int:
    if args.plot:
        write_plot(args.plot, load(args.paths))
        return EXIT_OK
    page = page_path(args.out, "index.html")
    audited = audit_paths(args.paths, systems=args.systems)
    if not args.no_official:
        audited = official.judge_sets(audited)
    write_report(page, audited, find_ledgers(args.paths))
    return EXIT_OK
