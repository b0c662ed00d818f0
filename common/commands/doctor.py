"""Check this machine before hours of training are spent on it: in under three minutes, on a laptop too.

Versions, GPUs (memory errors, slow-downs, Xid), disks, shared memory, open files, other programs; then, with
real processes, the devices against each other and the messages between their ranks; then, for each benchmark,
its prepared data, its kernels against their plain form, the loss of the first steps against a stored band,
and the time to the target. Each line says ok, warning or fault, and what to do. `ttt run` makes the quick
checks itself.

examples:
  ttt doctor
  ttt doctor --quick
  ttt doctor --benchmarks language_bert --size full --json
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from common.arguments import add_benchmarks, add_nproc, add_results
from common.config.schema import RunConfig
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.machine.line import FAULT, WARNING, Line, fault, warning
from common.repository import ROOT, SIZES, benchmark_module
from common.training.load import load_config

PROCESSES_ON_CPU = 2  # enough to see messages pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_benchmarks(parser)
    parser.add_argument("--size", choices=SIZES, default="mini", help="of the runs to come")
    parser.add_argument("--quick", action="store_true", help="only what takes no processes and no training")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, such as data.directory"
    )
    parser.add_argument(
        "--store-bands",
        type=int,
        metavar="SEEDS",
        help="only measure the first steps with so many seeds, and keep the bands in first_steps.yaml",
    )
    add_nproc(parser)
    add_results(parser)


def main(args: argparse.Namespace) -> int:
    """Print each line when it is known; the exit code is 1 after a fault."""
    started = time.monotonic()
    from common.doctor import first_steps

    loaded = {benchmark: load(args, benchmark) for benchmark in args.benchmarks}
    if args.store_bands is not None:
        if args.store_bands < first_steps.FEWEST_SEEDS or args.size != "mini":
            raise UserError(f"--store-bands takes {first_steps.FEWEST_SEEDS} seeds or more, and --size mini")
        for benchmark, named in loaded.items():
            print(f"-> {first_steps.store(benchmark, named, args.store_bands)}")
        return EXIT_OK
    found = []
    for line in lines(args, loaded):
        found.append(asdict(line) | {"after_s": round(time.monotonic() - started, 1)})
        if not args.json:
            print(f"{line.state:8} {line}", flush=True)
    states = [each["state"] for each in found]
    counts = {state: states.count(state) for state in (FAULT, WARNING)}
    seconds = time.monotonic() - started
    if args.json:
        print(json.dumps({"lines": found, "faults": counts[FAULT], "warnings": counts[WARNING]}, indent=1))
    else:
        print(f"{counts[FAULT]} faults, {counts[WARNING]} warnings, {len(states)} lines in {seconds:.1f} s")
    return EXIT_FINDINGS if counts[FAULT] else EXIT_OK


def load(args: argparse.Namespace, benchmark: str) -> dict[str, RunConfig]:
    """Return the configurations of a benchmark that have a band, by name."""
    from common.doctor import first_steps

    benchmark_module(benchmark)  # answers an unknown name
    return {
        name: load_config(benchmark, name, size=args.size, settings=args.set).config
        for name in first_steps.stored(benchmark)
    }


def lines(args: argparse.Namespace, loaded: dict[str, dict[str, RunConfig]]) -> Iterator[Line]:
    """Yield what every check finds, the cheap ones first."""
    from common.doctor import devices
    from common.machine import gpus
    from common.machine.hardware import count_gpus
    from common.machine.preflight import cheap_checks, num_shards

    most_shards = max(num_shards(config) for named in loaded.values() for config in named.values())
    yield from cheap_checks(args.size, args.results.resolve(), most_shards)
    if args.quick:
        return
    num_gpus = count_gpus()
    if num_gpus:
        yield gpus.kernel_xids()
    with gpus.watch_xids() as seen:
        num_ranks = args.nproc or num_gpus or PROCESSES_ON_CPU
        yield from answered("devices", partial(devices.check_devices, num_ranks))
        for named in loaded.values():
            yield from benchmark_lines(named, args.results.resolve(), num_gpus or 1)
    yield from seen


def benchmark_lines(named: dict[str, RunConfig], results: Path, num_devices: int) -> Iterator[Line]:
    """Yield what the checks of one benchmark find; `named` are its configurations."""
    from common.doctor import first_steps, recipe
    from common.machine import host
    from common.machine.load import Meter, read_alone

    config = next(iter(named.values()))
    what = config.benchmark
    data, manifest = recipe.check_data(config, results)
    yield data
    if manifest is not None:
        yield host.read_rate(what, ROOT / config.data.directory, manifest)  # type: ignore[attr-defined]
    yield from answered(f"kernels of {what}", partial(recipe.check_kernels, config))
    if config.size != "mini":
        advice = f"ttt doctor --benchmarks {what} compares at size mini"
        yield warning(f"first steps of {what}", f"no band is known at size {config.size}", advice)
    for config in named.values():
        rate, meter = None, Meter()
        if config.size == "mini" and manifest is not None:
            check = f"first steps of {what} {config.configuration}"
            for line in answered(check, partial(first_steps.check, check, config)):
                rate = line.values.get("samples_per_s")
                yield line
        yield recipe.check_minutes(config, results, rate, num_devices, read_alone(meter))


def answered(check: str, function: Callable[[], Iterable[Line]]) -> Iterable[Line]:
    """Return the lines of a check; one that breaks off has found a fault."""
    try:
        return function()
    except (UserError, OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        first = (str(error).strip().splitlines() or [""])[0]
        advice = "`ttt run` would end the same way"
        return [fault(check, f"{type(error).__name__}: {first}".removeprefix("UserError: "), advice)]
