"""The ledger of an ablation, calculated from step times, runs and the shares of a step. Measures nothing."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from common.evidence import intervals
from common.evidence.compare.factors import crossing
from common.evidence.intervals import Estimate
from common.evidence.ledger import SMALLEST_LOSS, Composition, Effect, Ledger, Pair, Row, Trained
from common.evidence.ledger import State as LedgerState
from common.evidence.log import Log
from common.evidence.text import make_table, open_console
from common.repository import benchmark_module
from common.study.ablation.design import Ablation
from common.study.ablation.experiment import Experiment
from common.study.ablation.factorial import Design, Word, effect, interaction, spell
from common.study.ablation.measurements import (
    PARTS,
    Measurements,
    add_estimates,
    bound,
    combine_errors,
    exceed_bounds,
    test_contrasts,
    transform,
)
from common.study.ablation.switches import METHODS, State, Step, Switches
from common.study.cells import list_warnings
from common.training.card import find_card

PIPE_WIDTH = 160  # columns, where there is no terminal to ask


def measure_effects(measured: Measurements, switches: Switches, steps: Sequence[Step]) -> list[Effect]:
    """Return the change of time, samples, quality and minutes when each switch is turned on."""
    turns = [measured.log_ratios(step.after, step.before) for step in steps]
    tests = test_contrasts(measured, [step.contrast for step in steps], "throughput", turns)
    effects = []
    for step, log_ratios, of_step in zip(steps, turns, tests, strict=True):
        log_time, log_samples = intervals.median(log_ratios), measured.log_samples.estimate(step.contrast)
        quality = measured.qualities.estimate(step.contrast)
        are_trained = bool(measured.runs.get(step.before) and measured.runs.get(step.after))
        unknown = [
            "no seed links the runs with and without it" * (are_trained and quality is None),
            count_runs(measured, step, "missed", lambda run: run.samples is None),
            count_runs(measured, step, "passed at the first evaluation", lambda run: run.is_bound),
        ]
        effect = Effect(
            before=switches.describe(step.before),
            after=switches.describe(step.after),
            together=list(step.together),
            reason=step.reason,
            before_ms=1e3 * measured.seconds(step.before),
            after_ms=1e3 * measured.seconds(step.after),
            throughput=speed_up(log_time),
            samples=transform(log_samples, math.exp) if log_samples else None,
            quality=quality,
            minutes_saved=minutes_saved(measured, step, log_time, log_samples) if log_samples else None,
            note="; ".join(filter(None, unknown)),
            tests=of_step,
        )
        effects.append(effect)
    return effects


def count_runs(measured: Measurements, step: Step, what: str, is_such: Callable[[Trained], bool]) -> str:
    counts = []
    for name, state in (("without", step.before), ("with", step.after)):
        runs = measured.runs.get(state, ())
        if count := sum(map(is_such, runs)):
            counts.append(f"{count} of {len(runs)} runs {name} it")
    return f"{what} by {' and '.join(counts)}" if counts else ""


def minutes_saved(measured: Measurements, step: Step, log_time: Estimate, log_samples: Estimate) -> Estimate:
    """Return minutes before minus after; errors are those of both samples and of the ratio of times."""
    before = minutes(measured, step.before)
    after = before * math.exp(log_time.value + log_samples.value)
    samples = measured.log_samples.estimate({step.before: before, step.after: -after})
    assert samples is not None  # as log_samples is known
    return combine_errors(before - after, [samples, transform(log_time, lambda log: after * log)])


def minutes(measured: Measurements, state: State) -> float:
    log_samples = measured.log_samples.values[state]
    return math.exp(statistics.fmean(log_samples.values())) * measured.seconds(state) / 60


def make_rows(measured: Measurements, switches: Switches, cards: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return a row of each switch; `cards` say what it relieves. Bounds are of the base, as shares are."""
    sides = [
        measure_effects(measured, switches, [turn(switch) for switch in switches.switches])
        for turn in (switches.alone, switches.left_out)
    ]
    return [
        Row(
            name=switch.name,
            relieves=list(cards[switch.name]),
            bound=None if alone.together else bound(cards[switch.name], measured.shares),
            alone=alone,
            left_out=left_out,
        )
        for switch, alone, left_out in zip(switches.switches, *sides, strict=True)
    ]


