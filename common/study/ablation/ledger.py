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
from common.study.ablation import switches as switched
from common.study.ablation.factorial import Design, Word, effect, spelled
from common.study.ablation.switches import State, Switches


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured of each state.

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
        """Return the logarithm of the time of a sample, after over before, in each turn."""
        pairs = zip(self.turns[after], self.turns[before], strict=True)
        return [math.log(one / other) for one, other in pairs]

    def log_ratio(self, after: State, before: State) -> Estimate:
        return intervals.median(self.log_ratios(after, before))

    def log_samples(self, state: State) -> list[float] | None:
        """Return the logarithms of the samples to the target; None where those of a run are unknown."""
        runs = self.runs.get(state, ())
        known = [math.log(run.samples) for run in runs if run.samples and not run.is_bound]
        return known if known and len(known) == len(runs) else None

    def common_spread(self, values: Callable[[State], list[float] | None]) -> tuple[float, int]:
        """Return the spread that the runs of all states have in common."""
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


def change(found: Measurements, step: switched.Step, describe: Callable[[State], str]) -> Effect:
    """Return what turning a switch on does to time, samples, quality and minutes."""
    before, after = step.before, step.after
    log_time, log_samples = found.log_ratio(after, before), found.log_samples_ratio((after, before))
    above, below = found.qualities(after), found.qualities(before)
    quality = None
    if above and below:
        quality = amdahl.contrast([(1, above), (-1, below)], found.common_spread(found.qualities))
    unknown = [
        by_runs(found, step, "missed", lambda run: run.samples is None),
        by_runs(found, step, "passed at the first evaluation", lambda run: run.is_bound),
    ]
    return Effect(
        before=describe(before),
        after=describe(after),
        together=list(step.together),
        reason=step.reason,
        before_ms=1e3 * found.seconds(before),
        after_ms=1e3 * found.seconds(after),
        throughput=faster(log_time),
        samples=amdahl.exponential(log_samples) if log_samples else None,
        quality=quality,
        minutes_saved=minutes_saved(found, step, log_time, log_samples) if log_samples else None,
        note="; ".join(filter(None, unknown)),
    )


def by_runs(found: Measurements, step: switched.Step, what: str, is_such: Callable[[Trained], bool]) -> str:
    """Return in words how many runs without and with a switch are such; '' where none is."""
    told = []
    for name, state in (("without", step.before), ("with", step.after)):
        runs = found.runs.get(state, ())
        if count := sum(map(is_such, runs)):
            told.append(f"{count} of {len(runs)} runs {name} it")
    return f"{what} by {' and '.join(told)}" if told else ""


def minutes_saved(
    found: Measurements, step: switched.Step, log_time: Estimate, log_samples: Estimate
) -> Estimate:
    """Return minutes before minus after; errors are those of both samples and of the ratio of times."""
    below, above = found.log_samples(step.before) or [], found.log_samples(step.after) or []
    before = math.exp(statistics.fmean(below)) * found.seconds(step.before) / 60
    after = before * math.exp(log_time.value + log_samples.value)
    samples = amdahl.contrast([(before, below), (-after, above)], found.common_spread(found.log_samples))
    return amdahl.around(before - after, [samples, amdahl.scaled(log_time, -after)])


