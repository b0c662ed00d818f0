"""Simulated sweeps with a known truth, and how often their rules are wrong; simulations.py has the table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.evidence import intervals
from common.study import curves
from common.study.curves import Curve, Evaluation, Point, Run

NUM_STUDIES = 2000
BUDGETS = np.array([0.15, 0.3, 0.5, 0.75, 1.0])
SHARES = np.arange(1, 7) / 6  # of a run, where it is evaluated
WHOLE_S = 60.0
TIME_SPREAD, QUALITY_SPREAD = 0.05, 0.008  # of a run's logarithmic time; of a measured quality


@dataclass(frozen=True)
class Truth:
    """The expected quality of every budget at every evaluation; `asymptote` minus a gap that training closes.

    A run that ends sooner than planned has not had its learning rate lowered, and is worse for it.
    """

    asymptote: float
    gap: float
    speed: float

    def qualities(self) -> np.ndarray:
        """Return them, budgets by evaluations."""
        samples = BUDGETS[:, None] * SHARES
        reached = self.asymptote - self.gap * np.exp(-self.speed * samples)
        return np.asarray(reached * (1 - 0.15 * (1 - SHARES)))


RISING, SATURATING, LEVEL = Truth(0.9, 0.6, 3.0), Truth(0.96, 0.5, 9.0), Truth(0.95, 0.0, 0.0)
SOONER = Truth(0.96, 0.5, 12.0)  # than SATURATING, to the same asymptote


def simulate_curves(
    truth: Truth,
    num_seeds: int,
    generator: np.random.Generator,
    num_studies: int = NUM_STUDIES,
    *,
    num_images: int = 0,
    time_spread: float = TIME_SPREAD,
) -> Iterator[Curve]:
    """Yield curves of one truth: run times vary by `time_spread`, each measured quality by 0.8 points.

    With `num_images` a quality is the accuracy on so many.
    """
    shape = (num_studies, num_seeds, len(BUDGETS))
    pace = np.exp(time_spread * generator.standard_normal((*shape, 1)))
    times = WHOLE_S * BUDGETS[:, None] * SHARES * pace
    noise = QUALITY_SPREAD * generator.standard_normal((*shape, len(SHARES)))
    qualities = truth.qualities() + noise
    if num_images:
        qualities = np.round(qualities * num_images) / num_images
    yield from map(make_curve, times, qualities)


def make_curve(times: np.ndarray, qualities: np.ndarray) -> Curve:
    """Return the curve of seeds x budgets x evaluations."""
    points = []
    ways = np.stack([times, qualities], axis=-1).swapaxes(0, 1).tolist()
    for budget, of_seeds in zip(BUDGETS.tolist(), ways, strict=True):
        runs = [
            Run(log="", seed=seed, way=tuple(Evaluation(seconds=s, samples=s, quality=q) for s, q in way))
            for seed, way in enumerate(of_seeds)
        ]
        point = Point(
            budget=budget,
            samples=0.0,
            seconds=plain_mean([run.end.seconds for run in runs]),
            quality=plain_mean([run.end.quality for run in runs]),
            cost=None,
            runs=tuple(runs),
        )
        points.append(point)
    return Curve(configuration="", points=tuple(points))


def plain_mean(values: Sequence[float]) -> intervals.Estimate:
    """Return a mean without an interval, which no rule reads and which takes its time."""
    return intervals.Estimate(value=float(np.mean(values)), interval=None)


def holds(interval: intervals.Interval | None, value: float) -> bool:
    return interval is not None and interval.holds(value)


def frontier_quality(
    truth: Truth,
    num_seeds: int,
    seconds: float,
    generator: np.random.Generator,
    *,
    time_spread: float = TIME_SPREAD,
) -> Iterator[bool]:
    times = WHOLE_S * BUDGETS[:, None] * SHARES * math.exp(time_spread**2 / 2)
    expected = curves.qualities_at(make_curve(times[None], truth.qualities()[None]), [seconds])[0, 0]
    for curve in simulate_curves(truth, num_seeds, generator, time_spread=time_spread):
        if estimate := curves.quality_at(curve, seconds).estimate:
            yield holds(estimate.interval, float(expected))


def frontier_time(
    truth: Truth, num_seeds: int, quality: float, generator: np.random.Generator
) -> Iterator[bool]:
    expected = expect_times(truth, quality, generator)
    for curve in simulate_curves(truth, num_seeds, generator):
        time = curves.time_at(curve, quality)
        if time.estimate and time.budget and not time.bound:
            yield holds(time.estimate.interval, expected[time.budget])


def expect_times(truth: Truth, quality: float, generator: np.random.Generator) -> dict[float, float]:
    """Average the seconds to a quality, of each budget's runs that reach it among 5,000."""
    (many,) = simulate_curves(truth, 5_000, generator, 1)
    times = {point.budget: curves.times_to(quality, point.runs) for point in many.points}
    return {budget: float(np.mean(some)) for budget, some in times.items() if some}


def false_crossings(
    one: Truth, other: Truth, num_seeds: int, generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether two curves that do not cross seem to."""
    ones, others = (simulate_curves(truth, num_seeds, generator) for truth in (one, other))
    for first, second in zip(ones, others, strict=True):
        (compared,) = curves.compare_pairs([(first, second)])
        yield any(curves.find_crossings(first, second, compared.gaps))


def false_leads(
    truth: Truth, num_images: int, num_seeds: int, generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether one of two equal curves is shown to be ahead at some time."""
    ones, others = (simulate_curves(truth, num_seeds, generator, num_images=num_images) for _ in range(2))
    for first, second in zip(ones, others, strict=True):
        (compared,) = curves.compare_pairs([(first, second)], 1 / num_images)
        yield any(gap.sign for gap in compared.gaps)


def sweep_ratio(
    one: Truth, other: Truth, num_seeds: int, quality: float, generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether the interval of a ratio of times to a quality holds that of the expected times."""
    expected = [expect_times(truth, quality, generator) for truth in (one, other)]
    studies = (simulate_curves(truth, num_seeds, generator) for truth in (one, other))
    for pair in zip(*studies, strict=True):
        first, second = (curves.time_at(curve, quality) for curve in pair)
        ratio = curves.times_faster(first, second)
        if ratio.estimate and first.budget and second.budget and not ratio.bound:
            yield holds(ratio.estimate.interval, expected[0][first.budget] / expected[1][second.budget])
