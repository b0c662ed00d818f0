"""The ledger of an ablation, calculated from step times, runs and the shares of a step. Measures nothing."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.evidence import intervals
from common.evidence.intervals import Estimate
from common.evidence.ledger import SMALLEST_LOSS, Composition, Effect, Pair, Row, Trained
from common.study.ablation import amdahl
from common.study.ablation.factorial import Design, Word, effect, spelled
from common.study.ablation.switches import State, Step, Switches


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of each state.

    `turns` are the seconds of a sample in each turn, over those of the base in the same turn; `base_s` are
    the seconds of the base. `runs` are those of the states that were trained, `shares` the parts of a step.
    """

    base_s: float
    turns: Mapping[State, Sequence[float]]
    runs: Mapping[State, Sequence[Trained]]
    shares: Mapping[str, float]

    def seconds(self, state: State) -> float:
        return self.base_s * statistics.median(self.turns[state])

    def log_ratios(self, after: State, before: State) -> list[float]:
        pairs = zip(self.turns[after], self.turns[before], strict=True)
        return [math.log(one / other) for one, other in pairs]

    def log_ratio(self, after: State, before: State) -> Estimate:
        return intervals.median(self.log_ratios(after, before))

    def log_samples(self, state: State) -> list[float] | None:
        runs = self.runs.get(state, ())
        known = [math.log(run.samples) for run in runs if run.samples and not run.is_bound]
        return known if known and len(known) == len(runs) else None

    def common_spread(self, values: Callable[[State], list[float] | None]) -> tuple[float, int]:
        return amdahl.spread([values(state) or [] for state in self.runs])

    def log_samples_ratio(self, *steps: tuple[State, State]) -> Estimate | None:
        """Return the sum over steps, which may share states, of log samples after over before."""
        factors = Counter[State]()
        for after, before in steps:
            factors[after] += 1
            factors[before] -= 1
        terms = []
        for state, factor in factors.items():
            if (logs := self.log_samples(state)) is None:
                return None
            terms.append((factor, logs))
        return amdahl.contrast(terms, self.common_spread(self.log_samples))

    def qualities(self, state: State) -> list[float]:
        return [run.quality for run in self.runs.get(state, ())]


def measure_effect(measured: Measurements, step: Step, describe: Callable[[State], str]) -> Effect:
    """Return the change of time, samples, quality and minutes when a switch is turned on."""
    before, after = step.before, step.after
    log_time, log_samples = measured.log_ratio(after, before), measured.log_samples_ratio((after, before))
    above, below = measured.qualities(after), measured.qualities(before)
    quality = None
    if above and below:
        quality = amdahl.contrast([(1, above), (-1, below)], measured.common_spread(measured.qualities))
    unknown = [
        count_runs(measured, step, "missed", lambda run: run.samples is None),
        count_runs(measured, step, "passed at the first evaluation", lambda run: run.is_bound),
    ]
    return Effect(
        before=describe(before),
        after=describe(after),
        together=list(step.together),
        reason=step.reason,
        before_ms=1e3 * measured.seconds(before),
        after_ms=1e3 * measured.seconds(after),
        throughput=speed_up(log_time),
        samples=amdahl.exponential(log_samples) if log_samples else None,
        quality=quality,
        minutes_saved=minutes_saved(measured, step, log_time, log_samples) if log_samples else None,
        note="; ".join(filter(None, unknown)),
    )


def count_runs(measured: Measurements, step: Step, what: str, is_such: Callable[[Trained], bool]) -> str:
    counts = []
    for name, state in (("without", step.before), ("with", step.after)):
        runs = measured.runs.get(state, ())
        if count := sum(map(is_such, runs)):
            counts.append(f"{count} of {len(runs)} runs {name} it")
    return f"{what} by {' and '.join(counts)}" if counts else ""


def minutes_saved(measured: Measurements, step: Step, log_time: Estimate, log_samples: Estimate) -> Estimate:
    """Return minutes before minus after; errors are those of both samples and of the ratio of times."""
    below, above = measured.log_samples(step.before) or [], measured.log_samples(step.after) or []
    before = math.exp(statistics.fmean(below)) * measured.seconds(step.before) / 60
    after = before * math.exp(log_time.value + log_samples.value)
    spread = measured.common_spread(measured.log_samples)
    samples = amdahl.contrast([(before, below), (-after, above)], spread)
    return amdahl.around(before - after, [samples, amdahl.scaled(log_time, -after)])


