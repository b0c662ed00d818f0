"""Describe this machine in MLPerf's 33 fields, or check descriptions that exist.

It collects processors, memory, disks, GPUs and their links, software, and the number of nodes that torchrun
or srun states; no host name, user, address or environment. Every other field says 'not collected: <why>'
until a person states it: --merge lays the fields of a YAML (or JSON) file over the collected ones, and the
last file wins. The name of the written file is the system's; `ttt run` looks for
<hardware>[-mini]-<configuration>.json and keeps it.

--missing prints the fields that are still open, here or in files, as lines of a facts.yaml to fill in, and
exits with 1 if there are any. --check prints one line for each field that is missing, empty, of a wrong type
or a placeholder, how many are open, and the verdicts of the official checker for the rulesets of the
published runs (2.0.0, 2.1.0) and the last that had the benchmarks (4.0.0, 5.0.0).

examples:
  ttt doctor --describe
  ttt doctor --describe --missing > facts.yaml
  ttt doctor --describe --merge facts.yaml --out systems/my-machine-optimized.json
  ttt doctor --describe --check systems/8xA100-SXM4-80GB.json

facts.yaml:
  cooling: air
"""

import argparse
from pathlib import Path

from common.arguments import add_shared
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.audit import summary
from common.evidence.records import counted, printable
from common.evidence.submission import official
from common.evidence.system import (
    FIELDS,
    file_problems,
    missing_lines,
    open_fields,
    problems,
    read,
    read_facts,
    read_fields,
)
from common.files import explain_os_error, undo_on_failure
from common.machine import system
from common.repository import NAME

RULESETS = sorted({ruleset for rulesets in official.RULESETS.values() for ruleset in rulesets})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    fields = "fields that you state, YAML or JSON"
    parser.add_argument("--merge", action="append", type=Path, default=[], metavar="FACTS", help=fields)
    add_shared(parser, "--out", help="write a new NAME.json; default: print it")
    judged = parser.add_mutually_exclusive_group()
    judged.add_argument("--check", nargs="+", type=Path, metavar="FILE", help="only check these descriptions")
    text = "only list the open fields of these descriptions; without FILE, those of this machine"
    judged.add_argument("--missing", nargs="*", type=Path, metavar="FILE", help=text)


def main(args: argparse.Namespace) -> int:
    files = args.check or args.missing
    if (files and args.merge) or (args.out is not None and (files or args.missing is not None)):
        raise UserError("--check and --missing write nothing", hint="leave out --merge and --out")
    if args.check is not None:
        return max([check(path) for path in args.check])
    if args.missing:
        return max([list_open(read_fields(path), path) for path in args.missing])
    return describe(args)


def describe(args: argparse.Namespace) -> int:
    """Collect and merge the fields of this machine; print, list or write them."""
    if args.out is not None and (args.out.suffix != ".json" or not NAME.fullmatch(args.out.stem)):
        raise UserError(f"expected a file NAME.json, with NAME as {NAME.pattern}", where=f"--out {args.out}")
    description: dict[str, object] = {**system.collect_description(system.hardware_name())}
    for path in args.merge:
        description |= read_facts(path)
    if args.out is not None:
        description["system_name"] = args.out.stem
    for problem in problems(description):  # only a person's facts can be wrong
        raise UserError(problem, where=", ".join(map(str, args.merge)))
    if args.missing is not None:
        return list_open(description)
    if args.out is None:
        print(system.as_json(description), end="")
        return EXIT_OK
    with explain_os_error("cannot write here", args.out):
        try:
            stream = args.out.open("x")
        except FileExistsError:
            raise UserError("exists; descriptions are never overwritten", where=str(args.out)) from None
        with undo_on_failure(args.out.unlink), stream:
            stream.write(system.as_json(description))
    print(f"wrote {printable(str(args.out))}")
    return check(args.out)


def list_open(description: object, path: Path | None = None) -> int:
    """Print the open fields of this machine, or of a file, and where a person states them."""
    lines = missing_lines(description)
    where = path or "facts.yaml, then: ttt doctor --describe --merge facts.yaml --out systems/NAME.json"
    then = f"; state them in {printable(str(where))}" if lines else ""
    print(*lines, f"# {len(lines)} of {len(FIELDS)} fields are open{then}", sep="\n")
    return EXIT_FINDINGS if lines else EXIT_OK


def check(path: Path) -> int:
    """Print what is wrong with a description, how many fields are open, and the official verdicts."""
    label = printable(str(path))
    faults = [f"{label}: {problem}" for problem in file_problems(path)]
    try:
        open_ones = open_fields(read(path))
    except ValueError:
        open_ones, verdicts = {}, []  # the official checker would crash on it
    else:
        verdicts = [official.judge_description(path, ruleset) for ruleset in RULESETS]
    refused = [verdict for verdict in verdicts if verdict.refuses]
    many = f"{counted(len(open_ones), 'open field')} (ttt doctor --describe --missing {label})"
    texts = [counted(len(faults), "problem")] * (bool(faults) or not open_ones) + [many] * bool(open_ones)
    print(*faults, *refused, f"{label}: {', '.join(texts)}; official checkers: {summary(verdicts)}", sep="\n")
    return EXIT_FINDINGS if faults or refused else EXIT_OK
