"""Write one HTML page with scores, plots, findings and what the configurations differ in.

The page needs nothing but itself: no script, no network. Published results stand beside it as reported, and
the ledgers of `ttt ablate` below the paths.

--plot writes one picture instead, an SVG for a page or a slide: quality against time, a line for each run.

examples:
  ttt report
  ttt report results/8xA100-baseline results/8xA100-optimized --out report
  ttt report results/reference-2cpu-mini-baseline results/reference-2cpu-mini-optimized --plot quality.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from common.arguments import add_paths, repository_path
from common.commands.check import judged
from common.errors import EXIT_OK
from common.evidence.audit import Audited, audit_paths
from common.evidence.compare.reported import load_reported
from common.evidence.ledger import Ledger, find_ledgers
from common.evidence.log import load
from common.evidence.records import printable
from common.evidence.report import Checked, check_folder, write_plot, write_report
from common.evidence.submission import official
from common.evidence.submission.official import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    told = "where index.html is written; default: report/ of the repository"
    parser.add_argument("--out", default=repository_path("report"), type=Path, metavar="FOLDER", help=told)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="write the plot of quality against time instead"
    )
    parser.add_argument(
        "--no-official", action="store_true", help="skip the official checkers (up to 1 s a log)"
    )


def main(args: argparse.Namespace) -> int:
    if args.plot:
        write_plot(args.plot, load(args.paths))
        print(f"wrote {printable(str(args.plot))}")
        return EXIT_OK
    check_folder(args.out)
    audited = audit_paths(args.paths)
    verdicts = [[] for _ in audited] if args.no_official else judged(audited)
    write(args.out, audited, verdicts, find_ledgers(args.paths))
    return EXIT_OK


def write(
    folder: Path,
    audited: list[Audited],
    verdicts: list[list[Verdict]],
    ledgers: Sequence[tuple[str, Ledger | str]] = (),
) -> None:
    """Write the page about audited sets and what the checkers say of them, and the ledgers of ablations."""
    checked = [
        Checked(run_set=entry.run_set, findings=entry.findings, official=official.summary(said))
        for entry, said in zip(audited, verdicts, strict=True)
    ]
    write_report(folder / "index.html", checked, load_reported(), ledgers)
    print(f"wrote {printable(str(folder / 'index.html'))}")
