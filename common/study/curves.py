"""Trade-off curves: final quality against time, one point for each budget of a configuration.

A run's time is run_start to run_stop without its evaluations, which a study makes at its own cadence. A curve
goes straight from one budget to the next and never falls: whoever has more time can train on a smaller
budget. For the same reason it stays level after its largest budget; before its smallest it has no value.
Runs of one seed make a curve of their own, and those of seeds that not every budget has, in their order;
intervals are over these. Parsed logs in, no torch.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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

    def quality_at(self, seconds: float) -> float:
        """Interpolate; before the first time it is the first quality."""
        return float(np.interp(seconds, self.times, self.qualities))

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


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A comparison of curves, at least one.

    `equal_quality`: the seconds until a quality, by configuration, and how many times fewer than the first.
    `equal_time`: the quality within some seconds, by configuration.
    """

    target: float
    price_per_hour: float | None
    interpolation: str = INTERPOLATION
    curves: tuple[Curve, ...]
    equal_quality: tuple[dict[str, Any], ...]
    equal_time: tuple[dict[str, Any], ...]
    crossings: tuple[Crossing, ...]


def line(places: Iterable[tuple[float, float]]) -> Line:
    """Return places (seconds, quality) by time, each quality at least that of the one before."""
    times, qualities = zip(*sorted(places), strict=True)
    return Line(times, tuple(itertools.accumulate(qualities, max)))


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


def read_run(log: Log) -> Run:
    way = tuple(
        Evaluation(
            seconds=60 * (point.minutes - evaluation_minutes(log, point.minutes)),
            samples=point.samples or 0.0,
            quality=point.accuracy,
        )
        for point in log.curve
    )
    seed = log.value("seed")
    return Run(log=log.path, seed=seed if isinstance(seed, int) else -1, way=way)


def time_at(curve: Curve, quality: float) -> Value:
    """Return when a quality is reached, by each seed's curve where all reach it, else by their mean."""
    seeds = curve.seeds
    for lines in (seeds, [curve.mean]):
        times = [time for line in lines if (time := line.time_at(quality)) is not None]
        if len(times) < len(lines):
            continue
        is_bound = any(quality < line.qualities[0] for line in lines)
        interval = None if is_bound else intervals.mean(times).interval
        return Value(
            estimate=Estimate(value=statistics.fmean(times), interval=interval),
            bound="at most" if is_bound else "",
            values=tuple(times) if lines is seeds else (),
        )
    return Value()


def quality_at(curve: Curve, seconds: float) -> Value:
    """Return the best quality within a time, which the curve's first point is within."""
    times = curve.mean.times
    if seconds < times[0]:
        return Value()
    values = tuple(line.quality_at(seconds) for line in curve.seeds)
    return Value(
        estimate=Estimate(value=statistics.fmean(values), interval=intervals.mean(values).interval),
        bound="at least" if seconds > times[-1] else "",
        values=values,
    )


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
    bound: Bound = "at most" if first.bound else "at least" if other.bound else ""
    return Value(estimate=Estimate(value=centre, interval=None if bound else limits), bound=bound)


def gaps(one: Line, other: Line) -> list[tuple[float, float]]:
    """List how far the first line lies above the other, at each point's time that both have."""
    first = max(one.times[0], other.times[0])
    times = sorted({first, *(time for time in (*one.times, *other.times) if time > first)})
    return [(time, one.quality_at(time) - other.quality_at(time)) for time in times]


def find_overtakings(one: Line, other: Line) -> list[tuple[float, bool]]:
    """Find the times at which the first line overtakes the other (True) or is overtaken (False)."""
    overtakings, sign, before, low = [], 0.0, 0.0, 0.0
    for time, gap in gaps(one, other):
        if gap * sign < 0:
            overtakings.append((before + (time - before) * low / (low - gap), gap > 0))
        sign, before, low = gap or sign, time, gap
    return overtakings


def crossings(one: Curve, other: Curve) -> Iterator[Crossing]:
    """Yield where the curves cross, by time."""
    of_mean, limits = find_overtakings(one.mean, other.mean), None
    of_seeds = [find_overtakings(*pair) for pair in zip(one.seeds, other.seeds, strict=False)]
    if len(of_mean) == 1 and len(of_seeds) > 1:
        above = of_mean[0][1]
        if all([is_above for _, is_above in seed] == [above] for seed in of_seeds):
            mean = intervals.mean([seed[0][0] for seed in of_seeds])
            of_mean, limits = [(mean.value, above)], mean.interval
    for seconds, is_one_above in of_mean:
        leader, behind = (one, other) if is_one_above else (other, one)
        yield Crossing(
            leader=leader.configuration,
            other=behind.configuration,
            seconds=seconds,
            quality=leader.mean.quality_at(seconds),
            interval=limits,
            is_extended=seconds > min(one.mean.times[-1], other.mean.times[-1]),
        )


def leader(one: Curve, other: Curve) -> str:
    """Return which curve lies above, at any time that both have, where they never cross; '' if neither."""
    gap = sum(gap for _, gap in gaps(one.mean, other.mean))
    return one.configuration if gap > 0 else other.configuration if gap < 0 else ""


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
        curves=tuple(curves),
        equal_quality=tuple(equal_quality(curves, level) for level in levels),
        equal_time=tuple(
            {
                "seconds": moment,
                "quality": {curve.configuration: quality_at(curve, moment) for curve in curves},
            }
            for moment in moments
        ),
        crossings=tuple(
            crossing for pair in itertools.combinations(curves, 2) for crossing in crossings(*pair)
        ),
    )


def equal_quality(curves: Sequence[Curve], level: float) -> dict[str, Any]:
    seconds = {curve.configuration: time_at(curve, level) for curve in curves}
    first, *others = seconds
    faster = {name: times_faster(seconds[first], seconds[name]) for name in others}
    return {"quality": level, "seconds": seconds, "times_faster": faster}
