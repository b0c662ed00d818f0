"""An ablation: each switch of a configuration alone, each left out, and a factorial for their interactions.

Times of a sample come from steps side by side in this process, samples to the target and quality from the
cells of a study. Both are kept and never measured twice; the ledger is calculated anew each time.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import EXIT_INTERRUPTED, EXIT_OK
from common.evidence.compare.factors import crossing
from common.evidence.ledger import PATTERN, Ledger, Trained
from common.evidence.ledger import State as LedgerState
from common.evidence.log import Log
from common.evidence.text import make_table, open_console
from common.repository import benchmark_module
from common.run import launch
from common.study import cells
from common.study.ablation import amdahl, steps
from common.study.ablation import ledger as ledgers
from common.study.ablation.design import Ablation
from common.study.ablation.ledger import Measurements
from common.study.ablation.switches import State, Switches
from common.study.cells import Cell, Study
from common.study.predict.sources import max_samples
from common.training.card import find_card

WHOLE_STEP = 1.5  # of the time of forward and backward alone, for the first estimate
PIPE_WIDTH = 160  # columns, where there is no terminal to ask


def time_steps(ablation: Ablation, study: Study, args: argparse.Namespace, console: Console) -> Any:
    """Return the figures of steps from their file, or measured now."""

    def announce(run: Any, built_s: float) -> None:
        from common.measure.steptime import steps_of_turn
        from common.training.registry import build_methods

        states, step_s = len(ablation.states), WHOLE_STEP * run.step_s
        methods = build_methods(ablation.switches.load(ablation.switches.all).config)
        turn_s = step_s * steps_of_turn(methods, step_s)
        minutes = states * ((args.turns + 1) * turn_s + built_s) / 60
        console.print(f"step times: {states} states, {args.turns} turns: about {minutes:.1f} minutes at most")
        if args.step_only:
            return
        sample_s, counts = step_s / run.config.global_batch_size, run_counts(ablation, args)
        samples, seconds = training_time(ablation, args, lambda state: sample_s)
        console.print(
            f"training: {sum(counts.values())} runs of {len(counts)} cells, {samples:,} "
            f"{run.benchmark.names.samples}: about {seconds / 60:.0f} minutes if all were as slow as "
            f"{ablation.switches.base}; what is finished is not run again"
        )

    figures = steps.load_steps(ablation, study, args, console)
    return figures or steps.measure_steps(ablation, study, args, console, announce)


def training_time(
    ablation: Ablation, args: argparse.Namespace, sample_s: Callable[[State], float]
) -> tuple[int, float]:
    """Add up the samples of all runs, and the seconds of their steps on all ranks."""
    samples, seconds = 0, 0.0
    for state, count in run_counts(ablation, args).items():
        num_samples = count * max_samples(ablation.switches.load(state).config)
        samples += num_samples
        seconds += num_samples * sample_s(state)
    whole = ablation.switches.load(ablation.switches.all).config
    return samples, seconds / launch.choose_ranks(whole, args.nproc)


def run_counts(ablation: Ablation, args: argparse.Namespace) -> dict[State, int]:
    """Return how many runs each state gets that is trained at all."""
    counts = dict.fromkeys(ablation.factorial, args.factorial_seeds)
    counts |= dict.fromkeys(ablation.single, args.seeds)
    counts |= dict.fromkeys(ablation.ends, max(args.seeds, args.end_seeds))
    return {state: count for state, count in counts.items() if count}


def make_cell(ablation: Ablation, state: State) -> Cell:
    configuration, settings = ablation.switches.recipe(state)
    return Cell(name=ablation.name(state), configuration=configuration, settings=tuple(settings))


def train(ablation: Ablation, study: Study, figures: Any, args: argparse.Namespace, console: Console) -> int:
    """Say how long it takes, and make the runs that are missing; returns the worst exit code."""
    turns = figures["turns"]
    _, seconds = training_time(
        ablation, args, lambda state: figures["base_s"] * statistics.median(turns[ablation.name(state)])
    )
    console.print(
        f"training: about {seconds / 60:.1f} minutes of steps at these times, "
        "if nothing is there yet; start-up, evaluation and communication add to it"
    )
    return run_cells(ablation, study, args)


def run_cells(ablation: Ablation, study: Study, args: argparse.Namespace) -> int:
    """Make the runs that are missing, or say which with --dry-run; returns the worst exit code.

    States with the most seeds come first. A failure in one cell keeps no other from being trained, unless
    with --fail-fast.
    """
    counts, worst = run_counts(ablation, args), EXIT_OK
    for count in sorted(set(counts.values()), reverse=True):
        states = [state for state in ablation.states if counts.get(state) == count]
        of_states = tuple(make_cell(ablation, state) for state in states)
        worst = max(worst, cells.run(replace(study, cells=of_states, num_seeds=count), args))
        if worst == EXIT_INTERRUPTED or (worst and args.fail_fast):
            break
    return worst


def read_runs(ablation: Ablation, study: Study) -> dict[State, tuple[Log, ...]]:
    logs = {
        state: cells.finished_runs(study.directory(make_cell(ablation, state))) for state in ablation.states
    }
    return {state: runs for state, runs in logs.items() if runs}


def summarize_run(log: Log, target: float) -> Trained:
    crossed = crossing(log.curve, target)
    return Trained(
        seed=str(log.value("seed")),
        samples=crossed.samples if crossed else None,
        is_bound=crossed is not None and crossed.before is None,
        quality=log.curve[-1].accuracy,
    )


def read_cards(switches: Switches) -> dict[str, tuple[str, ...]]:
    """Read the parts that each switch relieves from its method's card; a method left off has none."""
    return {
        switch.name: find_card(switch.name).relieves if switch.method == switch.name else ()
        for switch in switches.switches
    }


