"""An ablation: each switch of a configuration alone, each left out, and a factorial for their interactions.

Times of a sample come from steps side by side in this process, samples to the target and quality from the
cells of a study. Both are kept and never measured twice; the ledger is calculated anew each time.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from common import repository
from common.config.merge import to_yaml
from common.config.schema import RunConfig
from common.data.preparation import check_data
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from common.evidence.compare.factors import crossing
from common.evidence.ledger import PATTERN, Ledger, Trained
from common.evidence.ledger import State as Told
from common.evidence.log import Log
from common.files import write_text
from common.machine import system
from common.measure.device_run import NUM_DEVICES, build
from common.repository import ROOT, benchmark_module, relative_path
from common.run import launch
from common.study import cells
from common.study.ablation import amdahl
from common.study.ablation import ledger as ledgers
from common.study.ablation.design import Ablation
from common.study.ablation.ledger import Measurements
from common.study.ablation.switches import State, Switches
from common.study.cells import Cell, Study
from common.training.card import find_card
from common.training.load import load_config

TOGETHER = 8  # models in memory at a time, the base among them
NUM_EVALUATIONS = 6  # of a run
WHOLE_STEP = 1.5  # of the time of forward and backward alone, for the first estimate


def builder(benchmark: str) -> Callable[[RunConfig], None]:
    """Return a function that builds a configuration once, and raises UserError where that fails."""
    from common.measure.steptime import buildable

    kind = benchmark_module(benchmark).Benchmark
    return lambda config: buildable(kind, config)


def measured_steps(ablation: Ablation, study: Study, args: argparse.Namespace, console: Console) -> Any:
    """Return the figures of steps: those that are kept, or measured now."""
    kept = kept_steps(ablation, study, args, console)
    if kept is not None:
        return kept
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    figures = wanted(ablation, args) | {"date": date, "commit": repository.commit()}
    figures |= measure(ablation, args, console)
    save(steps_path(study), json.dumps(figures, indent=1))
    return figures


def kept_steps(ablation: Ablation, study: Study, args: argparse.Namespace, console: Console) -> Any:
    """Return the figures of steps that are kept, and say so; None where they would be of something else."""
    path = steps_path(study)
    if args.remeasure or not path.is_file():
        return None
    kept = json.loads(path.read_text())
    if any(kept.get(key) != value for key, value in wanted(ablation, args).items()):
        return None
    of = f"{kept['date']}, commit {kept['commit'][:7]},"
    console.print(f"step times of {of} are kept ({relative_path(path)}); --remeasure repeats them")
    return kept


def steps_path(study: Study) -> Path:
    """Return where the step times of a study lie."""
    return study.report.with_suffix(".steps.json")


def wanted(ablation: Ablation, args: argparse.Namespace) -> dict[str, Any]:
    """Return what step times are of."""
    return {
        "hardware": system.hardware_name(),
        "versions": system.versions(),
        "num_turns": args.turns,
        "configurations": {ablation.name(state): digest(ablation, state) for state in ablation.states},
    }


def digest(ablation: Ablation, state: State) -> str:
    """Return what tells the merged configuration of a state from every other."""
    text = to_yaml(on_one_device(ablation.switches, state)).replace(f"{ROOT}/", "")
    return hashlib.sha256(text.encode()).hexdigest()


def measure(ablation: Ablation, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time the steps of all states, some of them with the base at a time."""
    import torch

    from common.measure import steptime

    base, *others = ablation.states
    shares: dict[str, float] = {}
    turns: dict[str, list[float]] = {}
    base_s: list[float] = []
    groups = [others[first : first + TOGETHER - 1] for first in range(0, len(others), TOGETHER - 1)]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as logs:

        def built(state: State, *, warms_up: bool = False) -> Any:
            run = build(on_one_device(ablation.switches, state), Path(directory), warms_up=warms_up)
            logs.callback(run.log.close)
            return run

        before = time.perf_counter()
        first = built(base, warms_up=True)
        estimate(ablation, first, time.perf_counter() - before, args, console)
        shares = steptime.measure_parts(first)
        with contextlib.suppress(UserError):  # no data prepared: the share of the loader stays unknown
            check_data(ablation.switches.load(base))
            waiting = steptime.measure_waiting(first)
            if waiting is not None:
                shares = {part: share * (1 - waiting) for part, share in shares.items()}
                shares["data loading"] = waiting
        del first
        gc.collect()
        for number, group in enumerate(groups, 1):
            torch.compiler.reset()  # what was compiled for models that are gone
            runs = {ablation.name(state): built(state) for state in (base, *group)}
            told = f"step times: group {number} of {len(groups)}"
            with console.status(told) as status:
                measured = steptime.measure_turns(
                    runs,
                    args.turns,
                    partial(progress, status.update, told, args.turns),
                )
            reference = measured[ablation.name(base)]
            base_s += reference
            for name, seconds in measured.items():
                turns[name] = [one / other for one, other in zip(seconds, reference, strict=True)]
                console.print(f"  {name:46} {1e3 * statistics.median(seconds):9.3f} ms a sample")
            del runs
            gc.collect()  # models of a group make room for those of the next
    return {"base_s": statistics.median(base_s), "turns": turns, "shares": shares}


