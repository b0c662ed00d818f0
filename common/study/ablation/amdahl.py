"""Bounds and intervals of speed-ups, one or several together. Plain numbers in and out.

A method that relieves a part of the step cannot save more than that part: with a share of p of the time the
whole is at most 1 / (1 - p) times as fast (Amdahl 1967, https://doi.org/10.1145/1465482.1465560). Ratios are
of times, with a method over without it: below 1 is faster.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

from scipy import stats

from common.evidence import intervals
from common.evidence.intervals import ALPHA, CONFIDENCE, Estimate, Interval
from common.training.card import RELIEVES

PARTS = RELIEVES[:6]  # of a step
LOADING = PARTS[0]


def bound(resources: Sequence[str], shares: Mapping[str, float]) -> float | None:
    """Return the most times that a step can become faster which waits for no loader.

    What relieves no part of a step leaves its time what it is. None where a share was not measured, or where
    the waiting itself is relieved.
    """
    parts = [resource for resource in resources if resource in PARTS]
    unknown = not resources or "everything" in resources or any(part not in shares for part in parts)
    if unknown or LOADING in parts:
        return None
    share = math.fsum(shares[part] for part in parts) / (1 - shares.get(LOADING, 0.0))
    return 1 / (1 - share) if share < 1 - 1e-9 else math.inf


def transform(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """Return the estimate of a function, rising or falling, of what was estimated."""
    limits = estimate.interval
    if limits is not None:
        low, high = sorted(map(function, (limits.low, limits.high)))
        limits = Interval(low=low, high=high, method=limits.method)
    return Estimate(value=function(estimate.value), interval=limits)


def spread(groups: Collection[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation that all groups have in common, and its degrees of freedom or 0."""
    freedom = sum(len(group) - 1 for group in groups if group)
    means = [(group, statistics.fmean(group)) for group in groups if group]
    squares = math.fsum((value - mean) ** 2 for group, mean in means for value in group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def contrast(terms: Sequence[tuple[float, Sequence[float]]], common: tuple[float, int]) -> Estimate:
    """Return the sum of means, each times its factor, with Student's interval from the common spread."""
    value = math.fsum(factor * statistics.fmean(values) for factor, values in terms)
    deviation, freedom = common
    if not freedom:
        return Estimate(value=value, interval=None)
    error = deviation * math.sqrt(math.fsum(factor**2 / len(values) for factor, values in terms))
    half = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * error
    method = f"Student-t, common spread of {freedom} degrees"
    return Estimate(value=value, interval=Interval(low=value - half, high=value + half, method=method))


def contrast_test(
    terms: Sequence[tuple[float, Sequence[float]]], common: tuple[float, int], num_tests: int
) -> tuple[float, float] | None:
    """Return the two-sided p of no contrast, uncorrected, and the least one that could be shown.

    That has 80 % power at 5 % over `num_tests`, Holm's strictest step. None without a spread.
    """
    deviation, freedom = common
    if not freedom:
        return None
    value = math.fsum(factor * statistics.fmean(values) for factor, values in terms)
    error = deviation * math.sqrt(math.fsum(factor**2 / len(values) for factor, values in terms))
    smallest = intervals.detectable_shift(freedom, ALPHA / num_tests) * error
    return intervals.two_sided_p(value, error, freedom), smallest


def around(value: float, errors: Sequence[Estimate]) -> Estimate:
    """Return a value with the interval of independent errors, all known: half-widths add as squares."""
    known, limits = [error.interval for error in errors if error.interval is not None], None
    if len(known) == len(errors):
        half = math.sqrt(math.fsum(((interval.high - interval.low) / 2) ** 2 for interval in known))
        limits = Interval(low=value - half, high=value + half, method="half-widths added as squares")
    return Estimate(value=value, interval=limits)


def summed(*estimates: Estimate) -> Estimate:
    return around(math.fsum(estimate.value for estimate in estimates), estimates)
