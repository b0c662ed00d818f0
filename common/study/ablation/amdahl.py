"""Bounds of speed-ups, and intervals of what is calculated from estimates. Plain numbers in and out.

A method that relieves a part of the step cannot save more than that part: with a share of p of the time the
whole is at most 1 / (1 - p) times as fast (Amdahl 1967, https://doi.org/10.1145/1465482.1465560). Ratios are
of times, with a method over without it: below 1 is faster.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from common.evidence.intervals import Estimate, Interval
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


def around(value: float, errors: Sequence[Estimate]) -> Estimate:
    """Return a value with the interval of independent errors, all known: half-widths add as squares."""
    known, limits = [error.interval for error in errors if error.interval is not None], None
    if len(known) == len(errors):
        half = math.sqrt(math.fsum(((interval.high - interval.low) / 2) ** 2 for interval in known))
        limits = Interval(low=value - half, high=value + half, method="half-widths added as squares")
    return Estimate(value=value, interval=limits)


def summed(*estimates: Estimate) -> Estimate:
    return around(math.fsum(estimate.value for estimate in estimates), estimates)