def progress(update: Callable[[str], None], told: str, num_turns: int, turn: int) -> None:
    """Say which turn was taken."""
    update(f"{told}, turn {turn} of {num_turns}")


def on_one_device(switches: Switches, state: State) -> RunConfig:
    """Return the configuration of a state with the batch that one device takes."""
    config = switches.load(state).config
    if switches.size != "full":
        return config
    configuration, settings = switches.recipe(state)
    share = [f"global_batch_size={config.global_batch_size // NUM_DEVICES}", "micro_batch_size=null"]
    return load_config(
        switches.benchmark, configuration, size=switches.size, settings=[*settings, *share]
    ).config


def estimate(
    ablation: Ablation, run: Any, built_s: float, args: argparse.Namespace, console: Console
) -> None:
    """Say what will be measured and how long it takes at most, from one step of the base."""
    from common.measure.steptime import steps_of_turn
    from common.training.registry import build_methods

    states, step_s = len(ablation.states), WHOLE_STEP * run.step_s
    methods = build_methods(ablation.switches.load(ablation.switches.all).config)
    a_turn = step_s * steps_of_turn(methods, step_s)
    steps_s = states * ((args.turns + 1) * a_turn + built_s)
    console.print(
        f"step times: {states} states, {args.turns} turns: about {steps_s / 60:.1f} minutes at most"
    )
    if args.step_only:
        return
    counts = run_counts(ablation, args)
    samples = sum(
        count * num_samples(ablation.switches.load(state).config) for state, count in counts.items()
    )
    num_ranks = launch.choose_ranks(ablation.switches.load(ablation.switches.all).config, args.nproc)
    minutes = samples * step_s / run.config.global_batch_size / num_ranks / 60
    console.print(
        f"training: {sum(counts.values())} runs of {len(counts)} cells, {samples:,} "
        f"{run.benchmark.names.samples}: about {minutes:.0f} minutes if all were as slow as "
        f"{ablation.switches.base}; what is finished is not run again"
    )


def num_samples(config: RunConfig) -> int:
    """Return how many samples a run trains on."""
    return config.plan().num_steps * config.global_batch_size


def run_counts(ablation: Ablation, args: argparse.Namespace) -> dict[State, int]:
    """Return how many runs each state gets that is trained at all."""
    counts = dict.fromkeys(ablation.factorial, args.factorial_seeds)
    counts |= dict.fromkeys(ablation.single, args.seeds)
    counts |= dict.fromkeys(ablation.ends, max(args.seeds, args.end_seeds))
    return {state: count for state, count in counts.items() if count}


def studies(ablation: Ablation, study: Study, args: argparse.Namespace) -> list[Study]:
    """Return the study with the cells of each number of seeds, most first."""
    counts = run_counts(ablation, args)
    found = []
    for count in sorted(set(counts.values()), reverse=True):
        chosen = [state for state in ablation.states if counts.get(state) == count]
        found.append(
            Study(
                name=study.name,
                benchmark=study.benchmark,
                size=study.size,
                cells=tuple(cell(ablation, state) for state in chosen),
                num_seeds=count,
                first_seed=study.first_seed,
                num_evaluations=NUM_EVALUATIONS,
                results=study.results,
            )
        )
    return found


def cell(ablation: Ablation, state: State) -> Cell:
    """Return the cell of a state."""
    configuration, settings = ablation.switches.recipe(state)
    return Cell(name=ablation.name(state), configuration=configuration, settings=tuple(settings))


def train(ablation: Ablation, study: Study, figures: Any, args: argparse.Namespace, console: Console) -> int:
    """Say how long it takes, and make the runs that are missing; returns the worst exit code."""
    seconds = sum(
        count
        * num_samples(ablation.switches.load(state).config)
        * figures["base_s"]
        * statistics.median(figures["turns"][ablation.name(state)])
        for state, count in run_counts(ablation, args).items()
    )
    num_ranks = launch.choose_ranks(ablation.switches.load(ablation.switches.all).config, args.nproc)
    console.print(
        f"training: about {seconds / num_ranks / 60:.1f} minutes of steps at these times, "
        "if nothing is there yet; start-up, evaluation and communication add to it"
    )
    return run_cells(ablation, study, args)


def run_cells(ablation: Ablation, study: Study, args: argparse.Namespace) -> int:
    """Make the runs that are missing, or say which with --dry-run; returns the worst exit code.

    What fails in one cell keeps no other from being trained, unless with --fail-fast.
    """
    worst = EXIT_OK
    for part in studies(ablation, study, args):
        worst = max(worst, cells.run(part, args))
        if worst == EXIT_INTERRUPTED or (worst and args.fail_fast):
            break
    return worst


