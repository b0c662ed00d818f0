"""Check this machine before hours of training are spent on it: in under three minutes, on a laptop too.

It checks versions, GPUs (memory errors, slow-downs, Xid), disks, shared memory, open files and other
programs; with real processes, the devices against each other and the messages between their ranks; for each
benchmark, the prepared data, the kernels against their plain form, at size mini the loss of the first steps
against a stored band, and the time to the target. Each line says ok, warning or fault, and what to do.
`ttt run` makes the quick checks itself.

examples:
  ttt doctor --size mini
  ttt doctor --size mini --quick
  ttt doctor --benchmarks language_bert --json
"""

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict

from common.arguments import add_shared
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.records import counted
from common.machine import preflight, torch_build
from common.machine.line import FAULT, WARNING, Line
from common.repository import IS_INSTALLED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "--benchmarks", "--size")
    parser.add_argument("--quick", action="store_true", help="start no process, train nothing, read no data")
    add_shared(parser, "--json", "--set")
    bands = "only train the first steps with so many seeds, and store the bands of their losses (size mini)"
    parser.add_argument("--store-bands", type=int, metavar="SEEDS", help=bands)
    add_shared(parser, "--nproc", help="ranks that exchange messages; default: one per GPU, else 2")
    add_shared(parser, "--data", "--results")


def main(args: argparse.Namespace) -> int:
    """Check, or store bands; the exit code is 1 after a fault. Without torch only the cheap checks run."""
    started = time.monotonic()
    if args.store_bands is None and not torch_build.has_torch():
        return show(preflight.cheap_checks(args.size, args.results.resolve(), 0), args.json, started)
    from common.doctor import checks, first_steps

    configs = checks.load_configs(args.benchmarks, args.size, args.set)
    if args.store_bands is not None:
        if IS_INSTALLED:
            raise UserError("bands are part of the code", where="--store-bands", hint="store them in a clone")
        if args.store_bands < first_steps.FEWEST_SEEDS or args.size != "mini":
            raise UserError(f"--store-bands takes {first_steps.FEWEST_SEEDS} seeds or more, and --size mini")
        for benchmark, named in configs.items():
            print(f"-> {first_steps.store(benchmark, named, args.store_bands)}")
        return EXIT_OK
    options = {"size": args.size, "num_ranks": args.nproc, "is_quick": args.quick}
    return show(checks.check_machine(configs, args.results.resolve(), **options), args.json, started)


def show(checked: Iterable[Line], as_json: bool, started: float) -> int:
    """Print each line when it is known; `started` is on the monotonic clock, in seconds."""
    lines = []
    for line in checked:
        lines.append(asdict(line) | {"after_s": round(time.monotonic() - started, 1)})
        if not as_json:
            print(f"{line.state:8} {line}", flush=True)
    faults, warnings = (sum(line["state"] == state for line in lines) for state in (FAULT, WARNING))
    if as_json:
        print(json.dumps({"lines": lines, "faults": faults, "warnings": warnings}, indent=1))
    else:
        seconds = time.monotonic() - started
        found_faults = f"{counted(faults, 'fault')}, {counted(warnings, 'warning')}"
        print(f"{found_faults}, {len(lines)} lines in {seconds:.1f} s")
    return EXIT_FINDINGS if faults else EXIT_OK
