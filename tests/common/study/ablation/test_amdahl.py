"""Amdahl's bound, intervals and composition on cases calculated by hand."""

import math

import numpy as np
import pytest

from common.evidence import intervals
from common.evidence.intervals import Estimate, Interval
from common.study.ablation import amdahl


def estimate(value, low, high):
    return Estimate(value=value, interval=Interval(low=low, high=high, method=""))


SHARES = {"forward pass": 0.3, "backward pass": 0.5, "optimizer": 0.2}
LOADED = {part: 0.6 * share for part, share in SHARES.items()} | {"data loading": 0.4}


@pytest.mark.parametrize(
    ("resources", "most"),
    [
        (["backward pass"], 2.0),
        (["forward pass", "backward pass"], 5.0),
        (["nothing"], 1.0),
        (["number of steps"], 1.0),
        (["forward pass", "backward pass", "optimizer"], math.inf),
        (["data loading"], None),  # not measured
        (["everything"], None),
        ([], None),  # no card
    ],
)
def test_the_bound_is_amdahls(resources, most):
    assert amdahl.bound(resources, SHARES) == (most if most is None else pytest.approx(most))


def test_a_step_that_waits_for_nothing_has_the_same_bound_however_slow_the_loader_is():
    assert amdahl.bound(["backward pass"], LOADED) == pytest.approx(2.0)
    assert amdahl.bound(["forward pass", "backward pass", "optimizer"], LOADED) == math.inf
    assert amdahl.bound(["nothing"], LOADED) == 1.0
    assert amdahl.bound(["backward pass", "data loading"], LOADED) is None


def test_the_interval_of_a_median_lies_between_order_statistics():
    assert intervals.median([3.0, 1.0, 2.0, 5.0, 4.0]) == Estimate(value=3.0, interval=None)
    found = intervals.median([6.0, 3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found.value, found.interval.low, found.interval.high) == (3.5, 1.0, 6.0)
    found = intervals.median(range(1, 16))  # P(X <= 3) = 0.0176 of Binomial(15, 1/2): the 4th and the 12th
    assert (found.value, found.interval.low, found.interval.high) == (8, 4, 12)


def test_the_interval_of_a_median_holds_95_percent():
    generator = np.random.default_rng(0)
    held = [
        limits.low <= 0 <= limits.high
        for limits in (intervals.median(generator.standard_cauchy(15)).interval for _ in range(2000))
    ]
    assert np.mean(held) > 0.95


def test_a_difference_takes_the_spread_of_all_groups():
    deviation, freedom = amdahl.spread([[1.0, 3.0], [5.0, 7.0], [4.0], []])
    assert (deviation, freedom) == (pytest.approx(math.sqrt(2)), 2)  # squares 2 + 2 over 2 degrees
    found = amdahl.contrast([(1, [4.0]), (-1, [1.0, 3.0])], (deviation, freedom))
    half = 4.302653 * math.sqrt(2) * math.sqrt(1 + 1 / 2)  # t of 2 degrees
    assert found.value == 2.0
    assert (found.interval.low, found.interval.high) == pytest.approx((2 - half, 2 + half), rel=1e-6)


def test_one_seed_gives_no_interval():
    assert amdahl.contrast([(1, [4.0]), (-1, [1.0])], amdahl.spread([[4.0], [1.0]])) == Estimate(
        value=3.0, interval=None
    )


def test_independent_half_widths_add_as_squares():
    found = amdahl.summed([estimate(1.0, -2.0, 4.0), estimate(2.0, -2.0, 6.0)])
    assert (found.value, found.interval.low, found.interval.high) == (3.0, -2.0, 8.0)
    assert amdahl.summed([estimate(1.0, 0.0, 2.0), Estimate(value=1.0, interval=None)]).interval is None


def test_a_contrast_counts_a_state_that_steps_share_as_often_as_they_do():
    """The base of three steps has a factor of -3: its error counts nine times, not three."""
    deviation, freedom = 0.1, 5
    found = amdahl.contrast([(1, [2.0]), (1, [3.0]), (1, [4.0]), (-3, [1.0, 1.0])], (deviation, freedom))
    half = 2.570582 * deviation * math.sqrt(3 + 9 / 2)  # t of 5 degrees
    assert found.value == 6.0
    assert (found.interval.low, found.interval.high) == pytest.approx((6 - half, 6 + half), rel=1e-6)


def test_a_negative_factor_turns_an_interval():
    found = amdahl.scaled(estimate(1.0, -2.0, 5.0), -2)
    assert (found.value, found.interval.low, found.interval.high) == (-2.0, -10.0, 4.0)
