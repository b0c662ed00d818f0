"""The points of a training at which its steps are timed, and the share of all steps that each stands for.

The work of a step changes in the course of a training: images and sequences grow, layers freeze, samples are
selected. So a time is taken in the middle of each part of the schedule and counts by the length of the part,
which integrates it over the training. Parts end where the shape of the batches changes and where a method
says so (`Method.phase_starts`); the longest are halved until there are enough.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common.run.loop import TrainingRun
from common.training.method import Method
from common.training.probes import probes_of

MIN_POINTS = 4
WINDOW_STEPS = 20  # at a point, at most: actions every 4, 10 or 20 steps have their share


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A part of a training and the `window` of steps in its middle; `share` is that of the part in all steps.

    `shape` is that of the batches that are trained on, `loaded` that of the batches from the loader.
    """

    window: range
    share: float
    shape: str
    loaded: str


def points_of(run: TrainingRun, shape: str | None = None) -> list[Point]:
    """Return the points of a run in their order, or those of one shape; their shares add up to 1.

    A shape that the training does not have is taken as the loader's in the part of its last shape.
    """
    probes, num_steps = probes_of(run.benchmark), run.plan.num_steps
    phases = [(shape, steps) for shape, steps in probes.phases() if steps]
    starts = [steps.start for _, steps in phases]
    for method in run.methods:
        starts += [start for start in method.phase_starts(num_steps) if 0 < start < num_steps]
    points, period = [], common_period(run.methods)
    for part in halve_longest(sorted({0, *starts}), num_steps):
        middle = (part.start + part.stop) // 2
        (trained,) = (shape for shape, steps in phases if middle in steps)
        points.append(
            Point(
                window=window_around(middle, part, num_steps, period),
                share=len(part) / num_steps,
                shape=trained,
                loaded=probes.loaded_shape(middle),
            )
        )
    if shape is None:
        return points
    chosen = [point for point in points if point.shape == shape]
    chosen = chosen or [
        replace(point, shape=shape, loaded=shape) for point in points if point.shape == points[-1].shape
    ]
    whole = math.fsum(point.share for point in chosen)
    return [replace(point, share=point.share / whole) for point in chosen]


def halve_longest(starts: Sequence[int], num_steps: int) -> list[range]:
    """Divide a training at these starts, then halve the longest part until there are `MIN_POINTS`."""
    parts = [range(first, last) for first, last in itertools.pairwise([*starts, num_steps])]
    while len(parts) < min(MIN_POINTS, num_steps):
        part = max(parts, key=len)
        number, middle = parts.index(part), (part.start + part.stop) // 2
        parts[number : number + 1] = [range(part.start, middle), range(middle, part.stop)]
    return parts


def window_around(middle: int, part: range, num_steps: int, period: int) -> range:
    """Take steps around the middle of a part: at least one period of the methods, whole periods."""
    length = min(WINDOW_STEPS, len(part))
    length = max(length // period, 1) * period
    first = max(0, min(middle - length // 2, num_steps - length))
    return range(first, min(first + length, num_steps))


def common_period(methods: Iterable[Method]) -> int:
    """Return after how many steps methods that act every few steps repeat themselves.

    A method that acts less often than every `WINDOW_STEPS` steps is left out: its cost per step is
    negligible.
    """
    return math.lcm(*(method.period for method in methods if method.period <= WINDOW_STEPS))
