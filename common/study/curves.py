"""Trade-off curves: final quality against time, one point for each budget of a configuration.

A run's time is run_start to run_stop without its evaluations, which a study makes at its own cadence. A curve
goes straight from one budget to the next and never falls: whoever has more time can train on a smaller
budget. For the same reason it stays level after its largest budget; before its smallest it has no value.
Runs of one seed make a curve of their own, and those of seeds that not every budget has, in their order;
intervals are over these. Parsed logs in, no torch.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from common.evidence import intervals
from common.evidence.compare.factors import evaluation_minutes
from common.evidence.intervals import Estimate, Interval
from common.evidence.log import Log

INTERPOLATION = (
    "curves are straight between budgets, never fall, and stay level after the largest: `at least` is said "
    "there, `at most` of what the smallest budget exceeds; times are without evaluations; 95 % intervals are "
    "over the seeds"
)
Bound = Literal["", "at least", "at most"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A place on the way of one run."""

    seconds: float
    samples: float
    quality: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its way, the last place of which counts."""

    log: str
    seed: int
    way: tuple[Evaluation, ...]

    @property
    def end(self) -> Evaluation:
        return self.way[-1]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The runs of one budget, at least one; `cost` in dollars, None without a price."""

    budget: float
    samples: float
    seconds: Estimate
    quality: Estimate
    cost: Estimate | None
    runs: tuple[Run, ...]


class Line(NamedTuple):
    """Times, rising, and qualities that never fall."""

    times: tuple[float, ...]
    qualities: tuple[float, ...]

    def quality_at(self, seconds: float) -> float | None:
        return float(np.interp(seconds, self.times, self.qualities)) if seconds >= self.times[0] else None

    def time_at(self, quality: float) -> float | None:
        after = int(np.searchsorted(self.qualities, quality))
        if after == len(self.times):
            return None
        if after == 0:
            return self.times[0]
        share = (quality - self.qualities[after - 1]) / (self.qualities[after] - self.qualities[after - 1])
        return self.times[after - 1] + share * (self.times[after] - self.times[after - 1])


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of one configuration, at least one, by time."""

    configuration: str
    points: tuple[Point, ...]

    @property
    def mean(self) -> Line:
        return line((point.seconds.value, point.quality.value) for point in self.points)

    @property
    def seeds(self) -> list[Line]:
        """A curve for each run that every budget has: by seeds that all have, then in their order."""
        shared = set.intersection(*({run.seed for run in point.runs} for point in self.points))
        ordered = [
            sorted(point.runs, key=lambda run: (run.seed not in shared, run.seed)) for point in self.points
        ]
        ends = ([run.end for run in runs] for runs in zip(*ordered, strict=False))
        return [line((end.seconds, end.quality) for end in runs) for runs in ends]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The answer to a question on one or two curves; `estimate` is None where there is none.

    Where each seed has one it is their mean, else the mean curve's. A time that is a bound has no interval.
    """

    estimate: Estimate | None = None
    bound: Bound = ""
    values: tuple[float, ...] = ()  # of the seeds, where each has an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The place where `leader` overtakes `other`; `interval` is None unless all seeds' curves do so once."""

    leader: str
    other: str
    seconds: float
    quality: float
    interval: Interval | None
    is_extended: bool  # beyond the largest budget of one of them


def line(places: Iterable[tuple[float, float]]) -> Line:
    """Return places (seconds, quality) by time, each quality at least that of the one before."""
    times, qualities = zip(*sorted(places), strict=True)
    return Line(times, tuple(itertools.accumulate(qualities, max)))


def read_run(log: Log) -> Run:
    """Return the way of a finished run, which has at least one evaluation."""
    way = tuple(
        Evaluation(
            seconds=60 * (point.minutes - evaluation_minutes(log, point.minutes)),
            samples=point.samples or 0.0,
            quality=point.accuracy,
        )
        for point in log.curve
    )
    value = log.value("seed")
    return Run(log=log.path, seed=value if isinstance(value, int) else -1, way=way)


def read_point(budget: float, logs: Sequence[Log], price: float | None) -> Point:
    """Return the finished runs of a budget, at least one; `price` in dollars an hour of this system."""
    runs = tuple(map(read_run, logs))
    return Point(
        budget=budget,
        samples=runs[0].end.samples,
        seconds=intervals.mean([run.end.seconds for run in runs]),
        quality=intervals.mean([run.end.quality for run in runs]),
        cost=None if price is None else intervals.mean([run.end.seconds / 3600 * price for run in runs]),
        runs=runs,
    )


def time_at(curve: Curve, quality: float) -> Value:
    known = _answered([line.time_at(quality) for line in curve.seeds])
    centre = statistics.fmean(known) if known else curve.mean.time_at(quality)
    if centre is None:
        return Value()
    if any(quality < line.qualities[0] for line in (curve.seeds if known else [curve.mean])):
        return Value(estimate=Estimate(value=centre, interval=None), bound="at most", values=known)
    return Value(estimate=Estimate(value=centre, interval=_interval(known)), values=known)


def quality_at(curve: Curve, seconds: float) -> Value:
    """Return the best quality within a time, which the curve's first point is within."""
    centre = curve.mean.quality_at(seconds)
    if centre is None:
        return Value()
    known = _answered([line.quality_at(max(seconds, line.times[0])) for line in curve.seeds])
    return Value(
        estimate=Estimate(value=statistics.fmean(known) if known else centre, interval=_interval(known)),
        bound="at least" if seconds > curve.mean.times[-1] else "",
        values=known,
    )


