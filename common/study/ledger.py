"""The ledger of an ablation, calculated from step times, runs and the shares of a step. Measures nothing."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.evidence.intervals import Estimate
from common.evidence.ledger import SMALLEST_LOSS, Composition, Effect, Pair, Row, Trained
from common.study import amdahl
from common.study import switches as switched
from common.study.factorial import Design, Word, effect, spelled
from common.study.switches import State, Switches


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

    def log_ratio(self, after: State, before: State) -> Estimate:
        """Return the logarithm of the time of a sample, after over before, from pairs of turns."""
        pairs = zip(self.turns[after], self.turns[before], strict=True)
        return amdahl.median([math.log(one / other) for one, other in pairs])

    def log_samples(self, state: State) -> list[float] | None:
        """Return the logarithms of the samples to the target; None if not all runs reached it, or none is."""
        samples = [run.samples for run in self.runs.get(state, ())]
        known = [math.log(each) for each in samples if each]
        return known if known and len(known) == len(samples) else None

    def common_spread(self, values: Callable[[State], list[float] | None]) -> tuple[float, int]:
        """Return the spread that the runs of all states have in common."""
        return amdahl.spread([values(state) or [] for state in self.runs])

    def log_samples_ratio(self, after: State, before: State) -> Estimate | None:
        above, below = self.log_samples(after), self.log_samples(before)
        if above is None or below is None:
            return None
        return amdahl.difference(above, below, self.common_spread(self.log_samples))

    def qualities(self, state: State) -> list[float]:
        return [run.quality for run in self.runs.get(state, ())]

    def missed(self, state: State) -> str:
        """Return how many runs of a state missed the target, in words; '' where all reached it."""
        runs = self.runs.get(state, ())
        missed = sum(run.samples is None for run in runs)
        return f"{missed} of {len(runs)} runs" if missed else ""


def change(found: Measurements, step: switched.Step, describe: Callable[[State], str]) -> Effect:
    """Return what turning a switch on does to time, samples, quality and minutes."""
    before, after = step.before, step.after
    log_time, log_samples = found.log_ratio(after, before), found.log_samples_ratio(after, before)
    above, below = found.qualities(after), found.qualities(before)
    quality = None
    if above and below:
        quality = amdahl.difference(above, below, found.common_spread(found.qualities))
    minutes, start = None, found.log_samples(before)
    if log_samples is not None and start is not None:
        whole = math.exp(statistics.fmean(start)) * found.seconds(before) / 60
        minutes = amdahl.saved(whole, amdahl.summed([log_time, log_samples]))
    missed = {"without": found.missed(before), "with": found.missed(after)}
    told = " and ".join(f"{count} {name} it" for name, count in missed.items() if count)
    return Effect(
        before=describe(before),
        after=describe(after),
        together=list(step.together),
        reason=step.reason,
        before_ms=1e3 * found.seconds(before),
        after_ms=1e3 * found.seconds(after),
        throughput=amdahl.exponential(amdahl.negative(log_time)),
        samples=amdahl.exponential(log_samples) if log_samples is not None else None,
        quality=quality,
        minutes_saved=minutes,
        note=f"missed by {told}" if told else "",
    )


def ledger_rows(found: Measurements, switches: Switches, cards: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return a row of each switch; `cards` say what it relieves."""
    return [
        Row(
            name=switch.name,
            relieves=list(cards[switch.name]),
            bound=amdahl.bound(cards[switch.name], found.shares),
            alone=change(found, switches.alone(switch), switches.describe),
            left_out=change(found, switches.left_out(switch), switches.describe),
        )
        for switch in switches.switches
    ]


def compositions(found: Measurements, switches: Switches) -> list[Composition]:
    """Return what the switches alone predict of the whole, and what it is: throughput, then minutes."""
    base, whole = State(), switches.all
    steps = [switches.alone(switch) for switch in switches.switches]
    times = [found.log_ratio(step.after, step.before) for step in steps]
    savings = [
        amdahl.saved(found.seconds(step.before), time) for step, time in zip(steps, times, strict=True)
    ]
    measured = [
        Composition(
            of="throughput",
            measured=faster(found.log_ratio(whole, base)),
            product=faster(amdahl.summed(times)),
            added=after_savings(found.base_s, amdahl.summed(savings)),
        )
    ]
    samples = [found.log_samples_ratio(step.after, step.before) for step in steps]
    in_whole, start = found.log_samples_ratio(whole, base), found.log_samples(base)
    known = [each for each in samples if each is not None]
    if in_whole is not None and start is not None and len(known) == len(steps):
        minutes = [amdahl.summed(pair) for pair in zip(times, known, strict=True)]
        effects = [change(found, step, str).minutes_saved for step in steps]
        saved = amdahl.summed([each for each in effects if each is not None])
        total = math.exp(statistics.fmean(start)) * found.base_s / 60
        measured.append(
            Composition(
                of="minutes",
                measured=faster(amdahl.summed([found.log_ratio(whole, base), in_whole])),
                product=faster(amdahl.summed(minutes)),
                added=after_savings(total, saved),
            )
        )
    return measured


def faster(log_ratio: Estimate) -> Estimate:
    """Return a speed-up from the logarithm of a ratio of times."""
    return amdahl.exponential(amdahl.negative(log_ratio))


def after_savings(whole: float, saved: Estimate) -> Estimate | None:
    """Return the speed-up when so much of a time is saved; None when that is all of it, or more."""
    highest = saved.interval.high if saved.interval else saved.value
    if max(highest, saved.value) >= whole:
        return None
    limits = saved.interval
    if limits is not None:
        low, high = (whole / (whole - each) for each in (limits.low, limits.high))
        limits = type(limits)(low=low, high=high, method=limits.method)
    return Estimate(value=whole / (whole - saved.value), interval=limits)


def pairs(found: Measurements, design: Design, held: State) -> list[Pair]:
    """Return each interaction of two factors that the design shows; `held` are on in all of its runs."""
    num_turns = min(len(found.turns[run | held]) for run in design.runs)
    turns = [
        {run: 1e3 * found.base_s * found.turns[run | held][turn] for run in design.runs}
        for turn in range(num_turns)
    ]
    typical = {run: 1e3 * found.seconds(run | held) for run in design.runs}
    measured = []
    for string in design.interactions():
        one, other = sorted(string[0], key=design.factors.index)
        lost = amdahl.median([2 * effect(string[0], responses) for responses in turns])
        single = -sum(effect(Word({name}), typical) for name in (one, other))
        interaction = 2 * effect(string[0], typical)
        measured.append(
            Pair(
                names=[one, other],
                aliases=[spelled(word) for word in string[1:]],
                one_by_one_ms=single + interaction,  # each while the other is off
                together_ms=single,
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