def ledger_rows(found: Measurements, switches: Switches, cards: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return a row of each switch; `cards` say what it relieves. Bounds are of the base, as shares are."""
    rows = []
    for switch in switches.switches:
        relieves, alone = cards[switch.name], switches.alone(switch)
        rows.append(
            Row(
                name=switch.name,
                relieves=list(relieves),
                bound=None if alone.before else amdahl.bound(relieves, found.shares),
                alone=change(found, alone, switches.describe),
                left_out=change(found, switches.left_out(switch), switches.describe),
            )
        )
    return rows


def compositions(found: Measurements, switches: Switches) -> list[Composition]:
    """Return what the switches alone predict of the whole, and what it is: throughput, then minutes.

    Times are put together within each turn, and samples as a contrast of states, since steps share the base.
    """
    base, whole = State(), switches.all
    alone = [switches.alone(switch) for switch in switches.switches]
    steps = [(step.after, step.before) for step in alone]
    logs = zip(*(found.log_ratios(*step) for step in steps), strict=True)
    product = intervals.median([math.fsum(turn) for turn in logs])
    turns = zip(
        *(zip(found.turns[after], found.turns[before], strict=True) for after, before in steps), strict=True
    )
    left = [1 - math.fsum(before - after for after, before in turn) for turn in turns]
    measured = [
        Composition(
            of="throughput",
            measured=faster(found.log_ratio(whole, base)),
            product=faster(product),
            added=faster(intervals.median([math.log(each) for each in left])) if min(left) > 0 else None,
        )
    ]
    in_whole, samples = found.log_samples_ratio((whole, base)), found.log_samples_ratio(*steps)
    start = found.log_samples(base)
    if in_whole and samples and start:
        effects = [change(found, step, str).minutes_saved for step in alone]
        total = math.exp(statistics.fmean(start)) * found.base_s / 60
        rest = total - math.fsum(each.value for each in effects if each)
        measured.append(
            Composition(
                of="minutes",
                measured=faster(amdahl.summed([found.log_ratio(whole, base), in_whole])),
                product=faster(amdahl.summed([product, samples])),
                added=Estimate(value=total / rest, interval=None) if rest > 0 else None,
            )
        )
    return measured


def faster(log_ratio: Estimate) -> Estimate:
    """Return a speed-up from the logarithm of a ratio of times."""
    return amdahl.exponential(amdahl.scaled(log_ratio, -1))


def pairs(found: Measurements, design: Design, held: State) -> list[Pair]:
    """Return each interaction of two factors that the design shows; `held` are on in all of its runs."""
    num_turns = min(len(found.turns[run | held]) for run in design.runs)
    turns = [
        {run: 1e3 * found.base_s * found.turns[run | held][turn] for run in design.runs}
        for turn in range(num_turns)
    ]
    measured = []
    for string in design.interactions():
        one, other = sorted(string[0], key=design.factors.index)
        lost = intervals.median([2 * effect(string[0], responses) for responses in turns])
        both = [-sum(effect(Word({name}), responses) for name in (one, other)) for responses in turns]
        together = statistics.median(both)
        measured.append(
            Pair(
                names=[one, other],
                aliases=[spelled(word) for word in string[1:]],
                one_by_one_ms=together + lost.value,  # each while the other is off
                together_ms=together,
                lost_ms=lost,
            )
        )
    return measured


def warnings(rows: Sequence[Row], measured: Sequence[Pair], base_ms: float) -> list[str]:
    """Return what to know before adding savings up: pairs that overlap, and cards that promise too little."""
    by_name = {row.name: row for row in rows}
    found, seen = [], set[frozenset[str]]()
    for pair in measured:
        seen.add(frozenset(pair.names))
        limits = pair.lost_ms.interval
        both = [by_name[name] for name in pair.names]
        is_clear = limits is not None and (limits.low > 0 or limits.high < 0)
        is_large = abs(pair.lost_ms.value) > SMALLEST_LOSS * base_ms
        if is_clear and is_large and all(saves_time(row) for row in both):
            than = "less" if pair.lost_ms.value > 0 else "more"
            found.append(
                f"{and_also(both)}: together they save {pair.together_ms:.3g} ms a sample, {than} than the "
                f"{pair.one_by_one_ms:.3g} ms of one by one"
                + (f" (or this is {', '.join(pair.aliases)})" if pair.aliases else "")
            )
    for one, other in itertools.combinations(rows, 2):
        needs = other.name in one.alone.together or one.name in other.alone.together  # measured on top of it
        is_known = needs or {one.name, other.name} in seen
        if not is_known and shared(one, other) and saves_time(one) and saves_time(other):
            found.append(f"{and_also([one, other])}: expect less than the sum of what they save alone")
    for row in rows:
        limits = row.alone.throughput.interval
        if row.bound is not None and limits is not None and limits.low > row.bound:
            found.append(
                f"{row.name} gains more than Amdahl's bound of what its card says it relieves "
                f"({', '.join(row.relieves)}): it relieves something else too"
            )
    return found


def saves_time(row: Row) -> bool:
    """Return whether a switch alone makes steps faster beyond noise; with no interval, at all."""
    limits = row.alone.throughput.interval
    return (limits.low if limits else row.alone.throughput.value) > 1


def shared(one: Row, other: Row) -> list[str]:
    """Return the parts of a step that two cards both name."""
    return [each for each in one.relieves if each in other.relieves and each in amdahl.PARTS]


def and_also(rows: Sequence[Row]) -> str:
    """Return two switches and what both relieve, in words."""
    one, other = rows
    parts = shared(one, other)
    both = f" both relieve the {' and the '.join(parts)}" if parts else ""
    return f"{one.name} and {other.name}{both}"
