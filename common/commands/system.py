"""Describe this machine in MLPerf's 33 fields, or check descriptions that exist.

What a program can ask for is collected: processors, memory, disks, GPUs and how they are connected, software;
no host name, user, address or environment. The rest says 'not collected: <why>' until a person states it:
--merge lays the fields of a YAML (or JSON) file over what was found, and the last file wins. The name of the
written file is the system's; `ttt run` looks for <hardware>[-mini]-<configuration>.json and keeps it.

--check prints one line for each field that is missing, empty, of a wrong type or a placeholder, and the
verdicts of the official checker for rulesets 2.0.0 and 2.1.0.

examples:
  ttt doctor --describe
  ttt doctor --describe --merge facts.yaml --out systems/my-machine-optimized.json
  ttt doctor --describe --merge systems/8xA100-SXM4-80GB.json --merge facts.yaml
  ttt doctor --describe --check systems/8xA100-SXM4-80GB.json

facts.yaml:
  submitter: Example
  cooling: air
  host_memory_configuration: 16 x 64 GB DDR4-3200
"""

import argparse
from pathlib import Path
from typing import Any

from common import yaml_file
from common.arguments import add_out
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError, nearest
from common.evidence.records import printable
from common.evidence.submission import official
from common.evidence.submission.verdict import summary
from common.evidence.system import ALSO_KNOWN, FIELDS, NOT_COLLECTED, file_problems, problems, read
from common.files import explain_os_error
from common.machine import system
from common.repository import NAME

RULESETS = sorted({ruleset for rulesets in official.RULESETS.values() for ruleset in rulesets})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    fields = "fields that you state, YAML or JSON"
    parser.add_argument("--merge", action="append", type=Path, default=[], metavar="FACTS", help=fields)
    add_out(parser, "write a new NAME.json; default: print it")
    parser.add_argument("--check", nargs="+", type=Path, metavar="FILE", help="only check these descriptions")


def main(args: argparse.Namespace) -> int:
    """Print, write or judge."""
    if args.check is not None:
        if args.merge or args.out is not None:
            raise UserError("--check judges files as they are", hint="leave out --merge and --out")
        return max([check(path) for path in args.check])
    if args.out is not None and (args.out.suffix != ".json" or not NAME.fullmatch(args.out.stem)):
        raise UserError(f"expected a file NAME.json, with NAME as {NAME.pattern}", where=f"--out {args.out}")
    facts: dict[str, Any] = {}
    for path in args.merge:
        facts |= read_facts(path)
    description = system.collect_description(system.hardware_name()) | facts
    if args.out is not None:
        description["system_name"] = args.out.stem
    for problem in problems(description):  # only a person's facts can be wrong
        raise UserError(problem, where=", ".join(map(str, args.merge)))
    if args.out is None:
        print(system.as_json(description), end="")
        return EXIT_OK
    with explain_os_error("cannot write here", args.out):
        try:
            with args.out.open("x") as stream:
                stream.write(system.as_json(description))
        except FileExistsError:
            what = "this file exists; descriptions are never overwritten"
            raise UserError(what, where=str(args.out)) from None
    print(f"wrote {printable(str(args.out))}")
    return check(args.out)


def read_facts(path: Path) -> dict[str, Any]:
    """Read a person's fields, from YAML or JSON. Raises UserError with file:line for an unknown one."""
    if path.suffix == ".json":
        try:
            values = read(path)
        except ValueError as error:
            raise UserError(printable(str(error)), where=str(path)) from error
        if not isinstance(values, dict):
            raise UserError("not a JSON object of fields", where=str(path))
        document = yaml_file.Document(values, {})
    else:
        document = yaml_file.read(path, str(path))
    for field in document.values:
        if field not in FIELDS and field not in ALSO_KNOWN:
            where = document.origins.get((field,), str(path))
            raise UserError(f"unknown field '{field}'", where=where, hint=nearest(field, FIELDS))
    return {
        field: str(value) if type(value) in (int, float) else value  # a person writes `cores: 64`
        for field, value in document.values.items()
        if not str(value).startswith(NOT_COLLECTED)
    }


def check(path: Path) -> int:
    """Print what is wrong with a description, and the official verdicts."""
    label = printable(str(path))
    problems = [f"{label}: {problem}" for problem in file_problems(path)]
    try:
        read(path)
    except ValueError:
        verdicts = []  # the official checker would crash on it
    else:
        verdicts = [official.judge_description(path, ruleset) for ruleset in RULESETS]
    refused = [verdict for verdict in verdicts if verdict.refuses]
    counts = f"{label}: {len(problems)} problems; official checkers: {summary(verdicts)}"
    print(*problems, *refused, counts, sep="\n")
    return EXIT_FINDINGS if problems or refused else EXIT_OK
