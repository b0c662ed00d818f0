"""Amdahl's bound, intervals and contrasts on cases calculated by hand."""

import math

import numpy as np
import pytest

from common.evidence import intervals
from common.evidence.intervals import Estimate, Interval
from common.study.ablation.measurements import Groups, add_estimates, bound, transform

SHARES = {"forward pass": 0.3, "backward pass": 0.5, "optimizer": 0.2}
LOADED = {part: 0.6 * share for part, share in SHARES.items()} | {"data loading": 0.4}


def estimate(value, low, high):
    return Estimate(value=value, interval=Interval(low=low, high=high, method=""))


def numbers(found):
    return found.value, found.interval.low, found.interval.high


@pytest.mark.parametrize("shares", [SHARES, LOADED])
@pytest.mark.parametrize(
    ("resources", "most"),
    [
        (["backward pass"], 2.0),  # however slow the loader is: of a step that waits for none
        (["forward pass", "backward pass"], 5.0),
        (["nothing"], 1.0),
        (["number of steps"], 1.0),
        (["forward pass", "backward pass", "optimizer"], math.inf),
        (["backward pass", "data loading"], None),
        (["evaluation", "host-to-device copy"], None),  # not measured
        (["everything"], None),
        ([], None),  # no card
    ],
)
def test_the_bound_is_amdahls(resources, most, shares):
    assert bound(resources, shares) == (most if most is None else pytest.approx(most))


def by_seed(groups):
    return {
        state: {str(seed): value for seed, value in enumerate(values)} for state, values in groups.items()
    }


def contrast_of(groups, factors):
    return Groups(by_seed(groups)).estimate(factors)


def test_the_interval_of_a_median_lies_between_order_statistics():
    assert intervals.median([3.0, 1.0, 2.0, 5.0, 4.0]) == Estimate(value=3.0, interval=None)
    assert numbers(intervals.median([6.0, 3.0, 1.0, 2.0, 5.0, 4.0])) == (3.5, 1.0, 6.0)
    # P(X <= 3) = 0.0176 of Binomial(15, 1/2): the 4th and the 12th
    assert numbers(intervals.median(range(1, 16))) == (8, 4, 12)


def test_the_detectable_shift_of_turns_is_shown_four_times_in_five():
    rng, alpha = np.random.default_rng(1), 0.05 / 6
    shift = np.mean([intervals.sign_detectable(turns, alpha) for turns in rng.standard_normal((2000, 15))])
    shown = [intervals.sign_p_value(turns + shift) < alpha for turns in rng.standard_normal((2000, 15))]
    assert np.mean(shown) == pytest.approx(intervals.POWER, abs=0.04)
    assert intervals.sign_detectable([1.0] * 7, alpha) is None  # 7 equal signs have a p of 1.6 %
    assert intervals.sign_detectable([0.3] * 8 + [0.0], alpha) == 0.3


@pytest.mark.parametrize(
    ("groups", "factors", "value", "half"),
    [
        # differences of 2 and 2.2 by seed; c adds 0.1 and none: residuals of 0.05 with two degrees of freedom
        (
            {"a": [4.0, 5.0], "b": [2.0, 2.8], "c": [7.0, 7.9], "none": []},
            {"a": 1, "b": -1},
            2.1,
            4.302653 * math.sqrt((0.1**2 + 0.1**2 + 0.0**2) / 4 * (1 / 2 + 1 / 2)),
        ),
        # a state with one seed is freed of it by the others; the base's factor of -2 counts four times
        (
            {"base": [1.0, 2.0], "a": [3.0, 4.2], "b": [7.0]},
            {"a": 1, "b": 1, "base": -2},
            3.6 + 7.55 - 2 * 1.5,
            12.706205 * math.sqrt(4 * 0.05**2 * (0.25**2 + 0.75**2 + 1 + 1.25**2 + 0.75**2)),
        ),
    ],
)
def test_a_contrast_is_freed_of_the_seeds_and_has_students_interval(groups, factors, value, half):
    found = contrast_of(groups, factors)
    assert numbers(found) == pytest.approx((value, value - half, value + half))


def test_states_with_the_same_runs_count_once_for_the_spread():
    twice = Groups(by_seed({"a": [1.0, 2.0], "again": [1.0, 2.0], "b": [3.0, 4.2]}))
    assert twice.freedom == 1 and twice.contrast({"a": 1, "again": -1}).error == 0
    assert twice.contrast({"again": 1, "b": -1}) == Groups(
        by_seed({"a": [1.0, 2.0], "b": [3.0, 4.2]})
    ).contrast({"a": 1, "b": -1})


def test_a_contrast_has_no_interval_without_a_spread_and_is_none_without_values():
    assert contrast_of({1: [4.0], 2: [1.0]}, {1: 1, 2: -1}) == Estimate(value=3.0, interval=None)
    assert contrast_of({1: [4.0, 5.0], 2: []}, {1: 1, 2: -1}) is None


def test_a_state_that_no_seed_links_with_the_others_has_no_contrast():
    values = {
        "a": {"1": 1.0, "2": 2.0},
        "b": {"2": 1.5, "3": 2.5},
        "c": {"4": 9.0, "5": 9.5},
        "d": {"3": 2.0},
    }
    groups = Groups(values | {"missed": {}})
    assert groups.linked_seeds == [{"4", "5"}, {"1", "2", "3"}]
    assert groups.contrast({"a": 1, "d": -1}) is not None  # by b
    assert groups.contrast({"a": 1, "c": -1}) is None
    one_seed_each = Groups({"a": {"1": 1.0}, "b": {"2": 2.0}})
    assert one_seed_each.contrast({"a": 1, "b": -1}) is None


def test_half_widths_add_as_squares_and_a_falling_function_turns_an_interval():
    assert numbers(add_estimates(estimate(1.0, -2.0, 4.0), estimate(2.0, -2.0, 6.0))) == (
        3.0,
        -2.0,
        8.0,
    )
    assert add_estimates(estimate(1.0, 0.0, 2.0), Estimate(value=1.0, interval=None)).interval is None
    assert numbers(transform(estimate(1.0, -2.0, 5.0), lambda value: -2 * value)) == (
        -2.0,
        -10.0,
        4.0,
    )
