"""Bounds of many recipes' times hold together; simulations measure how often a lucky one leads."""

import math

import pytest
from scipy import stats

from common.study.ranking import bound_cells, bound_times


def test_bounds_are_students_on_logarithms_over_the_number_of_recipes():
    bounds = bound_times({0: [10.0, 12.0, 11.0], 4: [9.0, 9.5], 7: [1.0]})
    assert bounds.keys() == {0, 4}
    logs = [math.log(value) for value in (10.0, 12.0, 11.0)]
    low, high = stats.t.interval(1 - 0.05 / 2, 2, loc=sum(logs) / 3, scale=stats.sem(logs))
    assert bounds[0] == pytest.approx((math.exp(low), math.exp(high)))


def test_cells_are_compared_within_their_benchmark_and_size():
    cells = [{"benchmark": name, "size": "mini"} for name in ("bert", "bert", "resnet")]
    bounds = bound_cells(cells, [0, 0, 1, 1, 2, 2, 2], [10.0, 11.0, 5.0, None, 7.0, 7.0, 8.0])
    assert bounds[1] is None and bounds[0][0] < 10.5 < bounds[0][1] and bounds[2][0] < 7.3 < bounds[2][1]
    assert bound_cells([], [], []) == []