def logs_of(ablation: Ablation, study: Study) -> dict[State, tuple[Log, ...]]:
    """Return the finished runs of each state that has some."""
    found = {state: cells.finished(study.directory(cell(ablation, state))) for state in ablation.states}
    return {state: logs for state, logs in found.items() if logs}


def trained(log: Log, target: float) -> Trained:
    """Return what a finished run says."""
    crossed = crossing(log.curve, target)
    return Trained(
        seed=str(log.value("seed")),
        samples=crossed.samples if crossed else None,
        is_bound=crossed is not None and crossed.before is None,
        quality=log.curve[-1].accuracy,
    )


def relieved(switches: Switches) -> dict[str, tuple[str, ...]]:
    """Return what each switch relieves, from the card of its method; no card speaks of what is left off."""
    return {
        switch.name: find_card(switch.name).relieves if switch.method == switch.name else ()
        for switch in switches.switches
    }


def make_ledger(ablation: Ablation, study: Study, figures: Any, target: float) -> Ledger:
    """Calculate the ledger from what is measured."""
    switches = ablation.switches
    logs = logs_of(ablation, study)
    found = Measurements(
        base_s=figures["base_s"],
        turns={state: figures["turns"][ablation.name(state)] for state in ablation.states},
        runs={state: [trained(log, target) for log in own] for state, own in logs.items()},
        shares=figures["shares"],
    )
    rows = ledgers.ledger_rows(found, switches, relieved(switches))
    pairs = ledgers.pairs(found, ablation.design, ablation.held) if ablation.design else []
    benchmark = benchmark_module(switches.benchmark).Benchmark
    return Ledger(
        benchmark=switches.benchmark,
        configuration=switches.configuration,
        base=switches.base,
        size=switches.size,
        hardware=figures["hardware"],
        versions=figures["versions"],
        commit=figures["commit"],
        samples_name=benchmark.names.samples,
        quality_name=benchmark.names.quality,
        target=target,
        num_turns=figures["num_turns"],
        shares=figures["shares"],
        design=ablation.design.describe() if ablation.design else "",
        states=[
            Told(
                name=switches.describe(state),
                ms=1e3 * found.seconds(state),
                runs=list(found.runs.get(state, ())),
            )
            for state in ablation.states
        ],
        rows=rows,
        pairs=pairs,
        compositions=ledgers.compositions(found, switches),
        warnings=ledgers.warnings(rows, pairs, 1e3 * found.base_s),
        notes=[*notes(found, ablation), *other_commits(logs, figures["commit"])],
    )


def notes(found: Measurements, ablation: Ablation) -> list[str]:
    """Return what must be said beside the figures."""
    told = [
        "Time of a sample: steps side by side in one process, on synthetic batches in memory, each shape "
        "with its share; loader and evaluation are not in it. Minutes: samples to the target times that.",
        "Bound: Amdahl's on throughput, from the share of the parts that the method's card names in a step "
        f"of {ablation.switches.base} that waits for no loader; none for what is measured on top of others.",
        "States that were not timed together are compared by way of the base, which is timed with each.",
    ]
    if ablation.switches.size == "full":
        told.append("Minutes are of one device, without communication.")
    if ablation.held:
        held = ", ".join(ablation.switches.in_order(ablation.held))
        told.append(
            f"Factorial: {held} always on, since others need it; their own interactions are not in it."
        )
    _, freedom = amdahl.spread([found.qualities(state) for state in found.runs])
    if not found.runs:
        told.append("Steps only: nothing was trained, samples, quality and minutes are unknown.")
    elif not freedom:
        told.append("One run of each state: samples, quality and minutes have no interval.")
    else:
        told.append(
            f"Intervals of samples and quality take one spread for all states, from {freedom} degrees of "
            "freedom: cells with several seeds."
        )
    if "data loading" not in found.shares:
        told.append("The share of the loader was not measured: no prepared data, or too long a first pass.")
    return told


def other_commits(logs: Mapping[State, Sequence[Log]], commit: str) -> list[str]:
    """Return that runs were made by other code than the step times, if some were."""
    named = {log.header("commit") or "unknown" for own in logs.values() for log in own} - {commit}
    return [f"Step times are of commit {commit}, runs also of {', '.join(sorted(named))}."] if named else []


def save(path: Path, text: str) -> None:
    """Write a file whole. Raises UserError when that fails."""
    try:
        write_text(path, text + "\n")
    except OSError as error:
        raise UserError(f"cannot write here ({error.strerror})", where=str(path.parent)) from error


def ledger_path(study: Study) -> Path:
    """Return where the ledger of a study lies."""
    return study.report.with_suffix(PATTERN.removeprefix("*"))
