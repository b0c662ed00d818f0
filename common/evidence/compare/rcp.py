"""MLCommons' reference convergence points (RCP), and a run set beside them.

The closed division refuses a set that converges in fewer samples than its reference at the same batch size;
the open division need not match it. The points ship with mlperf-logging: how long each run of the reference
took at some batch sizes, in epochs (resnet) or samples (bert). They are read, pruned and interpolated here as
by its `rcp_checker`, for the last round of a benchmark and for the `epoch_num` of the logs.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from common.evidence import intervals
from common.evidence.compare.masked_accuracy import MOSAIC, counted_tokens
from common.evidence.intervals import Estimate, Interval
from common.evidence.log import NUM_RUNS, Log, read_log
from common.evidence.records import finite
from common.evidence.rules.rounds import last_round
from common.evidence.score import olympic_mean
from common.repository import COMMITTED

UNITS = {"resnet": "epochs", "bert": "samples"}
ACCEPTED, SCALED, REFUSED, UNKNOWN = "accepted", "scaled", "refused", "unknown"


@dataclass(frozen=True, kw_only=True)
class ReferencePoint:
    """The reference at a batch size, in epochs (resnet) or samples (bert).

    `mean` is without the fastest and the slowest run, `deviation` of all. `least` is the smallest mean of a
    set that a one-sided t-test at 5 % does not tell from it. `batch_sizes` are those that were trained: this
    one, or the two that it lies between.
    """

    batch_size: int
    mean: float
    deviation: float
    least: float
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """A run set beside the reference of a ruleset; `note` says why there is no verdict, or what differs.

    `measured` and `interval`: see `mean_of_stops`. verdict: accepted, scaled (the closed division multiplies
    the score by `scale`), refused (too few samples), or unknown.
    """

    ruleset: str
    unit: str
    batch_size: int | None
    measured: float | None
    interval: Interval | None
    point: ReferencePoint | None
    verdict: str
    scale: float = 1.0
    note: str = ""
    is_closed: bool = False  # the set itself is of the closed division


@cache
def load_points(benchmark: str, ruleset: str) -> tuple[ReferencePoint, ...]:
    """Return the points that the package checker compares with, by batch size."""
    place = ("rcp_checker", f"training_{ruleset}", f"rcps_{benchmark}.json")
    text = resources.files("mlperf_logging").joinpath(*place).read_text(encoding="utf-8")
    entries = sorted(json.loads(text).values(), key=lambda entry: entry["BS"])
    points = []
    for entry in entries:
        runs = sorted(entry["Epochs to converge"])
        counted, deviation = runs[1:-1], float(np.std(runs))
        points.append(make_point(benchmark, entry["BS"], float(np.mean(counted)), deviation, len(counted)))
    return tuple(prune(benchmark, points))


def make_point(
    benchmark: str, batch_size: int, mean: float, deviation: float, num_runs: int, between: Sequence[int] = ()
) -> ReferencePoint:
    """Make a point of `num_runs` runs of the reference; a set counts all of its runs but two."""
    least = intervals.least_equal_mean(mean, deviation, num_runs, NUM_RUNS[benchmark] - 2)
    return ReferencePoint(
        batch_size=batch_size,
        mean=mean,
        deviation=deviation,
        least=least,
        batch_sizes=tuple(between) or (batch_size,),
    )


def interpolate(benchmark: str, batch_size: int, low: ReferencePoint, high: ReferencePoint) -> ReferencePoint:
    """Make the point between two others, which counts as twice the runs of a set."""
    sizes = (low.batch_size, high.batch_size)
    mean = float(np.interp(batch_size, sizes, (low.mean, high.mean)))
    deviation = float(np.interp(batch_size, sizes, (low.deviation, high.deviation)))
    return make_point(benchmark, batch_size, mean, deviation, 2 * NUM_RUNS[benchmark], sizes)


def prune(benchmark: str, points: Sequence[ReferencePoint]) -> list[ReferencePoint]:
    """Drop batch sizes below that of the fastest point, then points slower than a line between neighbours."""
    fastest = min(points, key=lambda point: point.mean)
    rest = [point for point in points if point.batch_size >= fastest.batch_size]
    index = 1
    while index < len(rest) - 1:
        low, point, high = rest[index - 1 : index + 2]
        if point.mean > interpolate(benchmark, point.batch_size, low, high).mean:
            del rest[index]
        else:
            index += 1
    return rest


def point_at(benchmark: str, batch_size: int, ruleset: str) -> ReferencePoint | None:
    """Return the reference at a batch size, interpolated between points; below all the first, above None."""
    points = load_points(benchmark, ruleset)
    index = bisect_left(points, batch_size, key=lambda point: point.batch_size)
    if index == len(points):
        return None
    high = points[index]
    if index == 0 or high.batch_size == batch_size:
        return high
    return interpolate(benchmark, batch_size, points[index - 1], high)


def compare_with_reference(benchmark: str, logs: Sequence[Log]) -> Convergence | None:
    """Compare the runs that a set of size full counts; None for another benchmark."""
    if benchmark not in UNITS:
        return None
    ruleset = last_round(benchmark)
    sizes = {finite(log.value("global_batch_size")) for log in logs}
    batch_size = int(sizes.pop() or 0) if len(sizes) == 1 else 0
    estimate = mean_of_stops(list(map(consumed, logs)), max(map(evaluation_step, logs), default=0.0))
    point = point_at(benchmark, batch_size, ruleset) if batch_size > 0 else None
    notes = []
    if batch_size < 1:
        notes.append("the logs state no batch size, or several")
    elif point is None:
        notes.append(f"there is none for a batch as large as {batch_size:,}")
    elif batch_size < point.batch_size:
        notes.append(f"there is none for a batch as small as {batch_size:,}")
    if estimate is None:
        notes.append("too many runs missed the target, or state no epoch_num")
    elif benchmark == "bert" and estimate.value < batch_size:
        notes.append("epoch_num in the logs counts no samples")
        estimate = None
    is_short = len(logs) < NUM_RUNS[benchmark]
    if is_short:
        notes.append(f"the round wants {NUM_RUNS[benchmark]} runs, the set has {len(logs)}")
    if benchmark == "bert" and any(counted_tokens(log) == MOSAIC for log in logs):
        notes.append("the set counts masked tokens that the reference does not")
    verdict = judge(estimate.value, point) if estimate and point and not is_short else UNKNOWN
    return Convergence(
        ruleset=ruleset,
        unit=UNITS[benchmark],
        batch_size=batch_size or None,
        measured=estimate.value if estimate else None,
        interval=estimate.interval if estimate else None,
        point=point,
        verdict=verdict,
        scale=point.mean / estimate.value if point and estimate and verdict == SCALED else 1.0,
        note="; ".join(notes),
        is_closed=all(log.is_closed for log in logs),
    )


def judge(measured: float, point: ReferencePoint) -> str:
    if measured >= point.mean:
        return ACCEPTED
    return SCALED if measured >= point.least else REFUSED


def consumed(log: Log) -> float:
    """Read the epochs or samples at the end of a run that reached its target; infinite for any other."""
    event = log.last("eval_accuracy")
    number = finite(event.metadata.get("epoch_num")) if event and log.is_converged else None
    return number if number is not None and number > 0 else math.inf


def evaluation_step(log: Log) -> float:
    """Epochs or samples between the last two evaluations; 0 of logs that do not say."""
    return last_step([finite(event.metadata.get("epoch_num")) for event in log.events("eval_accuracy")])


def last_step(counts: Sequence[float | None]) -> float:
    """Return the difference of the last two counts, of a single one from 0; 0 if they are unknown."""
    before, last = [0.0, *counts][-2:] if counts else (None, None)
    return 0.0 if before is None or last is None else max(last - before, 0.0)


def mean_of_stops(stops: Sequence[float], step: float) -> Estimate | None:
    """Return the mean of the epochs or samples to target (infinite: a miss); None if two or more runs missed.

    The mean is without the fastest and the slowest run, as in a score; the interval is of the mean of all
    runs, None if one missed. Runs stop at evaluations `step` apart: this one rounding adds step^2 / 12 to the
    variance, half of what `rounding_squares` adds to a difference.
    """
    value, limits = olympic_mean(stops), None
    if value is None:
        return None
    if all(map(math.isfinite, stops)):
        limits = intervals.mean(stops, resolution=step / math.sqrt(2)).interval
    return Estimate(value=value, interval=limits)


def list_committed(lead: Log) -> list[Path]:
    """Find the committed logs of size mini of a log's configuration."""
    pattern = f"results/reference-*-mini-{lead.configuration}/{lead.benchmark}/result_*.txt"
    return sorted(COMMITTED.glob(pattern))


def is_committed(lead: Log) -> bool:
    return lead.file is not None and lead.file.parent.resolve() in {
        path.parent.resolve() for path in list_committed(lead)
    }


def committed_points(lead: Log) -> dict[str, dict[str, object]]:
    """Return the committed runs of size mini of a log's configuration, in the form of MLCommons' points.

    There is one for each batch size with three runs or more. The set of `lead` itself is left out.
    """
    judged = lead.file.parent.resolve() if lead.file else None
    epochs: dict[object, list[float]] = {}
    for log in (read_log(path) for path in list_committed(lead) if path.parent.resolve() != judged):
        if log.is_converged:
            epochs.setdefault(log.value("global_batch_size"), []).append(consumed(log))
    return {
        f"{lead.benchmark}_mini_{size}": {
            "Benchmark": lead.benchmark,
            "BS": size,
            "Hyperparams": {},
            "Epochs to converge": counts,
        }
        for size, counts in epochs.items()
        if len(counts) > 2
    }