def make_compositions(measured: Measurements, switches: Switches, rows: Sequence[Row]) -> list[Composition]:
    """Return throughput and minutes of the whole, as measured and as predicted from the switches alone.

    Times are combined within each turn, and samples as a contrast of states, since all steps share the base.
    """
    base, whole, turns = State(), switches.all, measured.turns
    alone = [(step.after, step.before) for step in map(switches.alone, switches.switches)]
    logs = zip(*(measured.log_ratios(*states) for states in alone), strict=True)
    product = intervals.median([math.fsum(turn) for turn in logs])
    saved = [
        [off - on for on, off in zip(turns[after], turns[before], strict=True)] for after, before in alone
    ]
    left = [1 - math.fsum(turn) for turn in zip(*saved, strict=True)]
    throughput = intervals.median(measured.log_ratios(whole, base))
    compositions = [
        Composition(
            of="throughput",
            measured=speed_up(throughput),
            product=speed_up(product),
            added=speed_up(intervals.median([math.log(time) for time in left])) if min(left) > 0 else None,
        )
    ]
    factors = Counter(after for after, _ in alone)
    factors.subtract(before for _, before in alone)
    samples = measured.log_samples.estimate(factors)
    in_whole = measured.log_samples.estimate({whole: 1, base: -1})
    if in_whole and samples:
        total = minutes(measured, base)
        effects = [row.alone.minutes_saved for row in rows]
        rest = total - math.fsum(effect.value for effect in effects if effect)
        compositions.append(
            Composition(
                of="minutes",
                measured=speed_up(add_estimates(throughput, in_whole)),
                product=speed_up(add_estimates(product, samples)),
                added=Estimate(value=total / rest, interval=None) if rest > 0 else None,
            )
        )
    return compositions


def speed_up(log_ratio: Estimate) -> Estimate:
    return transform(log_ratio, lambda log: math.exp(-log))


def make_pairs(measured: Measurements, design: Design, held: State) -> list[Pair]:
    """Return each interaction of two factors that the design shows; `held` are on in all of its runs."""
    num_turns = min(len(measured.turns[run | held]) for run in design.runs)
    turns = [
        {run: 1e3 * measured.base_s * measured.turns[run | held][turn] for run in design.runs}
        for turn in range(num_turns)
    ]
    words = [string[0] for string in design.interactions]
    losses = [[2 * effect(word, responses) for responses in turns] for word in words]
    contrasts = [
        {run | held: factor for run, factor in interaction(word, design.runs).items()} for word in words
    ]
    tests = test_contrasts(measured, contrasts, "lost_ms", losses)
    pairs = []
    for (word, *aliases), of_turns, contrast, of_pair in zip(
        design.interactions, losses, contrasts, tests, strict=True
    ):
        names, lost = sorted(word, key=design.factors.index), intervals.median(of_turns)
        together = statistics.median(
            -sum(effect(Word({name}), responses) for name in names) for responses in turns
        )
        log_samples = measured.log_samples.estimate(contrast)
        pair = Pair(
            names=names,
            aliases=[spell(alias) for alias in aliases],
            one_by_one_ms=together + lost.value,  # each while the other is off
            together_ms=together,
            lost_ms=lost,
            samples=transform(log_samples, math.exp) if log_samples else None,
            quality=measured.qualities.estimate(contrast),
            tests=of_pair,
        )
        pairs.append(pair)
    return pairs


def make_warnings(
    rows: Sequence[Row], pairs: Sequence[Pair], base_ms: float, exceeding: Sequence[str] = ()
) -> list[str]:
    """Return what to know before adding savings up: pairs that overlap, and cards that promise too little.

    `exceeding` are the switches whose gain exceeds their bound.
    """
    by_name = {row.name: row for row in rows}
    lines, in_design = [], {frozenset(pair.names) for pair in pairs}
    for pair in pairs:
        both, test = [by_name[name] for name in pair.names], pair.tests.get("lost_ms")
        is_clear = test is not None and test.is_shown
        is_large = abs(pair.lost_ms.value) > SMALLEST_LOSS * base_ms
        if is_clear and is_large and all(saves_time(row) for row in both):
            than = "less" if pair.lost_ms.value > 0 else "more"
            lines.append(
                f"{name_both(*both)}: together they save {pair.together_ms:.3g} ms a sample, {than} than the "
                f"{pair.one_by_one_ms:.3g} ms of one by one"
                + (f" (or this is {', '.join(pair.aliases)})" if pair.aliases else "")
            )
    for one, other in itertools.combinations(rows, 2):
        needs = other.name in one.alone.together or one.name in other.alone.together  # measured on top of it
        is_known = needs or {one.name, other.name} in in_design
        if not is_known and shared_parts(one, other) and saves_time(one) and saves_time(other):
            lines.append(f"{name_both(one, other)}: expect less than the sum of what they save alone")
    for row in rows:
        if row.name in exceeding:
            lines.append(
                f"{row.name} gains more than Amdahl's bound of what its card says it relieves "
                f"({', '.join(row.relieves)}): it relieves something else too"
            )
    return lines


def saves_time(row: Row) -> bool:
    limits = row.alone.throughput.interval
    return (limits.low if limits else row.alone.throughput.value) > 1


def shared_parts(one: Row, other: Row) -> list[str]:
    return [part for part in one.relieves if part in other.relieves and part in PARTS]


def name_both(one: Row, other: Row) -> str:
    parts = shared_parts(one, other)
    both = f" both relieve the {' and the '.join(parts)}" if parts else ""
    return f"{one.name} and {other.name}{both}"


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
        switch.name: find_card(switch.name).relieves if switch.key == METHODS + switch.name else ()
        for switch in switches.switches
    }


