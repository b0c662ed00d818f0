"""Bounds of the mean times and qualities of recipes, which hold together however many are compared.

The best mean of many recipes is that of a lucky one, and the least spread that of a recipe whose runs lie
close by luck. So a recipe has the spread of its own runs or, if it is larger, that of all recipes of its
benchmark, size, target and kind of run; bounds are Bonferroni's for as many means, and a recipe is ranked by
the worse of its own. One is shown to be better than another where their bounds are apart: in simulation two
of 20 equal recipes are so in less than 5 % of studies, also where spreads differ (SIMULATIONS.md).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from common.evidence import intervals
from common.evidence.intervals import ALPHA

ALIKE = ("benchmark", "size", "target", "kind", "trains_on")  # of the cells that are compared
Bounds = tuple[float, float]


def bound_times(recipes: Mapping[int, Sequence[float]]) -> dict[int, Bounds]:
    """Return low and high of the geometric mean of each recipe's times; one with a single run has none."""
    logs = {number: [math.log(time) for time in times] for number, times in recipes.items()}
    return {number: (math.exp(low), math.exp(high)) for number, (low, high) in bound_means(logs, {}).items()}


def bound_qualities(recipes: Mapping[int, Sequence[float]], steps: Mapping[int, float]) -> dict[int, Bounds]:
    """Return low and high of the mean of each recipe's qualities; `steps` are what they are rounded to."""
    bounds = bound_means(recipes, steps)
    return {number: (max(low, 0.0), min(high, 1.0)) for number, (low, high) in bounds.items()}


def bound_means(recipes: Mapping[int, Sequence[float]], steps: Mapping[int, float]) -> dict[int, Bounds]:
    """Bound the means of recipes with two runs or more; the spread is their own or, if larger, the pooled."""
    known = {number: values for number, values in recipes.items() if len(values) > 1}
    freedom = sum(len(values) - 1 for values in known.values())
    if not freedom:
        return {}
    spreads = {n: intervals.deviation(values, steps.get(n, 0.0)) for n, values in known.items()}
    pooled = math.sqrt(sum((len(values) - 1) * spreads[n] ** 2 for n, values in known.items()) / freedom)
    reach = intervals.student_t(freedom, 1 - ALPHA / len(known))
    halves = {n: reach * max(spreads[n], pooled) / math.sqrt(len(values)) for n, values in known.items()}
    return {n: (fmean(values) - halves[n], fmean(values) + halves[n]) for n, values in known.items()}


def bound_cells(
    cells: Sequence[Mapping[str, object]],
    numbers: Sequence[int],
    values: Sequence[float | None],
    bound: Callable[[Mapping[int, Sequence[float]]], dict[int, Bounds]],
) -> list[Bounds | None]:
    """Return the bounds of each cell; of its runs, by cell number, those with a value count.

    Cells are compared within their benchmark, size, target and kind of run.
    """
    groups: dict[object, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, value in zip(numbers, values, strict=True):
        if value is not None:
            groups[tuple(cells[number].get(name) for name in ALIKE)][number].append(value)
    bounds: dict[int, Bounds] = {}
    for recipes in groups.values():
        bounds |= bound(recipes)
    return [bounds.get(number) for number in range(len(cells))]
