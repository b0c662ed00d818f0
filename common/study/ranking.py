"""Bounds of the mean times of recipes, which hold together however many are compared.

The least mean of many recipes is that of a lucky one. Ranked are the bounds that each mean stays below: all
hold at once with 95 % probability (Bonferroni over the recipes of a benchmark and size), so that two lucky
runs do not lead. One recipe is shown to be faster than another where its upper bound is below the other's
lower one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from common.evidence import intervals
from common.evidence.intervals import ALPHA

Bounds = tuple[float, float]


def bound_times(recipes: Mapping[int, Sequence[float]]) -> dict[int, Bounds]:
    """Return low and high of the geometric mean of each recipe's times; one with a single run has none."""
    bounds = {}
    known = {number: times for number, times in recipes.items() if len(times) > 1}
    for number, times in known.items():
        if interval := intervals.student_of_logs(times, 1 - ALPHA / len(known)):
            bounds[number] = interval.low, interval.high
    return bounds


def bound_cells(
    cells: Sequence[Mapping[str, object]], numbers: Sequence[int], minutes: Sequence[float | None]
) -> list[Bounds | None]:
    """Return the bounds of each cell in minutes; of its runs, by cell number, those with minutes count.

    Cells are compared within their benchmark and size.
    """
    groups: dict[object, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, value in zip(numbers, minutes, strict=True):
        if value is not None and value > 0:
            groups[cells[number]["benchmark"], cells[number]["size"]][number].append(value)
    bounds: dict[int, Bounds] = {}
    for recipes in groups.values():
        bounds |= bound_times(recipes)
    return [bounds.get(number) for number in range(len(cells))]