def make_ledger(experiment: Experiment, figures: Any) -> Ledger:
    ablation, switches, target = experiment.ablation, experiment.switches, experiment.target
    logs = experiment.read_logs()
    measured = Measurements(
        base_s=figures["base_s"],
        turns={state: figures["turns"][switches.cell_name(state)] for state in ablation.states},
        runs={state: [summarize_run(log, target) for log in runs] for state, runs in logs.items()},
        shares=figures["shares"],
    )
    rows = make_rows(measured, switches, read_cards(switches))
    pairs = make_pairs(measured, ablation.design, switches.needed) if ablation.design else []
    names = benchmark_module(switches.benchmark).Benchmark.names
    return Ledger(
        benchmark=switches.benchmark,
        configuration=switches.configuration,
        base=switches.base,
        size=switches.size,
        **{name: figures[name] for name in ("hardware", "versions", "commit", "num_turns", "shares")},
        samples_name=names.samples,
        quality_name=names.quality,
        target=target,
        design=ablation.design.describe() if ablation.design else "",
        states=[
            LedgerState(
                name=switches.describe(state),
                ms=1e3 * measured.seconds(state),
                runs=list(measured.runs.get(state, ())),
            )
            for state in ablation.states
        ],
        rows=rows,
        pairs=pairs,
        compositions=make_compositions(measured, switches, rows),
        warnings=make_warnings(rows, pairs, 1e3 * measured.base_s, exceed_bounds(measured, switches, rows)),
        notes=[
            *make_notes(measured, ablation),
            *other_commits(logs, figures["commit"]),
            *list_warnings({switches.cell_name(state): runs for state, runs in logs.items()}),
            *experiment.describe_decisions(),
        ],
    )


def make_notes(measurements: Measurements, ablation: Ablation) -> list[str]:
    notes = [
        "Time of a sample: steps side by side in one process, on synthetic batches in memory, each shape "
        "with its share; loader and evaluation are not in it. Minutes: samples to the target times that.",
        "Tests of throughput take the turns as independent. What the process brings by chance, such as where "
        "its memory lies, is in all of its turns: another may differ; ttt compare --steps takes many.",
        "Bound: Amdahl's on throughput, from the share of the parts that the method's card names in a step "
        f"of {ablation.switches.base} that waits for no loader; not given for what is measured on top of "
        "others. Above 10x it is no limit in practice: none.",
        "Not shown: p of no effect, after Holm's correction for all rows of the table, is 5 % or more; in "
        "brackets the effect that runs or turns could show with 80 % probability. Intervals are without this "
        "correction, those of minutes too.",
        "States that were not timed together are compared by way of the base, which is timed with each.",
    ]
    if ablation.switches.size == "full":
        notes.append("Minutes are of one device, without communication.")
    if needed := ablation.switches.needed:
        held = ", ".join(ablation.switches.in_order(needed))
        notes.append(
            f"Factorial: {held} always on, since others need it; their own interactions are not in it."
        )
    if not measurements.runs:
        notes.append("Steps only: nothing was trained, samples, quality and minutes are unknown.")
    elif not measurements.qualities.freedom:
        notes.append("One run of each state: samples, quality and minutes have no interval.")
    else:
        notes.append(
            "Tests and intervals of samples and quality take all states as varying alike; SIMULATIONS.md in "
            "common/study says how often they are wrong if not. Intervals of samples, quality and minutes "
            "are for these seeds: the spread is what states and seeds leave, of samples "
            f"{measurements.log_samples.freedom} degrees of freedom, of quality "
            f"{measurements.qualities.freedom}."
        )
    if "data loading" not in measurements.shares:
        notes.append("The share of the loader was not measured: no prepared data, or too long a first pass.")
    return notes


def other_commits(logs: Mapping[State, Sequence[Log]], commit: str) -> list[str]:
    commits = {log.header("commit") or "unknown" for runs in logs.values() for log in runs} - {commit}
    return [f"Step times are of commit {commit}, runs also of {', '.join(sorted(commits))}."] * bool(commits)


def show(ledger: Ledger) -> None:
    console = open_console(PIPE_WIDTH)
    console.print(Text(f"\n{ledger.title}: target {ledger.target:g} {ledger.quality_name}"))
    console.print(Text(f"a step of {ledger.base}: {ledger.parts}"))
    tables = {
        f"each alone on {ledger.base}": ledger.alone,
        f"each in {ledger.configuration}: left out and put back": ledger.left_out,
        f"{ledger.configuration} over {ledger.base}": ledger.composed,
        f"pairs: {ledger.design}": ledger.paired,
    }
    for title, rows in tables.items():
        if rows:
            columns = list(rows[0])
            console.print(make_table(title, columns, [list(row.values()) for row in rows], left=columns))
    for line in [*(f"warning: {line}" for line in ledger.warnings), *ledger.notes]:
        console.print(Text(line))
