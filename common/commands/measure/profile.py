"""Say where a training step goes, what bounds it, and what would remove that: measured in the real loop.

A few steps of each shape (image size, sequence mix) are taken apart into the wait for data, the methods that
change batches, the copy to the device, forward, backward, optimizer, logging, and with several ranks their
communication. In turns with them the same steps run on kept batches, without decoding, without augmentation
and without communication: what that saves is the evidence of the verdict. The figures go to
results/profile/<hardware>/ as JSON.

--delay-data shows what slow storage would do: each batch that is read comes so many milliseconds later
(divided by the readers; a batch that the loader has in memory needs no reading).

examples:
  ttt profile image_classification optimized --size mini
  ttt profile image_classification optimized --size mini --set data.loader=workers --delay-data 250
  ttt profile language_bert optimized --size mini --delay-data 10
  ttt profile language_bert optimized --size mini --nproc 2
  ttt profile image_classification optimized --batch-size 256 --trace trace.json
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from common import repository
from common.arguments import add_benchmark, add_nproc, add_results
from common.config.schema import Loaded
from common.data.preparation import check_data
from common.errors import EXIT_OK, UserError
from common.machine import system
from common.measure.device_run import NUM_DEVICES, build
from common.measure.figures import keep
from common.measure.profiling.verdict import Phase, Profile, at_most, verdict
from common.repository import SIZES
from common.run import launch
from common.run.environments import rank_environments
from common.run.supervision import supervise
from common.training import ranks
from common.training.load import load_config

if TYPE_CHECKING:
    from common.run.loop import TrainingRun
    from common.training.benchmark import Benchmark

MIN_TURNS, MAX_TURNS = 2, 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_benchmark(parser)
    parser.add_argument("configuration", help="a YAML file of the benchmark")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key, such as data.num_workers",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="samples a step on each rank; default: the configuration's, full / 8",
    )
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="of each variant and shape")
    parser.add_argument(
        "--delay-data",
        type=float,
        default=0.0,
        metavar="MS",
        help="for each batch read, as from slow storage",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of some steps")
    add_nproc(parser)
    parser.add_argument("--json", action="store_true", help="for machines")
    add_results(parser)


def main(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdict, and keep the figures."""
    if not MIN_TURNS <= args.turns <= MAX_TURNS:
        raise UserError(f"--turns {args.turns}: expected {MIN_TURNS} to {MAX_TURNS}")
    if not 0 <= args.delay_data <= 60_000:
        raise UserError(f"--delay-data {args.delay_data:g}: expected 0 to 60000 milliseconds")
    if args.trace and not args.trace.absolute().parent.is_dir():
        raise UserError("no such folder", where=f"--trace {args.trace}")
    place = ranks.place()
    if place.world_size == 1 and (args.nproc or 1) > 1:
        loaded = load(args, [], args.nproc)
        launch.choose_ranks(loaded.config, args.nproc)
        check_data(loaded)
        return start_ranks(args.nproc)
    figures = measured(args)
    if args.json and place.rank == 0:
        print(json.dumps(figures))
    return EXIT_OK


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Profile with all the ranks that were started; returns the figures, which rank 0 has kept."""
    from common.training import distributed

    place = ranks.place()
    loaded = load(args, [], place.world_size)
    if place.rank == 0:
        check_data(loaded)
    with distributed.process_group(place), tempfile.TemporaryDirectory() as directory, ExitStack() as logs:
        run = build(loaded.config, Path(directory), place)
        logs.callback(run.log.close)
        run.clock.console, run.clock.live = Console(quiet=True), None
        return profile_run(args, loaded, run)


def load(args: argparse.Namespace, settings: list[str], num_ranks: int) -> Loaded:
    """Return the configuration with these settings and the batch of so many devices."""

    def loaded(*more: str) -> Loaded:
        return load_config(args.benchmark, args.configuration, size=args.size, settings=[*more])

    each = args.batch_size
    if each is None:
        batch = loaded(*args.set).config.global_batch_size
        each = max(1, batch // (NUM_DEVICES if args.size == "full" else num_ranks))
    if each < 1:
        raise UserError("--batch-size must be positive")
    whole = [f"global_batch_size={each * num_ranks}", "micro_batch_size=null"]
    return loaded(*whole, *(text for text in args.set if not text.startswith("global_batch")), *settings)


def start_ranks(num_ranks: int) -> int:
    """Run this command again as so many ranks; returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        return supervise(["-m", "common.cli", *sys.argv[1:]], rank_environments(num_ranks, folder)).code


