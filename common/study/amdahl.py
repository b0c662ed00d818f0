"""What a speed-up can save at most, and what several should save together. Plain numbers in and out.

A method that relieves a part of the step cannot save more than that part: with a share of p of the time the
whole is at most 1 / (1 - p) times as fast (Amdahl 1967, https://doi.org/10.1145/1465482.1465560). Ratios are
of times, with a method over without it: below 1 is faster.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from common.card import RELIEVES
from common.evidence.intervals import CONFIDENCE, Estimate, Interval

PARTS = RELIEVES[:6]  # of a step


def bound(resources: Sequence[str], shares: Mapping[str, float]) -> float | None:
    """Return the most times that a step can become faster; None where a share was not measured.

    What relieves no part of a step leaves its time what it is.
    """
    parts = [resource for resource in resources if resource in PARTS]
    if not resources or "everything" in resources or any(part not in shares for part in parts):
        return None
    share = math.fsum(shares[part] for part in parts)
    return 1 / (1 - share) if share < 1 else math.inf


def median(values: Sequence[float]) -> Estimate:
    """Return the median and its interval between two order statistics: none below six values.

    It holds for any distribution; the ratios of turns have long tails.
    """
    ordered = sorted(values)
    rank = int(stats.binom.ppf((1 - CONFIDENCE) / 2, len(ordered), 0.5))
    limits = None
    if rank > 0:
        limits = Interval(low=ordered[rank - 1], high=ordered[-rank], method="order statistics of turns")
    return Estimate(value=float(np.median(ordered)), interval=limits)


def exponential(logs: Estimate) -> Estimate:
    """Return an estimate of a ratio from that of its logarithm."""
    limits = logs.interval
    if limits is not None:
        limits = Interval(low=math.exp(limits.low), high=math.exp(limits.high), method=limits.method)
    return Estimate(value=math.exp(logs.value), interval=limits)


def negative(estimate: Estimate) -> Estimate:
    """Return an estimate with the other sign."""
    limits = estimate.interval
    if limits is not None:
        limits = Interval(low=-limits.high, high=-limits.low, method=limits.method)
    return Estimate(value=-estimate.value, interval=limits)


def spread(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation that all groups have in common, and its degrees of freedom or 0."""
    freedom = sum(len(group) - 1 for group in groups if group)
    squares = math.fsum(float(np.var(group)) * len(group) for group in groups if group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def difference(above: Sequence[float], below: Sequence[float], common: tuple[float, int]) -> Estimate:
    """Return the difference of two means, with Student's interval from the common spread of all groups."""
    value = float(np.mean(above) - np.mean(below))
    deviation, freedom = common
    if not freedom:
        return Estimate(value=value, interval=None)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * deviation * math.sqrt(1 / len(above) + 1 / len(below))
    limits = Interval(
        low=value - half, high=value + half, method=f"Student-t, common spread of {freedom} degrees"
    )
    return Estimate(value=value, interval=limits)


def summed(estimates: Sequence[Estimate]) -> Estimate:
    """Return the sum of independent estimates; half-widths add as squares, none where one has no interval."""
    value, limits = math.fsum(each.value for each in estimates), None
    known = [each.interval for each in estimates if each.interval is not None]
    if len(known) == len(estimates):
        half = math.sqrt(math.fsum(((each.high - each.low) / 2) ** 2 for each in known))
        limits = Interval(low=value - half, high=value + half, method="half-widths added as squares")
    return Estimate(value=value, interval=limits)


def saved(whole: float, log_ratio: Estimate) -> Estimate:
    """Return what of `whole` a method saves that multiplies it by a ratio; its logarithm is given."""
    limits = log_ratio.interval
    if limits is not None:
        low, high = (whole * -math.expm1(limit) for limit in (limits.high, limits.low))
        limits = Interval(low=low, high=high, method=limits.method)
    return Estimate(value=whole * -math.expm1(log_ratio.value), interval=limits)
