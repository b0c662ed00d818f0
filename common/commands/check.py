"""Audit result logs: MLCommons' checkers with their own verdicts, then our rules.

Takes result files, folders of them, whole submissions and archives (.tar.gz) of any MLPerf Training round
with resnet or bert. Each broken rule is a line `path:line: ID severity found: ...; rule: ... (section)`.
Warnings alone leave the exit code 0; an error, or a refusal by a checker that the rules ask for, makes it 1.

--ruleset names a round. The last round with resnet was 4.0.0, with bert 5.0.0. In a later round the official
package checker skips the benchmark, reads no log and prints SUCCESS; here that is an error (R701).

examples:
  ttt check
  ttt check results/8xA100-optimized/resnet --no-official
  ttt check submission.tar.gz --json
  ttt check --rules
"""

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from common.arguments import add_shared
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.audit import Finding, audit_paths
from common.evidence.paths import find_others, is_archive, label_by_archive
from common.evidence.records import printable
from common.evidence.rules import RULES
from common.evidence.rules.rounds import ROUNDS
from common.evidence.sealed.replies import load_roots
from common.evidence.submission import official
from common.evidence.submission.archive import unpack_archive

RULE_FACTS = ("id", "severity", "message", "section")
OURS = "; ".join(f"{name} {', '.join(rulesets)}" for name, rulesets in official.RULESETS.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    paths = "result files, folders or archives; default: all below --results"
    add_shared(parser, "paths", help=paths)
    add_shared(parser, "--results", "--systems", "--json")
    parser.add_argument("--all", action="store_true", help="print every finding, not one of each rule")
    parser.add_argument("--no-official", action="store_true", help="skip the checkers (up to 1 s a log)")
    rounds = f"of the checkers: {', '.join(ROUNDS)}; default: by benchmark and date, for our own logs {OURS}"
    parser.add_argument("--ruleset", choices=ROUNDS, metavar="ROUND", help=rounds)
    root = "verify that an authority under these certificates signed the time-stamps (anchors.jsonl)"
    parser.add_argument("--anchor-root", type=Path, metavar="PEM", help=root)
    parser.add_argument("--rules", action="store_true", help="list our rules and exit")


def main(args: argparse.Namespace) -> int:
    if args.rules:
        print_rules(as_json=args.json)
        return EXIT_OK
    roots = load_roots(args.anchor_root) if args.anchor_root else ()
    with ExitStack() as stack:
        paths, refused = [], []
        for path in args.paths:
            if is_archive(path):
                folder, reasons = stack.enter_context(unpack_archive(path))
                stack.enter_context(label_by_archive(folder, path))
                refused += [archive_finding(path, reason) for reason in reasons]
                path = folder
            paths.append(path)
        try:
            audited = audit_paths(paths, ruleset=args.ruleset or "", systems=args.systems, roots=roots)
            others = find_others(paths)
        except UserError:
            print(*refused, sep="\n", file=sys.stderr, end="\n" if refused else "")
            raise
        if not args.no_official:
            audited = official.judge_sets(audited, args.ruleset)
    is_ok = not refused and all(entry.passes for entry in audited)
    if args.json:
        archives, sets = [asdict(finding) for finding in refused], [entry.as_json() for entry in audited]
        print(json.dumps({"ok": is_ok, "archives": archives, "others": others, "sets": sets}, indent=2))
    else:
        lines = [str(finding) for finding in refused]
        lines += [f"{folder}: not audited; the rules know resnet and bert" for folder in others]
        lines += [line for entry in audited for line in entry.lines(shows_all=args.all)]
        print(*lines, sep="\n")
    return EXIT_OK if is_ok else EXIT_FINDINGS


def print_rules(*, as_json: bool) -> None:
    rules = sorted(RULES, key=lambda rule: rule.id)
    if as_json:
        facts = [{name: getattr(rule, name) for name in RULE_FACTS} for rule in rules]
        print(json.dumps({"rules": facts}, indent=2))
    else:
        print(*(f"{r.id} {r.severity:8} {r.message} ({r.section})" for r in rules), sep="\n")


def archive_finding(path: Path, text: str) -> Finding:
    return Finding(
        path=printable(str(path)),
        line=0,
        rule="A001",
        severity="error",
        message=f"found: {text}; rule: An archive holds regular files, each once, and none outside it",
        section="PEP 706",
    )
