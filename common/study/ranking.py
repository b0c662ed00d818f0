"""Bounds of the mean times and qualities of recipes, which hold together however many are compared.

Among many recipes the best mean and the least spread are partly luck. So the spread of a recipe is that of
its own runs or, if larger, the pooled spread of all recipes of its benchmark, size, target and kind of run;
the bounds have Bonferroni's correction for the number of means, and a recipe is ranked by its worse bound. A
recipe is shown to be better than another if their bounds do not overlap: in simulation this happens among 20
equal recipes in less than 5 % of studies, also where half of them have three times the spread of the others;
more often where few of them vary much more than the rest (SIMULATIONS.md has both).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from common.evidence import intervals
from common.evidence.intervals import ALPHA

ALIKE = ("benchmark", "size", "target", "trains_on")  # of the cells that are compared
Bounds = tuple[float, float]


def bound_times(recipes: Mapping[int, Sequence[float]]) -> dict[int, Bounds]:
    """Return low and high of the geometric mean of each recipe's times; one with a single run has none."""
    logs = {number: [math.log(time) for time in times] for number, times in recipes.items()}
    return {number: (math.exp(low), math.exp(high)) for number, (low, high) in bound_means(logs, {}).items()}


def bound_qualities(recipes: Mapping[int, Sequence[float]], steps: Mapping[int, float]) -> dict[int, Bounds]:
    """Return low and high of the mean of each recipe's qualities, which are multiples of its `steps`."""
    bounds = bound_means(recipes, steps)
    return {number: (max(low, 0.0), min(high, 1.0)) for number, (low, high) in bounds.items()}


def bound_means(recipes: Mapping[int, Sequence[float]], steps: Mapping[int, float]) -> dict[int, Bounds]:
    """Bound the means of recipes with two runs or more, by their own or, if larger, the pooled spread."""
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
    """Return the bounds of each cell; `numbers` and `values` are those of runs, None does not count.

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
