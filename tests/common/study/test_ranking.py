"""Bounds of many recipes' times hold together; simulations measure how often a lucky one leads."""

import math

import numpy as np
import pytest
from scipy import stats

from common.study.ranking import bound_cells, bound_qualities, bound_times


def test_bounds_are_students_on_logarithms_over_the_number_of_recipes():
    times = {0: [10.0, 12.0, 11.0], 4: [9.0, 9.5]}
    bounds = bound_times(times | {7: [1.0]})
    assert bounds.keys() == {0, 4}
    logs = {number: np.log(values) for number, values in times.items()}
    squares = sum(((values - values.mean()) ** 2).sum() for values in logs.values())
    scales = {0: stats.sem(logs[0]), 4: math.sqrt(squares / 3 / 2)}  # their own spread, and the pooled one
    for number, scale in scales.items():
        low, high = stats.t.interval(1 - 0.05 / 2, 3, loc=logs[number].mean(), scale=scale)
        assert bounds[number] == pytest.approx((math.exp(low), math.exp(high)))


def test_a_recipe_whose_runs_lie_close_by_luck_does_not_lead():
    qualities = {0: [0.96, 0.96], 1: [0.981, 0.979], 2: [0.99, 0.97], 3: [0.95, 0.93]}
    bounds = bound_qualities(qualities, dict.fromkeys(qualities, 1 / 360))
    assert max(bounds, key=lambda number: bounds[number][0]) in (1, 2)


def test_cells_are_compared_within_their_benchmark_size_and_target():
    cells = [{"benchmark": name, "size": "mini"} for name in ("bert", "bert", "resnet")]
    values = [10.0, 11.0, 5.0, None, 7.0, 7.0, 8.0]
    bounds = bound_cells(cells, [0, 0, 1, 1, 2, 2, 2], values, bound_times)
    assert bounds[1] is None and bounds[0][0] < 10.5 < bounds[0][1] and bounds[2][0] < 7.3 < bounds[2][1]
    other = [*cells, cells[0] | {"target": 0.72}]
    assert bound_cells(other, [0, 0, 1, 1, 2, 2, 2, 3, 3], [*values, 90.0, 20.0], bound_times)[:3] == bounds
    assert bound_cells([], [], [], bound_times) == []


def test_bounds_of_qualities_are_no_narrower_than_what_they_are_rounded_to():
    (bounds,) = bound_qualities({0: [0.95, 0.95], 2: [0.5]}, {0: 1 / 360, 2: 0.0}).values()
    assert bounds[0] < 0.95 - 1 / 360 and bounds[1] > 0.95 + 1 / 360
    assert bound_qualities({0: [0.99, 1.0, 0.2]}, {0: 0.0})[0][1] == 1.0
