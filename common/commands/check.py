"""Audit result logs: our rules, and the official compliance checker with its own verdict.

One line a finding: path:line: ID severity message (rule section). Warnings alone leave the exit code 0.

examples:
  ttt check
  ttt check results/8xA100-optimized/resnet --no-official
  ttt check result_0.txt --json
"""

import argparse
import dataclasses
import json
from pathlib import Path

from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence import official
from common.evidence.audit import audit, num_errors
from common.evidence.log import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        type=Path,
        default=[Path("results")],
        help="result files or folders",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--no-official", action="store_true", help="skip the official checker (up to 1 s a log)"
    )


def main(args: argparse.Namespace) -> int:
    entries, failed = [], False
    for run_set in load([Path(path) for path in args.paths]):
        findings = audit(run_set)
        verdicts = [] if args.no_official else official.judge(run_set)
        refused = [verdict for verdict in verdicts if verdict.verdict != "SUCCESS"]
        errors = num_errors(findings)
        failed = failed or errors > 0 or bool(refused)
        summary = (
            f"{run_set.folder}: {len(run_set.logs)} logs{' (mini: a proxy)' if run_set.is_proxy else ''}; "
            f"rules: {errors} errors, {len(findings) - errors} warnings; "
            f"official checker: {official.summary(verdicts)}"
        )
        entries.append(
            {
                "folder": run_set.folder,
                "num_logs": len(run_set.logs),
                "is_proxy": run_set.is_proxy,
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "official": [dataclasses.asdict(verdict) for verdict in verdicts],
            }
        )
        if not args.json:
            print(*findings, *refused, summary, sep="\n")
    if args.json:
        print(json.dumps({"ok": not failed, "sets": entries}, indent=2))
    return EXIT_FINDINGS if failed else EXIT_OK
