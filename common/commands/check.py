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
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from common.arguments import add_paths
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.audit import Audited, Finding, audit_paths, named_once, num_errors
from common.evidence.log import find_others, shown_as
from common.evidence.records import printable
from common.evidence.rules import RULES
from common.evidence.submission import official
from common.evidence.submission.archive import is_archive, unpacked
from common.evidence.submission.official import Verdict

RULE_FACTS = ("id", "severity", "message", "section")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser, help="result files, folders or archives")
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
        rules = sorted(RULES, key=lambda about: about.id)
        if args.json:
            facts = [{name: getattr(about, name) for name in RULE_FACTS} for about in rules]
            print(json.dumps({"rules": facts}, indent=2))
        else:
            print(*(f"{a.id} {a.severity:8} {a.message} ({a.section})" for a in rules), sep="\n")
        return EXIT_OK
    with ExitStack() as stack:
        paths, refused = [], []
        for path in args.paths:
            if is_archive(path):
                folder, problems = stack.enter_context(unpacked(path))
                stack.enter_context(shown_as(folder, path))
                refused += [archive_finding(path, problem.text) for problem in problems]
                path = folder
            paths.append(path)
        try:
            audited, others = audit_paths(paths), find_others(paths)
        except UserError:
            print(*refused, sep="\n", file=sys.stderr, end="\n" if refused else "")
            raise
        verdicts = [[] for _ in audited] if args.no_official else judged(audited, args.ruleset)
    if args.json:
        print(json.dumps(as_json(refused, others, audited, verdicts), indent=2))
    else:
        print(*lines(refused, others, audited, verdicts, shows_all=args.all), sep="\n")
    return exit_code(refused, audited, verdicts)


def archive_finding(path: Path, text: str) -> Finding:
    return Finding(
        path=printable(str(path)),
        line=0,
        rule="A001",
        severity="error",
        message=f"An archive holds regular files, each once, and none outside it: {text}",
        section="PEP 706",
    )


def judged(audited: list[Audited], ruleset: str | None = None) -> list[list[Verdict]]:
    """Return the checkers' verdicts on each run set; those on a whole submission stand with its first."""
    verdicts = [
        official.judge(entry.run_set, ruleset) + official.judge_seeds(entry.run_set, ruleset)
        for entry in audited
    ]
    verdicts[0] += official.judge_package([entry.run_set for entry in audited], ruleset)
    return verdicts


def exit_code(refused: list[Finding], audited: list[Audited], verdicts: list[list[Verdict]]) -> int:
    """Return whether there is an error or a refusal."""
    errors = len(refused) + sum(num_errors(entry.findings) for entry in audited)
    is_refused = any(verdict.refuses for said in verdicts for verdict in said)
    return EXIT_FINDINGS if errors or is_refused else EXIT_OK


def lines(
    refused: list[Finding],
    others: list[str],
    audited: list[Audited],
    verdicts: list[list[Verdict]],
    *,
    shows_all: bool = False,
) -> Iterator[str]:
    """Yield findings, refusals and a summary of each set; one line for each broken rule, or all of them."""
    yield from map(str, refused)
    yield from (f"{folder}: not audited; the rules know resnet and bert" for folder in others)
    for entry, said in zip(audited, verdicts, strict=True):
        yield from map(str, entry.findings) if shows_all else named_once(entry.findings)
        yield from (str(verdict) for verdict in said if verdict.refuses or verdict.verdict == "FAILED")
        yield summary(entry, said)


def summary(entry: Audited, said: list[Verdict]) -> str:
    errors, kind = num_errors(entry.findings), " (mini: a proxy)" if entry.run_set.is_proxy else ""
    return (
        f"{entry.run_set.folder}: {len(entry.run_set.logs)} logs{kind}; "
        f"rules: {errors} errors, {len(entry.findings) - errors} warnings; "
        f"official checkers: {official.summary(said)}"
    )


def as_json(
    refused: list[Finding], others: list[str], audited: list[Audited], verdicts: list[list[Verdict]]
) -> dict[str, object]:
    """Return everything for JSON."""
    return {
        "ok": exit_code(refused, audited, verdicts) == EXIT_OK,
        "archives": [dataclasses.asdict(finding) for finding in refused],
        "others": others,
        "sets": [set_json(entry, said) for entry, said in zip(audited, verdicts, strict=True)],
    }


def set_json(entry: Audited, said: list[Verdict]) -> dict[str, object]:
    return {
        "folder": entry.run_set.folder,
        "num_logs": len(entry.run_set.logs),
        "is_proxy": entry.run_set.is_proxy,
        "findings": [dataclasses.asdict(finding) for finding in entry.findings],
        "official": [dataclasses.asdict(verdict) for verdict in said],
    }
