"""Audit result logs: MLCommons' checkers with their own verdicts, then our rules.

Takes result files, folders of them, whole submissions and archives (.tar.gz) of any MLPerf Training round
with resnet or bert. A line for each broken rule: path:line: ID severity message (rule section). Warnings
alone leave the exit code 0; an error, or a refusal by a checker that the rules ask for, makes it 1.

examples:
  ttt check
  ttt check results/8xA100-optimized/resnet --no-official
  ttt check submission.tar.gz --json
  ttt check --rules
"""

import argparse
import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path

from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence import official
from common.evidence.archive import is_archive, unpacked
from common.evidence.audit import Audited, Finding, audit_paths, named_once, num_errors
from common.evidence.log import find_others, shown_as
from common.evidence.official import Verdict
from common.evidence.records import printable
from common.evidence.rules import RULES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        type=Path,
        default=[Path("results")],
        help="result files, folders or archives",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every finding")
    parser.add_argument("--all", action="store_true", help="print every finding, not one of each rule")
    parser.add_argument("--no-official", action="store_true", help="skip the checkers (up to 1 s a log)")
    parser.add_argument(
        "--ruleset",
        choices=official.ROUNDS,
        help="of the checkers; default: by benchmark and date, 2.1.0 (resnet: and 2.0.0) for our own logs",
    )
    parser.add_argument("--rules", action="store_true", help="list our rules and exit")


def main(args: argparse.Namespace) -> int:
    if args.rules:
        for about in sorted(RULES, key=lambda about: about.id):
            print(f"{about.id} {about.severity:8} {about.message} ({about.section})")
        return EXIT_OK
    with ExitStack() as stack:
        paths, refused = [], []
        for path in map(Path, args.paths):
            if is_archive(path):
                folder, problems = stack.enter_context(unpacked(path))
                stack.enter_context(shown_as(folder, path))
                refused += [archive_finding(path, problem.text) for problem in problems]
                path = folder
            paths.append(path)
        audited, others = audit_paths(paths), find_others(paths)
        verdicts = [] if args.no_official else judged(audited, args.ruleset)
    return report(args, refused, others, audited, verdicts)


def archive_finding(path: Path, text: str) -> Finding:
    return Finding(
        path=printable(str(path)),
        line=0,
        rule="A001",
        severity="error",
        message=f"An archive holds regular files, each once, and none outside it: {text}",
        section="PEP 706",
    )


def judged(audited: list[Audited], ruleset: str | None) -> list[list[Verdict]]:
    """Return the checkers' verdicts on each run set; those on a whole submission stand with its first."""
    verdicts = [
        official.judge(entry.run_set, ruleset) + official.judge_seeds(entry.run_set, ruleset)
        for entry in audited
    ]
    verdicts[0] += official.judge_package([entry.run_set for entry in audited], ruleset)
    return verdicts


def report(
    args: argparse.Namespace,
    refused: list[Finding],
    others: list[str],
    audited: list[Audited],
    verdicts: list[list[Verdict]],
) -> int:
    """Print findings and verdicts; the exit code says whether there is an error or a refusal."""
    pairs = list(zip(audited, verdicts or [[]] * len(audited), strict=True))
    errors = len(refused) + sum(num_errors(entry.findings) for entry in audited)
    failed = errors > 0 or any(verdict.refuses for said in verdicts for verdict in said)
    if args.json:
        sets = [as_json(entry, said) for entry, said in pairs]
        archives = [dataclasses.asdict(finding) for finding in refused]
        print(json.dumps({"ok": not failed, "archives": archives, "others": others, "sets": sets}, indent=2))
        return EXIT_FINDINGS if failed else EXIT_OK
    lines = [str(finding) for finding in refused]
    lines += [f"{folder}: not audited; the rules know resnet and bert" for folder in others]
    for entry, said in pairs:
        lines += map(str, entry.findings if args.all else named_once(entry.findings))
        lines += [str(verdict) for verdict in said if verdict.refuses or verdict.verdict == "FAILED"]
        lines.append(summary(entry, said))
    print(*lines, sep="\n")
    return EXIT_FINDINGS if failed else EXIT_OK


def summary(entry: Audited, said: list[Verdict]) -> str:
    errors, kind = num_errors(entry.findings), " (mini: a proxy)" if entry.run_set.is_proxy else ""
    return (
        f"{entry.run_set.folder}: {len(entry.run_set.logs)} logs{kind}; "
        f"rules: {errors} errors, {len(entry.findings) - errors} warnings; "
        f"official checkers: {official.summary(said)}"
    )


def as_json(entry: Audited, said: list[Verdict]) -> dict[str, object]:
    return {
        "folder": entry.run_set.folder,
        "num_logs": len(entry.run_set.logs),
        "is_proxy": entry.run_set.is_proxy,
        "findings": [dataclasses.asdict(finding) for finding in entry.findings],
        "official": [dataclasses.asdict(verdict) for verdict in said],
    }