def _answered(of_seeds: Sequence[float | None]) -> tuple[float, ...]:
    known = tuple(value for value in of_seeds if value is not None)
    return known if len(known) == len(of_seeds) else ()


def _interval(values: Sequence[float]) -> Interval | None:
    return intervals.mean(values).interval if values else None


def times_faster(first: Value, other: Value) -> Value:
    """Return the time of the first over that of the other; the interval is Welch's, on logarithms.

    A bound of one makes it one; where both are bounds nothing is known.
    """
    if first.estimate is None or other.estimate is None or (first.bound and other.bound):
        return Value()
    centre, limits = first.estimate.value / other.estimate.value, None
    if first.values and other.values:
        ratio = intervals.ratio(first.values, other.values)
        centre, limits = ratio.value, ratio.interval
    if first.bound or other.bound:
        bound: Bound = "at most" if first.bound else "at least"
        return Value(estimate=Estimate(value=centre, interval=None), bound=bound)
    return Value(estimate=Estimate(value=centre, interval=limits))


def crossings(one: Curve, other: Curve) -> list[Crossing]:
    """Return where the curves cross, by time."""
    crossings = []
    of_seeds = [_sign_changes(*pair) for pair in zip(one.seeds, other.seeds, strict=False)]
    changes = _sign_changes(one.mean, other.mean)
    limits = None
    is_once = len(of_seeds) > 1 and len(changes) == 1
    if is_once and all([above for _, above in seed] == [changes[0][1]] for seed in of_seeds):
        mean = intervals.mean([seed[0][0] for seed in of_seeds])
        changes, limits = [(mean.value, changes[0][1])], mean.interval
    for seconds, is_one_above in changes:
        leader, behind = (one, other) if is_one_above else (other, one)
        crossings.append(
            Crossing(
                leader=leader.configuration,
                other=behind.configuration,
                seconds=seconds,
                quality=leader.mean.quality_at(seconds) or 0.0,
                interval=limits,
                is_extended=seconds > min(one.mean.times[-1], other.mean.times[-1]),
            )
        )
    return crossings


def _sign_changes(one: Line, other: Line) -> list[tuple[float, bool]]:
    """Find the times at which one line overtakes the other (True) or is overtaken (False)."""
    first = max(one.times[0], other.times[0])
    times = sorted({first, *(time for time in (*one.times, *other.times) if time > first)})
    changes, sign, before, low = [], 0.0, first, 0.0
    for time in times:
        gap = (one.quality_at(time) or 0.0) - (other.quality_at(time) or 0.0)
        if gap * sign < 0:
            changes.append((before + (time - before) * low / (low - gap), gap > 0))
        sign, before, low = gap or sign, time, gap
    return changes


def leader(one: Curve, other: Curve) -> str:
    """Return which curve lies above, at any time that both have, where they never cross; '' if neither."""
    first = max(one.mean.times[0], other.mean.times[0])
    times = [first, *(time for time in (*one.mean.times, *other.mean.times) if time > first)]
    gap = sum((one.mean.quality_at(time) or 0.0) - (other.mean.quality_at(time) or 0.0) for time in times)
    return one.configuration if gap > 0 else other.configuration if gap < 0 else ""


@dataclass(frozen=True, kw_only=True)
class EqualQuality:
    """The seconds until a quality, by configuration, and how many times fewer than the first needs."""

    quality: float
    seconds: dict[str, Value]
    times_faster: dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class EqualTime:
    """The quality within a time, by configuration."""

    seconds: float
    quality: dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A comparison of curves, at least one."""

    target: float
    price_per_hour: float | None
    interpolation: str
    curves: tuple[Curve, ...]
    equal_quality: tuple[EqualQuality, ...]
    equal_time: tuple[EqualTime, ...]
    crossings: tuple[Crossing, ...]


def compare_curves(curves: Sequence[Curve], *, target: float, price: float | None) -> Answers:
    """Compare curves: times at the qualities of the first one and at the target, qualities at its times and
    at the ends of the others, and where two cross.
    """
    first, *others = curves
    levels = sorted({target, *(point.quality.value for point in first.points)})
    moments = sorted({*first.mean.times, *(curve.mean.times[-1] for curve in others)})
    return Answers(
        target=target,
        price_per_hour=price,
        interpolation=INTERPOLATION,
        curves=tuple(curves),
        equal_quality=tuple(equal_quality(curves, level) for level in levels),
        equal_time=tuple(
            EqualTime(
                seconds=moment, quality={curve.configuration: quality_at(curve, moment) for curve in curves}
            )
            for moment in moments
        ),
        crossings=tuple(cross for one, other in pairs(curves) for cross in crossings(one, other)),
    )


def pairs(curves: Sequence[Curve]) -> list[tuple[Curve, Curve]]:
    """Return each two curves once."""
    return list(itertools.combinations(curves, 2))


def equal_quality(curves: Sequence[Curve], level: float) -> EqualQuality:
    """Return when each curve reaches a quality."""
    seconds = {curve.configuration: time_at(curve, level) for curve in curves}
    first, *others = seconds
    faster = {name: times_faster(seconds[first], seconds[name]) for name in others}
    return EqualQuality(quality=level, seconds=seconds, times_faster=faster)