def make_rows(measured: Measurements, switches: Switches, cards: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return a row of each switch; `cards` say what it relieves. Bounds are of the base, as shares are."""
    rows = []
    for switch in switches.switches:
        relieves, alone = cards[switch.name], switches.alone(switch)
        rows.append(
            Row(
                name=switch.name,
                relieves=list(relieves),
                bound=None if alone.before else amdahl.bound(relieves, measured.shares),
                alone=measure_effect(measured, alone, switches.describe),
                left_out=measure_effect(measured, switches.left_out(switch), switches.describe),
            )
        )
    return rows


def make_compositions(measured: Measurements, switches: Switches) -> list[Composition]:
    """Return what the switches alone predict of the whole, and what it is: throughput, then minutes.

    Times are put together within each turn, and samples as a contrast of states, since steps share the base.
    """
    base, whole = State(), switches.all
    alone = [switches.alone(switch) for switch in switches.switches]
    steps = [(step.after, step.before) for step in alone]
    logs = zip(*(measured.log_ratios(*step) for step in steps), strict=True)
    product = intervals.median([math.fsum(turn) for turn in logs])
    saved = [
        [before - after for after, before in zip(measured.turns[on], measured.turns[off], strict=True)]
        for on, off in steps
    ]
    left = [1 - math.fsum(turn) for turn in zip(*saved, strict=True)]
    throughput = measured.log_ratio(whole, base)
    compositions = [
        Composition(
            of="throughput",
            measured=speed_up(throughput),
            product=speed_up(product),
            added=speed_up(intervals.median([math.log(time) for time in left])) if min(left) > 0 else None,
        )
    ]
    in_whole, samples = measured.log_samples_ratio((whole, base)), measured.log_samples_ratio(*steps)
    if in_whole and samples and (start := measured.log_samples(base)):
        effects = [measure_effect(measured, step, str).minutes_saved for step in alone]
        total = math.exp(statistics.fmean(start)) * measured.base_s / 60
        rest = total - math.fsum(effect.value for effect in effects if effect)
        compositions.append(
            Composition(
                of="minutes",
                measured=speed_up(amdahl.summed([throughput, in_whole])),
                product=speed_up(amdahl.summed([product, samples])),
                added=Estimate(value=total / rest, interval=None) if rest > 0 else None,
            )
        )
    return compositions


def speed_up(log_ratio: Estimate) -> Estimate:
    return amdahl.exponential(amdahl.scaled(log_ratio, -1))


def make_pairs(measured: Measurements, design: Design, held: State) -> list[Pair]:
    """Return each interaction of two factors that the design shows; `held` are on in all of its runs."""
    num_turns = min(len(measured.turns[run | held]) for run in design.runs)
    turns = [
        {run: 1e3 * measured.base_s * measured.turns[run | held][turn] for run in design.runs}
        for turn in range(num_turns)
    ]
    pairs = []
    for string in design.interactions():
        names = sorted(string[0], key=design.factors.index)
        lost = intervals.median([2 * effect(string[0], responses) for responses in turns])
        together = statistics.median(
            -sum(effect(Word({name}), responses) for name in names) for responses in turns
        )
        pairs.append(
            Pair(
                names=names,
                aliases=[spelled(word) for word in string[1:]],
                one_by_one_ms=together + lost.value,  # each while the other is off
                together_ms=together,
                lost_ms=lost,
            )
        )
    return pairs


def make_warnings(rows: Sequence[Row], pairs: Sequence[Pair], base_ms: float) -> list[str]:
    """Return what to know before adding savings up: pairs that overlap, and cards that promise too little."""
    by_name = {row.name: row for row in rows}
    lines, in_design = [], {frozenset(pair.names) for pair in pairs}
    for pair in pairs:
        limits, both = pair.lost_ms.interval, [by_name[name] for name in pair.names]
        is_clear = limits is not None and (limits.low > 0 or limits.high < 0)
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
        limits = row.alone.throughput.interval
        if row.bound is not None and limits is not None and limits.low > row.bound:
            lines.append(
                f"{row.name} gains more than Amdahl's bound of what its card says it relieves "
                f"({', '.join(row.relieves)}): it relieves something else too"
            )
    return lines


def saves_time(row: Row) -> bool:
    limits = row.alone.throughput.interval
    return (limits.low if limits else row.alone.throughput.value) > 1


def shared_parts(one: Row, other: Row) -> list[str]:
    return [part for part in one.relieves if part in other.relieves and part in amdahl.PARTS]


def name_both(one: Row, other: Row) -> str:
    parts = shared_parts(one, other)
    both = f" both relieve the {' and the '.join(parts)}" if parts else ""
    return f"{one.name} and {other.name}{both}"
