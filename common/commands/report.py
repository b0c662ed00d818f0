"""Write one HTML page with scores, plots, findings and what the configurations differ in.

The page needs nothing but itself: no script, no network. Published results stand beside it as reported.

examples:
  ttt report
  ttt report results/8xA100-baseline results/8xA100-optimized --out report
"""

import argparse
import os
from pathlib import Path

from common.errors import EXIT_OK
from common.evidence import official
from common.evidence.audit import audit_paths
from common.evidence.records import printable
from common.evidence.report import Checked, write_report
from common.evidence.reported import reported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", default=["results"], help="result files or folders"
    )
    parser.add_argument("--out", default="report", metavar="FOLDER", help="where index.html is written")
    parser.add_argument(
        "--no-official", action="store_true", help="skip the official checker (up to 1 s a log)"
    )


def main(args: argparse.Namespace) -> int:
    checked = [
        Checked(
            run_set=entry.run_set,
            findings=entry.findings,
            official="not run" if args.no_official else official.summary(official.judge(entry.run_set)),
        )
        for entry in audit_paths([Path(path) for path in args.paths])
    ]
    page = Path(args.out, "index.html")
    write_report(page, checked, reported())
    print(f"wrote {printable(os.path.relpath(page))}")
    return EXIT_OK