def profile_run(args: argparse.Namespace, loaded: Loaded, run: "TrainingRun") -> dict[str, Any]:
    """Measure every phase, then evaluation and other loaders; rank 0 tells and keeps."""
    from common.measure.clock import measure_peaks
    from common.measure.profiling import profile as measuring
    from common.training.probes import probes_of

    config, benchmark = loaded.config, run.benchmark
    is_quiet = run.place.rank > 0
    console = Console(stderr=args.json, highlight=False, soft_wrap=True, quiet=is_quiet)
    console.print(
        f"{config.benchmark} {config.configuration} {config.size} on {system.hardware_name()}: "
        f"{config.global_batch_size} {benchmark.names.samples} a step, {run.place.world_size} rank(s)"
    )

    def other(settings: list[str]) -> "Benchmark":
        changed = load(args, settings, run.place.world_size).config
        return type(benchmark)(changed, seed=0, place=run.place)

    def cure(settings: list[str]) -> "Benchmark | None":
        try:
            found = other(settings)
            found.prepare_loader()
        except UserError:  # it does not work here
            return None
        return found if found.config != config else None

    benchmark.prepare_loader()
    probes = probes_of(benchmark)
    delay_s, looping = args.delay_data / 1e3, measuring.Bench(run)
    peaks, phases = measure_peaks(run.device), first_of_each(probes.phases())
    variants = {name: other(settings) for name, settings in probes.without_loading().items()}
    measured = []
    for shape, steps in phases.items():
        phase = measuring.measure_phase(
            looping, shape, steps, variants, num_turns=args.turns, delay_s=delay_s, peaks=peaks
        )
        measured.append(phase)
        console.print("\n".join(describe(phase, benchmark.names.samples)))
    evaluation_s = measuring.measure_evaluation(run)
    cures: dict[str, float] = {}
    if any(map(measuring.waits, measured)):
        worst = max(measured, key=lambda each: each.parts_ms["data wait"] / each.step_ms)
        factor = 1.2 * worst.step_per_s / worst.loader_per_s
        choices = {
            name: found
            for name, settings in probes.other_loaders(factor).items()
            if (found := cure(settings)) is not None
        }
        cures = measuring.measure_loaders(choices, phases[worst.shape], delay_s)
    profile = Profile(
        samples_name=benchmark.names.samples,
        phases=tuple(measured),
        cures=cures,
        is_compressed=config.gradient_compression != "none",
    )
    console.print(*summary(profile, evaluation_s, run), sep="\n")
    if args.trace:
        longest = max(measured, key=lambda each: each.per_sample_ms)
        measuring.write_trace(looping, phases[longest.shape], args.trace)
        console.print(f"trace of {longest.shape} -> {args.trace} (chrome://tracing, ui.perfetto.dev)")
    figures: dict[str, Any] = {
        "benchmark": config.benchmark,
        "configuration": config.configuration,
        "size": config.size,
        "config": json.loads(config.model_dump_json()),
        "delay_data_ms": args.delay_data,
        "batch_size": config.global_batch_size,
        "num_ranks": run.place.world_size,
        "versions": system.versions(),
        "commit": repository.commit(),
        "peaks": dataclasses.asdict(peaks),
        "phases": [dataclasses.asdict(phase) for phase in measured],
        "shares": profile.shares(),
        "evaluation_s": evaluation_s,
        "loaders": cures,
        "verdict": verdict(profile),
    }
    if not is_quiet:
        path = keep(figures, args.results / "profile" / system.hardware_name(), config.benchmark)
        console.print(f"-> {path}")
    return figures


def first_of_each(phases: list[tuple[str, range]]) -> dict[str, range]:
    """Return where each shape is trained on first."""
    found: dict[str, range] = {}
    for shape, steps in phases:
        found.setdefault(shape, steps)
    return found


def describe(phase: Phase, samples_name: str) -> list[str]:
    """Return the table of a phase."""
    lines = [f"{phase.shape}, {phase.share:.0%} of the training; part, ms, share, without it at most"]
    for name, ms in sorted(phase.parts_ms.items(), key=lambda item: -item[1]):
        share = ms / phase.step_ms
        lines.append(f"  {name:16} {ms:9.2f} {share:6.1%}  {at_most(share):5.2f}x")
    lines.append(f"  {'step':16} {phase.step_ms:9.2f}          {phase.unaccounted_ms:.2f} ms unaccounted for")
    once = ""
    if phase.is_first_pass:
        once = " in its first pass, which is too long for this to see the next, faster one"
    elif phase.first_pass_per_s:
        once = f" ({phase.first_pass_per_s:,.0f} in the first pass over the data)"
    lines.append(
        f"  {samples_name}/s: loader alone {phase.loader_per_s:,.0f}{once}, step alone "
        f"{phase.step_per_s:,.0f}, together {phase.together_per_s:,.0f}"
    )
    saved = (
        f"{name} {saving.share:.1%} ({saving.low:.1%} to {saving.high:.1%})"
        for name, saving in phase.savings.items()
    )
    lines.append(f"  saved by: {', '.join(saved)}")
    peaks = [
        f"{share:.0%} of {what}"
        for share, what in ((phase.flops_share, "the matrix product"), (phase.bytes_share, "the copy"))
        if share is not None
    ]
    return [*lines, f"  of what this device does at best: {', '.join(peaks)}"] if peaks else lines


def summary(profile: Profile, evaluation_s: tuple[float, float], run: "TrainingRun") -> list[str]:
    """Return what evaluation takes of a whole run, and the verdict."""
    count = len(run.plan.evaluation_steps)
    training_s = sum(phase.per_sample_ms for phase in profile.phases) / 1e3
    training_s *= run.plan.num_steps * run.config.global_batch_size
    total_s = evaluation_s[0] + (count - 1) * evaluation_s[1]
    return [
        f"evaluation: {evaluation_s[0]:.2f} s the first time, {evaluation_s[1]:.2f} s later; {count} of them "
        f"are {total_s / (total_s + training_s):.1%} of a run over the whole budget "
        f"({training_s:.0f} s of training)",
        verdict(profile),
    ]
