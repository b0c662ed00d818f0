"""Decide whether a machine is as fast as expected: the doctor's checks, then the rates of training steps.

The steps are those of both benchmarks on all GPUs, on synthetic batches; a machine without a GPU needs
--size mini. The rate of each configuration is compared with `ttt bench` on this hardware, else with the
published runs on the same GPUs or the model of a GPU (labelled a prediction), or with the best rate of this
machine so far (.machine/) where that demands more. Without anything to compare with, the rate is only
kept. The line of each verdict says what was measured, what was expected, from where, and what to do; the
archive holds the verdicts as JSON, with the logs, the system description and the versions. Exit code 1: a
rate below --share of the expected one, a fault, something that could not be measured, or no rate that was
compared. Ctrl-C keeps what was measured.

examples:
  ttt accept
  ttt accept --minutes 20 --share 0.95 --out node17.tar.gz
  ttt accept --size mini --quick --benchmarks bert --json
"""

import argparse
import json
import os
import sys
from contextlib import redirect_stdout

from common.arguments import add_shared, repository_path
from common.commands import data
from common.errors import EXIT_INTERRUPTED, UserError
from common.machine import hardware, record
from common.processes import ignore_ending_signals

SHARE = 0.9
MINUTES = (0.5, 600)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "--benchmarks", "--size")
    limit = "minutes that the command may take in all"
    parser.add_argument("--minutes", type=float, default=10.0, help=limit)
    reason = "because a processor's clock varies by a fifth"
    share = "the least share of the expected rate that passes; default: "
    share += f"{SHARE}, or {record.SLOW} without a GPU, {reason}"
    parser.add_argument("--share", type=float, help=share)
    timed = "seconds of timed steps for each configuration"
    parser.add_argument("--seconds", type=float, default=10.0, help=timed)
    skipped = "skip the doctor's checks that start processes or train"
    parser.add_argument("--quick", action="store_true", help=skipped)
    add_shared(parser, "--out", help="a new .tar.gz; default: one in report/accept")
    add_shared(parser, "--json", "--nproc", "--data", "--results")


def main(args: argparse.Namespace) -> int:
    num_gpus = hardware.count_gpus()
    share = args.share if args.share is not None else SHARE if num_gpus else record.SLOW
    if not MINUTES[0] <= args.minutes <= MINUTES[1]:
        raise UserError(f"--minutes must be {MINUTES[0]:g} to {MINUTES[1]:g}")
    if not 0 < share <= 1:
        raise UserError("--share must be a fraction, such as 0.9")
    if not 0 < args.seconds < 60 * args.minutes:
        raise UserError("--seconds must be positive, and fewer than --minutes")
    if args.size == "full" and not num_gpus:
        raise UserError("no GPU was found, which size full is made for", hint="ttt accept --size mini")
    if 0 < num_gpus < (args.nproc or 1):
        raise UserError(f"--nproc {args.nproc}: each rank needs a GPU of its own, visible: {num_gpus}")
    from common.doctor import acceptance, devices

    os.environ.update(devices.ALONE)  # srun starts one of these for each node: it is no rank of a run
    folder = repository_path("report") / "accept"
    acceptance.check_place(args.out, folder)
    stream = sys.stderr if args.json else sys.stdout
    accepted = acceptance.Acceptance(
        benchmarks=args.benchmarks,
        size=args.size,
        num_asked=args.nproc,
        minutes=args.minutes,
        share=share,
        seconds=args.seconds,
        is_quick=args.quick,
        results=args.results,
        report=lambda line: print(line, file=stream, flush=True),
    )
    accepted.report(accepted.describe_plan())
    try:
        with redirect_stdout(stream):
            for config in accepted.list_configs_to_prepare():
                data.prepare(config)
        accepted.run()
    except KeyboardInterrupt:
        ignore_ending_signals()  # a second one must not cost the archive
    path = acceptance.write_archive(accepted, args.out, folder)
    if args.json:
        print(json.dumps(accepted.as_json()))
    for line in accepted.verdicts:
        accepted.report(f"{line.state:15} {line}")
    accepted.report(f"{accepted.outcome} -> {path}")
    return accepted.code if accepted.is_whole else EXIT_INTERRUPTED
