"""The parts of one run's minutes: samples over samples per second, and three parts that are not training.

    minutes = samples / (60 x samples_per_s) + evaluation + startup + overshoot

The target is crossed between two evaluations. Time, samples and evaluation are interpolated linearly there;
everything after the crossing is overshoot, so the four parts add up to the run's minutes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.evidence import intervals
from common.evidence.intervals import Estimate
from common.evidence.log import Log, Point


@dataclass(frozen=True)
class TimeSplit:
    """Minutes before the first block, of training and evaluation up to the crossing, and after the crossing.

    `samples` were consumed at the crossing; None if not logged, or if the first evaluation was past
    the target, so that nobody knows where the crossing was. Without a known crossing there is no overshoot.
    """

    startup: float
    training: float
    evaluation: float
    overshoot: float
    samples: float | None

    @property
    def total(self) -> float:
        return self.startup + self.training + self.evaluation + self.overshoot


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The terms of the formula above, means over runs. `minutes` is the mean of these runs, not the score."""

    num_runs: int
    minutes: Estimate
    samples: Estimate
    samples_per_s: Estimate
    evaluation: Estimate
    startup: Estimate
    overshoot: Estimate


class Crossing(NamedTuple):
    """The place of the target: `share` of the way from one evaluation (None: run_start) to the next."""

    before: Point | None
    after: Point
    share: float

    @property
    def minutes(self) -> float:
        start = self.before.minutes if self.before else self.after.minutes
        return start + self.share * (self.after.minutes - start)

    @property
    def samples(self) -> float | None:
        before = self.before or self.after
        if before.samples is None or self.after.samples is None:
            return None
        return before.samples + self.share * (self.after.samples - before.samples)


def crossing(curve: Sequence[Point], target: float) -> Crossing | None:
    """Return the first crossing of the target; None if it was never reached.

    A first evaluation above the target has nothing before it to interpolate from: the crossing is put there.
    """
    before = None
    for point in curve:
        if point.accuracy >= target:
            low = before.accuracy if before else target
            share = (target - low) / (point.accuracy - low) if point.accuracy > low else 1.0
            return Crossing(before, point, share if before else 1.0)
        before = point
    return None


def time_split(log: Log) -> TimeSplit | None:
    """Split one run's minutes; None if its log states none. Times outside the run are clipped to it."""
    start = log.first("run_start")
    if start is None or not log.minutes:
        return None
    passed = crossing(log.curve, log.target)
    end, evaluation = log.minutes, evaluation_minutes(log)
    if passed:
        end = min(max(passed.minutes, 0.0), end)
        until = evaluation_minutes(log, passed.before.minutes) if passed.before else 0.0
        evaluation = until + passed.share * (evaluation_minutes(log, passed.after.minutes) - until)
    starts = [event.time_ms for event in log.events("block_start", "epoch_start")]
    startup = min(max((min(starts, default=start.time_ms) - start.time_ms) / 60000, 0.0), end)
    evaluation = min(evaluation, end - startup)
    return TimeSplit(
        startup=startup,
        training=end - startup - evaluation,
        evaluation=evaluation,
        overshoot=log.minutes - end,
        samples=passed.samples if passed and passed.before else None,
    )


def evaluation_minutes(log: Log, until: float | None = None) -> float:
    """Return the minutes between eval_start and eval_stop, of the run or of its first `until` minutes."""
    start = log.first("run_start")
    if start is None or not log.minutes:
        return 0.0
    limit = start.time_ms + 60000 * min(log.minutes, log.minutes if until is None else until)
    total, opened = 0.0, None
    for event in log.events("eval_start", "eval_stop"):
        if event.key == "eval_start":
            opened = opened or event
        elif opened:
            total += max(min(event.time_ms, limit) - max(opened.time_ms, start.time_ms), 0)
            opened = None
    return min(total / 60000, log.minutes)


def factors(splits: Sequence[TimeSplit]) -> Factors | None:
    """Return the terms over the runs that log their samples; None without any."""
    known = [split for split in splits if split.samples and split.samples > 0 and split.training > 0]
    if not known:
        return None

    names = ("samples", "evaluation", "startup", "overshoot")
    means = {name: intervals.mean([getattr(split, name) for split in known]) for name in names}
    rate = intervals.rate([split.samples or 0.0 for split in known], [60 * split.training for split in known])
    minutes = intervals.mean([split.total for split in known])
    return Factors(num_runs=len(known), minutes=minutes, samples_per_s=rate, **means)