def make_ledger(ablation: Ablation, study: Study, figures: Any, target: float) -> Ledger:
    """Calculate the ledger from what is measured."""
    switches = ablation.switches
    logs = read_runs(ablation, study)
    measurements = Measurements(
        base_s=figures["base_s"],
        turns={state: figures["turns"][ablation.name(state)] for state in ablation.states},
        runs={state: [summarize_run(log, target) for log in runs] for state, runs in logs.items()},
        shares=figures["shares"],
    )
    rows = ledgers.make_rows(measurements, switches, read_cards(switches))
    pairs = ledgers.make_pairs(measurements, ablation.design, ablation.held) if ablation.design else []
    benchmark = benchmark_module(switches.benchmark).Benchmark
    return Ledger(
        benchmark=switches.benchmark,
        configuration=switches.configuration,
        base=switches.base,
        size=switches.size,
        **{name: figures[name] for name in ("hardware", "versions", "commit", "num_turns", "shares")},
        samples_name=benchmark.names.samples,
        quality_name=benchmark.names.quality,
        target=target,
        design=ablation.design.describe() if ablation.design else "",
        states=[
            LedgerState(
                name=switches.describe(state),
                ms=1e3 * measurements.seconds(state),
                runs=list(measurements.runs.get(state, ())),
            )
            for state in ablation.states
        ],
        rows=rows,
        pairs=pairs,
        compositions=ledgers.make_compositions(measurements, switches),
        warnings=ledgers.make_warnings(rows, pairs, 1e3 * measurements.base_s),
        notes=[*make_notes(measurements, ablation), *other_commits(logs, figures["commit"])],
    )


def make_notes(measurements: Measurements, ablation: Ablation) -> list[str]:
    """Return what must be said beside the figures."""
    notes = [
        "Time of a sample: steps side by side in one process, on synthetic batches in memory, each shape "
        "with its share; loader and evaluation are not in it. Minutes: samples to the target times that.",
        "Bound: Amdahl's on throughput, from the share of the parts that the method's card names in a step "
        f"of {ablation.switches.base} that waits for no loader; none for what is measured on top of others.",
        "States that were not timed together are compared by way of the base, which is timed with each.",
    ]
    if ablation.switches.size == "full":
        notes.append("Minutes are of one device, without communication.")
    if ablation.held:
        held = ", ".join(ablation.switches.in_order(ablation.held))
        notes.append(
            f"Factorial: {held} always on, since others need it; their own interactions are not in it."
        )
    _, freedom = amdahl.spread([measurements.qualities(state) for state in measurements.runs])
    if not measurements.runs:
        notes.append("Steps only: nothing was trained, samples, quality and minutes are unknown.")
    elif not freedom:
        notes.append("One run of each state: samples, quality and minutes have no interval.")
    else:
        notes.append(
            f"Intervals of samples and quality take one spread for all states, from {freedom} degrees of "
            "freedom: cells with several seeds."
        )
    if "data loading" not in measurements.shares:
        notes.append("The share of the loader was not measured: no prepared data, or too long a first pass.")
    return notes


def other_commits(logs: Mapping[State, Sequence[Log]], commit: str) -> list[str]:
    commits = {log.header("commit") or "unknown" for runs in logs.values() for log in runs} - {commit}
    return [f"Step times are of commit {commit}, runs also of {', '.join(sorted(commits))}."] * bool(commits)


def ledger_path(study: Study) -> Path:
    return study.report.with_suffix(PATTERN.removeprefix("*"))


def show(ledger: Ledger) -> None:
    """Print the ledger."""
    console = open_console(PIPE_WIDTH)
    console.print(Text(f"\n{ledger.title}: target {ledger.target:g} {ledger.quality_name}"))
    console.print(Text(f"a step of {ledger.base}: {ledger.parts}"))
    console.print(table(f"each alone on {ledger.base}", ledger.alone))
    console.print(table(f"each in {ledger.configuration}: left out and put back", ledger.left_out))
    console.print(table(f"{ledger.configuration} over {ledger.base}", ledger.composed))
    if ledger.pairs:
        console.print(table(f"pairs: {ledger.design}", ledger.paired))
    for line in ledger.warnings:
        console.print(Text(f"warning: {line}"))
    for line in ledger.notes:
        console.print(Text(line))


def table(title: str, rows: list[dict[str, str]]) -> Table:
    columns = list(rows[0])
    return make_table(title, columns, [list(row.values()) for row in rows], left=columns)
