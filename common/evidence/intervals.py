"""Confidence intervals of means and ratios, tests of difference and equivalence, and their power.

Times, samples and rates vary by a percentage, so ratios are computed on logarithms. Inputs are numbers, not
logs of runs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import scipy  # loads each of its parts where it is first used

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE  # two-sided for differences, one-sided twice for equivalence
POWER = 0.8
LARGEST_EXPONENT = 700.0  # exp of it is still a float
Values = Sequence[float] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval and the name of its method; 95 % unless that states another."""

    low: float
    high: float
    method: str

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean of runs with its interval (None for a single run)."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of paired differences with its 95 % interval; the rest is None for a single difference.

    `p_value` tests a mean of 0, two-sided, corrected for the tests beside it. `detectable`: `paired_family`.
    """

    value: float
    interval: Interval | None
    p_value: float | None
    detectable: float | None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Geometric mean of some runs over that of others; the rest is None where a side has fewer than two runs.

    `interval` (95 %) and `equivalence` (90 %, for two one-sided tests at 5 %) are Welch's t on logarithms.
    `detectable`: the smallest difference, as a fraction, that so many runs show with 80 % probability.
    """

    value: float
    interval: Interval | None
    equivalence: Interval | None
    detectable: float | None

    def is_within(self, margin: float) -> bool:
        """True if two one-sided tests place the ratio between 1 / (1 + margin) and 1 + margin."""
        limits = self.equivalence
        return limits is not None and 1 / (1 + margin) < limits.low and limits.high < 1 + margin


def mean(values: Values, least: float = 0.0, most: float = math.inf, *, resolution: float = 0.0) -> Estimate:
    """Return the mean of at least one value, on the plain scale, where the parts of a time add up.

    The interval is clipped to the possible values, `least` to `most`. `resolution`: see `rounding_squares`.
    """
    centre, limits = float(np.mean(values)), None
    if len(values) > 1:
        half = half_width(values, resolution=resolution)
        low, high = max(centre - half, least), min(centre + half, most)
        limits = Interval(low=low, high=high, method="Student-t")
    return Estimate(value=centre, interval=limits)


def half_width(values: Values, *, resolution: float = 0.0) -> float:
    """Return half of Student's interval of the mean of at least two values, on the plain scale."""
    return student_t(len(values) - 1) * deviation(values, resolution) / math.sqrt(len(values))


def standard_error(values: Values, resolution: float = 0.0) -> float:
    return deviation(values, resolution) / math.sqrt(len(values))


def deviation(values: Values, resolution: float = 0.0) -> float:
    """Return the standard deviation of at least two values; `resolution`: see `rounding_squares`."""
    rounding = rounding_squares(len(values), resolution) / (len(values) - 1)
    return math.sqrt(float(np.var(values, ddof=1)) + rounding)


def rounding_squares(counts: Any, resolution: float) -> Any:
    """Return the part of rounding in the sum of squares of `counts` differences (a number or an array).

    `resolution` is the step of the subtracted values, such as 1 / images for an accuracy, else 0. Each of the
    two roundings adds step^2 / 12, so that differences that are equal by chance do not prove a small
    deviation. For single values, which are rounded once, the result is twice too large.
    """
    return counts * resolution**2 / 6


def rate(amounts: Sequence[float], durations: Sequence[float]) -> Estimate:
    """Return the sum of amounts over the sum of (positive) durations, with the ratio estimator's interval."""
    value, limits = math.fsum(amounts) / math.fsum(durations), None
    if len(amounts) > 1:
        residuals = np.subtract(amounts, np.multiply(durations, value))
        error = math.sqrt(float(np.sum(residuals**2)) / (len(amounts) - 1) / len(amounts))
        half = student_t(len(amounts) - 1) * error / float(np.mean(durations))
        limits = Interval(low=max(value - half, 0.0), high=value + half, method="Student-t, ratio of means")
    return Estimate(value=value, interval=limits)


