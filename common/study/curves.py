"""Trade-off curves: final quality against time, one point for each budget of a configuration.

A run's time is run_start to run_stop without its evaluations, which a study makes at its own cadence. The
runs that every budget has, by seed, are the seeds of a curve. INTERPOLATION says how a curve goes between its
points: whoever has more time can train on a smaller budget. tests/common/study/test_simulations.py measures
the coverage of the intervals, and how often two equal configurations seem to cross. No torch is loaded.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import scipy

from common.evidence import intervals
from common.evidence.compare.factors import evaluation_minutes
from common.evidence.intervals import ALPHA, Difference, Estimate, Interval
from common.evidence.log import Log

INTERPOLATION = (
    "a quality is that of the best budget so far, stopped there or at its end, and of straight lines between "
    "the ends of budgets, made isotonic; a time is that of the budget whose runs, stopped at the quality, "
    "need the least, where all of them reach it, and its interval is of runs of this budget that reach it; "
    "after the largest budget `at least` is said; times are without evaluations; 95 % intervals are "
    "Student's over the seeds; differences are paired by seed, with Holm's correction for all times of all "
    "pairs"
)
Bound = Literal["", "at least", "at most"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of a run; `seconds` of training from the start."""

    seconds: float
    samples: float
    quality: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its evaluations in order, of which the last counts."""

    log: str
    seed: int
    way: tuple[Evaluation, ...]

    @property
    def end(self) -> Evaluation:
        return self.way[-1]

    @property
    def line(self) -> "Line":
        return Line(tuple(place.seconds for place in self.way), tuple(place.quality for place in self.way))


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
    """Times, rising, and the qualities there."""

    times: tuple[float, ...]
    qualities: tuple[float, ...]

    def time_at(self, quality: float) -> float | None:
        """Return when a quality is reached for the first time; the first time if it is exceeded there."""
        after = next((place for place, value in enumerate(self.qualities) if value >= quality), None)
        if after is None:
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

    @cached_property
    def mean(self) -> Line:
        """The mean times of the budgets, and the isotonic fit of their mean qualities."""
        qualities = [point.quality.value for point in self.points]
        weights = [len(point.runs) for point in self.points]
        fit = scipy.optimize.isotonic_regression(qualities, weights=weights).x
        return Line(tuple(point.seconds.value for point in self.points), tuple(map(float, fit)))

    @cached_property
    def seeds(self) -> list[tuple[Run, ...]]:
        """The runs of each seed, one a budget: of seeds that every budget has, then in their order."""
        shared = set.intersection(*({run.seed for run in point.runs} for point in self.points))
        ordered = [
            sorted(point.runs, key=lambda run: (run.seed not in shared, run.seed)) for point in self.points
        ]
        return list(zip(*ordered, strict=False))

    @cached_property
    def ends(self) -> list[Line]:
        """A line through the ends of each seed's runs, in the blocks of the isotonic fit of their means."""
        times = np.array([[run.end.seconds for run in runs] for runs in self.seeds])
        times = np.maximum.accumulate(times, axis=1)  # budgets rise in mean time, not for every seed
        qualities = np.array([[run.end.quality for run in runs] for runs in self.seeds])
        blocks = scipy.optimize.isotonic_regression(qualities.mean(axis=0)).blocks
        for first, last in itertools.pairwise(blocks):
            qualities[:, first:last] = qualities[:, first:last].mean(axis=1, keepdims=True)
        return [Line(tuple(time), tuple(quality)) for time, quality in zip(times, qualities, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """The answer to a question on one or two curves; `estimate` is None where there is none.

    A time that is a bound has no interval. `budget` is that of the runs whose time it is. `detectable`: the
    smallest ratio less 1 that the runs could show.
    """

    estimate: Estimate | None = None
    budget: float | None = None
    bound: Bound = ""
    values: tuple[float, ...] = ()  # of the seeds
    detectable: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The difference of two curves at a time, paired by seed; p after Holm for all times of all pairs."""

    seconds: float
    difference: Difference

    @property
    def sign(self) -> int:
        """Return 1 or -1 where the difference is shown, else 0."""
        is_shown = self.difference.p_value is not None and self.difference.p_value < ALPHA
        return (1 if self.difference.value > 0 else -1) if is_shown else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The place where `leader` overtakes `other`, between two times at which each is shown to be ahead."""

    leader: str
    other: str
    seconds: float
    quality: float
    interval: Interval
    is_extended: bool  # beyond the largest budget of one of them


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The gaps of `one` above `other` at the ends of the budgets of both."""

    one: str
    other: str
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The seconds until a quality, by configuration, and how many times fewer than the first one's."""

    quality: float
    seconds: dict[str, Value]
    times_faster: dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The quality within some seconds, by configuration."""

    seconds: float
    quality: dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A comparison of curves, at least one."""

    target: float
    price_per_hour: float | None
    codes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of the runs of each cell
    interpolation: str = INTERPOLATION
    curves: tuple[Curve, ...]
    equal_quality: tuple[Level, ...]
    equal_time: tuple[Moment, ...]
    crossings: tuple[Crossing, ...]
    comparisons: tuple[Comparison, ...]


def make_point(
    budget: float, runs: Sequence[Run], price: float | None = None, resolution: float = 0.0
) -> Point:
    """Return the runs of a budget, at least one; `price` in dollars an hour, `resolution` of a quality."""
    seconds = [run.end.seconds for run in runs]
    return Point(
        budget=budget,
        samples=runs[0].end.samples,
        seconds=intervals.mean(seconds),
        quality=intervals.mean([run.end.quality for run in runs], most=1.0, resolution=resolution),
        cost=None if price is None else intervals.mean([end / 3600 * price for end in seconds]),
        runs=tuple(runs),
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
    """Return the least mean time in which all runs of a budget reach a quality."""
    answers = [
        (times, point.budget, point.runs)
        for point in curve.points
        if len(times := times_to(quality, point.runs)) == len(point.runs)
    ]
    if not answers:
        return Value()
    times, budget, runs = min(answers, key=lambda answer: statistics.fmean(answer[0]))
    estimate = intervals.mean(times)
    if is_exceeded := any(run.way[0].quality > quality for run in runs):
        estimate = Estimate(value=estimate.value, interval=None)
    bound: Bound = "at most" if is_exceeded else ""
    return Value(estimate=estimate, budget=budget, bound=bound, values=tuple(times))


def times_to(quality: float, runs: Sequence[Run]) -> list[float]:
    """Return the seconds of the runs that reach a quality, to it."""
    return [time for run in runs if (time := run.line.time_at(quality)) is not None]


def qualities_at(curve: Curve, moments: Sequence[float]) -> np.ndarray:
    """Return the best quality within each time, a row for each seed; NaN before the first evaluation.

    A budget may be stopped early between the latest first evaluation of its runs and its mean end.
    """
    candidates = [np.stack([np.interp(moments, *line) for line in curve.ends])]
    known = [np.greater_equal(moments, curve.mean.times[0])]
    for end, budget in zip(curve.mean.times, zip(*curve.seeds, strict=True), strict=True):
        lines = [run.line for run in budget]
        start = max(line.times[0] for line in lines)
        known.append(np.greater_equal(moments, start) & np.less_equal(moments, end))
        candidates.append(np.stack([np.interp(moments, *line) for line in lines]))
    values, is_known = np.stack(candidates), np.stack(known)
    best = np.where(is_known, values.mean(axis=1), -math.inf).argmax(axis=0)
    chosen = values[best, :, range(len(moments))].T
    return np.where(is_known.any(axis=0), chosen, math.nan)


def quality_at(curve: Curve, seconds: float, resolution: float = 0.0) -> Value:
    """Return the best quality within a time; nothing before the first evaluation."""
    values = qualities_at(curve, [seconds])[:, 0].tolist()
    if math.isnan(values[0]):
        return Value()
    bound: Bound = "at least" if seconds > curve.mean.times[-1] else ""
    estimate = intervals.mean(values, most=1.0, resolution=resolution)
    return Value(estimate=estimate, bound=bound, values=tuple(values))


def times_faster(first: Value, other: Value) -> Value:
    """Return the time of the first over that of the other; the interval is Welch's, on logarithms.

    If one of them is a bound, so is the ratio; if both are, nothing is known.
    """
    if first.estimate is None or other.estimate is None or (first.bound and other.bound):
        return Value()
    ratio = intervals.ratio(first.values, other.values)
    bound: Bound = "at most" if first.bound else "at least" if other.bound else ""
    if bound:
        return Value(estimate=Estimate(value=ratio.value, interval=None), bound=bound)
    return Value(estimate=Estimate(value=ratio.value, interval=ratio.interval), detectable=ratio.detectable)


def compare_pairs(pairs: Sequence[tuple[Curve, Curve]], resolution: float = 0.0) -> list[Comparison]:
    """Compare the curves of each pair at the ends of their budgets, from the later first evaluation on.

    Holm's correction is for all times of all pairs. `resolution` is the step of a quality.
    """
    gaps = [paired_gaps(*pair) for pair in pairs]
    families = [values for moments in gaps for values in moments.values()]
    differences = iter(intervals.paired_family(families, resolution))
    return [
        Comparison(
            one=one.configuration,
            other=other.configuration,
            gaps=tuple(Gap(seconds=moment, difference=next(differences)) for moment in moments),
        )
        for (one, other), moments in zip(pairs, gaps, strict=True)
    ]


def paired_gaps(one: Curve, other: Curve) -> dict[float, np.ndarray]:
    """Return the differences of quality by time, of the seeds that all budgets of both curves have."""
    ends = sorted({*one.mean.times, *other.mean.times})
    rows = [
        {runs[0].seed: row for row, runs in enumerate(curve.seeds) if len({run.seed for run in runs}) == 1}
        for curve in (one, other)
    ]
    shared = sorted(rows[0].keys() & rows[1].keys())
    above, below = (
        qualities_at(curve, ends)[[of_seed[seed] for seed in shared]]
        for curve, of_seed in zip((one, other), rows, strict=True)
    )
    gaps = dict(zip(ends, (above - below).T, strict=True))
    return {moment: values for moment, values in gaps.items() if shared and not np.isnan(values).any()}


def find_crossings(one: Curve, other: Curve, gaps: Sequence[Gap]) -> Iterator[Crossing]:
    """Yield the changes of sign between significant gaps, by time; mean gaps in between tell the place."""
    shown = [place for place, gap in enumerate(gaps) if gap.sign]
    for before, after in itertools.pairwise(shown):
        sign = gaps[after].sign
        if sign == gaps[before].sign:
            continue
        between = range(before + 1, after + 1)
        first = next(place for place in between if gaps[place].difference.value * sign > 0)
        low, high = (gaps[place].difference.value for place in (first - 1, first))
        start, end = gaps[first - 1].seconds, gaps[first].seconds
        seconds = start + (end - start) * low / (low - high)
        leader, behind = (one, other) if sign > 0 else (other, one)
        method = "paired differences exclude 0 at both ends, Holm over all times of all pairs"
        yield Crossing(
            leader=leader.configuration,
            other=behind.configuration,
            seconds=seconds,
            quality=float(qualities_at(leader, [seconds]).mean()),
            interval=Interval(low=gaps[before].seconds, high=gaps[after].seconds, method=method),
            is_extended=seconds > min(one.mean.times[-1], other.mean.times[-1]),
        )


def compare_curves(
    curves: Sequence[Curve], *, target: float, price: float | None, resolution: float = 0.0
) -> Answers:
    """Compare curves: times at the qualities of the first one and at the target, qualities at its times and
    at the ends of the others, and where two cross. `resolution` is the step of a quality.
    """
    first, *others = curves
    levels = sorted({target, *(point.quality.value for point in first.points)})
    moments = sorted({*first.mean.times, *(curve.mean.times[-1] for curve in others)})
    pairs = list(itertools.combinations(curves, 2))
    comparisons = compare_pairs(pairs, resolution)
    crossings = (
        find_crossings(*pair, comparison.gaps) for pair, comparison in zip(pairs, comparisons, strict=True)
    )
    return Answers(
        target=target,
        price_per_hour=price,
        curves=tuple(curves),
        equal_quality=tuple(compare_times(curves, level) for level in levels),
        equal_time=tuple(
            Moment(
                seconds=moment,
                quality={curve.configuration: quality_at(curve, moment, resolution) for curve in curves},
            )
            for moment in moments
        ),
        crossings=tuple(itertools.chain.from_iterable(crossings)),
        comparisons=tuple(comparisons),
    )


def compare_times(curves: Sequence[Curve], quality: float) -> Level:
    seconds = {curve.configuration: time_at(curve, quality) for curve in curves}
    first, *others = seconds
    faster = {name: times_faster(seconds[first], seconds[name]) for name in others}
    return Level(quality=quality, seconds=seconds, times_faster=faster)
