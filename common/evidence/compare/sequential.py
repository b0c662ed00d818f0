"""A sequential test of paired differences; its error rate holds however often one looks, whenever one stops.

It is always valid, not group-sequential: no number of looks or pairs is fixed beforehand, and an interrupted
or prolonged comparison keeps its error rate. The likelihood ratio of a t-test is mixed over a normal prior of
the effect in standard deviations (mean 0, precision `PRIOR_PRECISION`) and the scale-invariant prior of the
deviation. Without a difference it is a martingale that starts at 1, so that by Ville's inequality it reaches
1 / alpha with a probability of at most alpha, whatever the deviation. Its inverse is an always-valid p-value;
the means that it does not reject form a confidence sequence. Sources: Wang and Ramdas, Anytime-valid t-tests
and confidence sequences for Gaussian means with unknown variance, Sequential Analysis 44 (2025),
https://arxiv.org/abs/2310.03722; Johari, Koomen, Pekelis and Walsh, Always valid inference, Operations
Research 70 (2022), https://arxiv.org/abs/1512.04922.

Differences are taken as normal; tests/common/evidence/compare/test_sequential.py simulates others too. In its
simulations a difference of one standard deviation of a pair is found within 20 pairs in 79 % of
comparisons, one of two within 10 pairs in 96 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from common.evidence.intervals import ALPHA, POWER, half_width, rounding_squares

PRIOR_PRECISION = 0.1  # effects of about three deviations: a clear one is seen in three or four pairs
MAX_MORE = 10_000  # pairs; a forecast beyond is none
Outcome = Literal["higher", "lower", "equivalent", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The state of a comparison after some pairs: mean difference, its confidence sequence, p-value, outcome.

    `low` and `high` are None while they are infinite. The outcome is that of the first pair that decided,
    number `decided_after`; later pairs narrow the limits. `more` is a forecast, from the mean and deviation
    so far, of the further pairs that would decide; None without one. A comparison is futile if it is
    undecided and no mean within Student's interval would be decided by the last pair that is allowed.
    `detectable` is the difference that those pairs would show with 80 % probability.
    """

    num_pairs: int
    mean: float
    low: float | None
    high: float | None
    p: float
    outcome: Outcome
    decided_after: int | None
    more: int | None
    is_futile: bool
    detectable: float | None


def decide(
    differences: Sequence[float],
    *,
    margin: float,
    max_pairs: int,
    alpha: float = ALPHA,
    resolution: float = 0.0,
) -> Decision:
    """Decide from the differences of at least one pair, in the order in which they were measured.

    The mean is higher or lower than 0 where the confidence sequence excludes 0, equivalent where it lies
    within `margin` of 0. `resolution` is the step of the values of a side, see `rounding_squares`.
    """
    values = np.asarray(differences, dtype=float)
    counts = np.arange(1, len(values) + 1)
    means = np.cumsum(values) / counts
    squares = _sums_of_squares(values) + rounding_squares(counts, resolution)
    halves = _half_widths(counts, squares, alpha)
    lows, highs = np.maximum.accumulate(means - halves), np.minimum.accumulate(means + halves)
    p = math.exp(-max(0.0, float(np.max(_log_evidence(counts, means, squares)))))
    outcomes = [_outcome(low, high, margin) for low, high in zip(lows, highs, strict=True)]
    first = next((number for number, outcome in enumerate(outcomes, 1) if outcome != "undecided"), None)
    mean, low, high = float(means[-1]), float(lows[-1]), float(highs[-1])
    if low > high:  # the sequence has failed to cover: take its last member alone
        low, high = mean - float(halves[-1]), mean + float(halves[-1])
    future = None
    if len(values) > 1:
        future = _Future(mean, math.sqrt(squares[-1] / (len(values) - 1)), len(values), alpha, margin)
    is_last = len(values) >= max_pairs
    return Decision(
        num_pairs=len(values),
        mean=mean,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        p=p,
        outcome=outcomes[first - 1] if first else "undecided",
        decided_after=first,
        more=future.more() if future and not first else None,
        is_futile=not first and (is_last or bool(future and future.is_futile(values, max_pairs))),
        detectable=future.detectable(max(max_pairs, len(values))) if future else None,
    )


@dataclass(frozen=True)
class _Future:
    """Forecasts from the mean and the deviation of two pairs or more; they take no part in a decision."""

    mean: float
    deviation: float
    num_pairs: int
    alpha: float
    margin: float

    def half(self, num_pairs: int | np.ndarray) -> np.ndarray:
        counts = np.atleast_1d(num_pairs)
        return _half_widths(counts, self.deviation**2 * (counts - 1), self.alpha)

    def more(self) -> int | None:
        counts = np.arange(self.num_pairs + 1, self.num_pairs + MAX_MORE + 1)
        enough = self.half(counts) < max(abs(self.mean), self.margin - abs(self.mean))
        return int(counts[enough.argmax()]) - self.num_pairs if enough.any() else None

    def is_futile(self, values: np.ndarray, max_pairs: int) -> bool:
        half, reach = float(self.half(max_pairs)[0]), half_width(values)
        can_differ = abs(self.mean) + reach > half
        can_be_equivalent = max(abs(self.mean) - reach, 0.0) + half < self.margin
        return not can_differ and not can_be_equivalent

    def detectable(self, num_pairs: int) -> float | None:
        half = float(self.half(num_pairs)[0])
        reach = float(scipy.stats.norm.ppf(POWER)) * self.deviation / math.sqrt(num_pairs)
        return half + reach if math.isfinite(half) else None


def _outcome(low: float, high: float, margin: float) -> Outcome:
    if low > high:
        return "undecided"
    if low > 0 or high < 0:
        return "higher" if low > 0 else "lower"
    return "equivalent" if -margin < low and high < margin else "undecided"


def _sums_of_squares(values: np.ndarray) -> np.ndarray:
    """Sum the squared deviations from the mean of the first 1, 2, ... values."""
    centred = values - values[0]  # keeps digits where the deviation is small
    counts = np.arange(1, len(values) + 1)
    return np.maximum(np.cumsum(centred**2) - np.cumsum(centred) ** 2 / counts, 0.0)


def _log_evidence(counts: np.ndarray, means: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Compute the logarithm of the mixed likelihood ratio of some mean against a mean of 0."""
    total = squares + counts * means**2
    explained = counts**2 * means**2 / (counts + PRIOR_PRECISION)
    share = np.divide(explained, total, out=np.zeros(len(counts)), where=total > 0)
    evidence = -0.5 * np.log1p(counts / PRIOR_PRECISION) - counts / 2 * np.log1p(-share)
    return np.asarray(evidence)


def _half_widths(counts: np.ndarray, squares: np.ndarray, alpha: float) -> np.ndarray:
    """Compute half of the confidence sequence after each count: means with evidence below 1 / alpha."""
    factor = np.exp(np.minimum((np.log1p(counts / PRIOR_PRECISION) - 2 * math.log(alpha)) / counts, 700.0))
    room = 1 - factor * PRIOR_PRECISION / (counts + PRIOR_PRECISION)
    halves = np.full(len(counts), np.inf)
    bounded = room > 0
    halves[bounded] = np.sqrt((factor - 1) * squares / (counts * np.where(bounded, room, 1)))[bounded]
    return halves