def median(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median and its interval between two order statistics, which holds for any distribution.

    The interval is None where the values are too few: below 6 at 95 %, below 8 at 99 %.
    """
    centre, limits = float(np.median(values)), None
    test = scipy.stats.quantile_test(values, q=centre, p=0.5)
    low, high = map(float, test.confidence_interval(confidence))
    if low <= high:  # not NaN
        limits = Interval(low=low, high=high, method="order statistics of turns")
    return Estimate(value=centre, interval=limits)


def error_factors(ratios: Iterable[float]) -> tuple[float, float]:
    """Return the factors by which predictions are wrong, geometric mean and largest, from their `ratios`."""
    errors = [abs(math.log(ratio)) for ratio in ratios]
    return math.exp(sum(errors) / len(errors)), math.exp(max(errors))


def prediction_half_width(deviation: float, num_values: float, confidence: float = CONFIDENCE) -> float:
    """Return half of Student's interval for one further value, from the deviation of `num_values`."""
    return student_t(num_values - 1, confidence) * deviation * math.sqrt(1 + 1 / num_values)


def student_of_logs(values: Sequence[float]) -> Interval | None:
    """Return Student's interval of the geometric mean; None below two values.

    In simulation it holds the expected score of 5 or 10 runs in 95 % of trials, in 89 to 95 % where times are
    exponential, alone or beyond as long a fixed time. A BCa bootstrap of the score holds it in 90 to 92 and
    89 to 91 %: the runs are too few.
    """
    if len(values) < 2:
        return None
    logs = np.log(values)
    centre, half = float(np.mean(logs)), half_width(logs)
    return _exponential((centre - half, centre + half), "Student-t on log minutes")


def ratio(above: Values, below: Values) -> Ratio:
    """Compare two groups of positive values, at least one each.

    Where the smaller group varies more, the interval holds too seldom: common/study/SIMULATIONS.md.
    """
    a, b = np.log(above), np.log(below)
    value = _exp(float(np.mean(a) - np.mean(b)))
    if min(len(a), len(b)) < 2:
        return Ratio(value=value, interval=None, equivalence=None, detectable=None)
    return Ratio(
        value=value,
        interval=_exponential(welch_limits(a, b, CONFIDENCE), "Welch-t on logarithms"),
        equivalence=_exponential(welch_limits(a, b, 1 - 2 * ALPHA), "Welch-t on logarithms, 90 %"),
        detectable=detectable(a, b),
    )


def welch_limits(a: np.ndarray, b: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return Welch's limits of the mean of `a` less that of `b`, two values at least on each side.

    They are those of `scipy.stats.ttest_ind(a, b, equal_var=False)`, without the time to load scipy.stats.
    """
    error, freedom = welch_error(a, b)
    centre, half = float(np.mean(a) - np.mean(b)), student_t(freedom, confidence) * error
    return centre - half, centre + half


def welch_error(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Welch's standard error of the difference of means, and its degrees of freedom."""
    of_a, of_b = (float(np.var(values, ddof=1)) / len(values) for values in (a, b))
    if of_a + of_b == 0:
        return 0.0, len(a) + len(b) - 2
    freedom = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    return math.sqrt(of_a + of_b), freedom


def paired_family(families: Iterable[Values], resolution: float = 0.0) -> list[Difference]:
    """Test whether the mean of each group of differences is 0; p values after Holm for all groups.

    The intervals are not corrected. `detectable` is the mean that Holm's strictest step, a test at 5 % /
    number of groups, finds with 80 % probability. `resolution`: see `rounding_squares`.
    """
    groups = [np.asarray(values, dtype=float) for values in families]
    raw = [paired_p_value(values, resolution) for values in groups]
    adjusted = holm([1.0 if value is None else value for value in raw])
    return [
        Difference(
            value=float(np.mean(values)),
            interval=mean(values, least=-math.inf, resolution=resolution).interval,
            p_value=None if value is None else corrected,
            detectable=None
            if value is None
            else detectable_shift(len(values) - 1, ALPHA / len(groups)) * standard_error(values, resolution),
        )
        for values, value, corrected in zip(groups, raw, adjusted, strict=True)
    ]


def paired_p_value(differences: np.ndarray, resolution: float = 0.0) -> float | None:
    """Compute the two-sided p of Student's t of at least two differences; None for one."""
    if len(differences) < 2:
        return None
    error = standard_error(differences, resolution)
    return two_sided_p(float(np.mean(differences)), error, len(differences) - 1)


def two_sided_p(value: float, error: float, freedom: float) -> float:
    """Return the two-sided p of a value by Student's t. Without an error: 1 for a value of 0, else 0."""
    if error == 0:
        return 0.0 if value else 1.0
    return float(2 * scipy.special.stdtr(freedom, -abs(value) / error))


def outlier_p_value(value: float, others: Values) -> float:
    """Return the one-sided p of so large a value from the normal distribution of two or more others."""
    error = float(np.std(others, ddof=1)) * math.sqrt(1 + 1 / len(others))
    p_value = two_sided_p(value - float(np.mean(others)), error, len(others) - 1)
    return p_value / 2 if value > np.mean(others) else 1 - p_value / 2


def sign_p_value(values: Values, null: float = 0.0, *, is_above: bool = False) -> float:
    """Return the p of the sign test of a median equal to `null`; with `is_above`, of one not above `null`."""
    above, below = (int(np.sum(side)) for side in (np.greater(values, null), np.less(values, null)))
    if not above + below:
        return 1.0
    return sign_test(above, above + below, "greater" if is_above else "two-sided")


@cache  # studies ask for the same few numbers thousands of times
def sign_test(above: int, number: int, alternative: str = "two-sided") -> float:
    return float(scipy.stats.binomtest(above, number, alternative=alternative).pvalue)


def sign_detectable(values: Values, alpha: float) -> float | None:
    """Return the median that the sign test at `alpha` shows with 80 % probability; None if so few cannot.

    Chance is taken as normal, with the deviation of these values. At least their median.
    """
    number = len(values)
    signs = next((n for n in range(number // 2 + 1, number + 1) if sign_test(n, number) < alpha), None)
    if signs is None:
        return None
    share = scipy.special.betaincinv(signs, number - signs + 1, POWER)  # of turns with this sign
    return max(float(scipy.special.ndtri(share)) * deviation(values), abs(float(np.median(values))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm 1979, Scandinavian Journal of Statistics 6, 65-70).

    At a level of 5 %, the probability that any true hypothesis is rejected is at most 5 %, however the tests
    depend on each other.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def least_equal_mean(mean: float, deviation: float, num_values: int, num_others: int) -> float:
    """Return the smallest mean of others that a one-sided t-test at 5 % does not tell from `mean`.

    Both groups have the same deviation.
    """
    error = deviation * math.sqrt(1 / num_values + 1 / num_others)
    return mean - student_t(num_values + num_others - 2, 1 - 2 * ALPHA) * error


@cache
def detectable_shift(freedom: float, alpha: float = ALPHA) -> float:
    """Return how many standard errors a two-sided t-test finds with 80 % probability (noncentral t)."""
    critical = student_t(freedom, 1 - alpha)

    def missing_power(shift: float) -> float:
        missed = float(scipy.special.nctdtr(freedom, shift, critical))  # less the far tail, below 0.0001
        return 1 - missed - POWER

    return float(scipy.optimize.brentq(missing_power, 0.0, 4 * critical))


def detectable(logs_a: np.ndarray, logs_b: np.ndarray) -> float:
    """Return the smallest relative difference that Welch's interval shows with 80 % probability.

    By the noncentral t with the standard error and the degrees of freedom of these logarithms, two at least
    on each side, so that a measured difference that is not shown is always smaller.
    """
    error, freedom = welch_error(logs_a, logs_b)
    return _exp(detectable_shift(freedom) * error) - 1


@cache
def student_t(freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return how many standard errors Student's interval reaches to each side."""
    return float(scipy.special.stdtrit(freedom, (1 + confidence) / 2))


def _exponential(limits: tuple[float, float], method: str) -> Interval:
    low, high = map(_exp, limits)
    return Interval(low=low, high=high, method=method)


def _exp(value: float) -> float:
    return math.exp(min(max(value, -LARGEST_EXPONENT), LARGEST_EXPONENT))
