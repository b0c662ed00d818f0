"""Compare a run set with a published one, factor by factor: throughput, samples to target, the other parts.

A factor is reproduced when two one-sided tests at 5 % place the ratio of geometric means within the margin,
and better or worse when its 95 % interval leaves 1 out; otherwise so few runs cannot tell. Another machine
explains another throughput, but not other samples to target. A run that missed its target has no factors.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common.evidence import intervals
from common.evidence.compare import masked_accuracy
from common.evidence.compare.masked_accuracy import COUNTINGS
from common.evidence.compare.reported import Published
from common.evidence.intervals import Estimate, Ratio
from common.evidence.log import Log, Point, RunSet
from common.evidence.score import Run, Score, score, sort_by_launch

MARGIN = 0.05
REPRODUCED, BETTER, WORSE, UNDECIDED, UNKNOWN = "reproduced", "better", "worse", "undecided", "unknown"
MEANING = {  # factor -> what agreement shows, and what a difference points at
    "minutes": ("minutes", "the factors below say where from"),
    "throughput": ("throughput", "hardware or software"),
    "samples to target": ("convergence", "recipe, data or metric"),
}


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One factor: its ratio, ours over the published one, the verdict; the means are for reading only."""

    name: str
    measured: float | None
    published: float | None
    ratio: Ratio | None
    verdict: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Minutes of the mean run that are neither factor; of a published set only the mean is known."""

    name: str
    measured: Estimate | None
    published: float | None


@dataclass(frozen=True, kw_only=True)
class Counting:
    """A set's quality at the stop and samples to target in one way of counting masked tokens."""

    masked_tokens: int
    quality: float
    num_reached: int
    num_runs: int
    samples_to_target: float | None  # None unless every run reached it


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A run set against a published one. `why_not`: what forbids a comparison; then there are no factors."""

    score: Score
    published: Published | None
    margin: float
    why_not: str = ""
    factors: tuple[Factor, ...] = ()
    parts: tuple[Part, ...] = ()
    countings: tuple[Counting, ...] = ()
    published_countings: tuple[Counting, ...] = ()
    is_same_runs: bool = False

    @property
    def is_reproduced(self) -> bool:
        """Whether the set has a score, and throughput and samples to target are reproduced or better."""
        return bool(self.factors and self.score.minutes) and all(
            factor.verdict in (REPRODUCED, BETTER) for factor in self.factors if factor.name != "minutes"
        )


def reproduce(run_set: RunSet, published: Published | None, margin: float = MARGIN) -> Reproduction:
    """Compare; a proxy, or a set without a published counterpart, is not compared at all."""
    found = score(run_set)
    why_not = ""
    if found.is_proxy:
        why_not = "a proxy (size mini) trains a small stand-in and cannot reproduce a published result"
    elif published is None:
        name = f"{found.benchmark or 'unknown benchmark'} {found.configuration}"
        why_not = f"no published result belongs to '{name}'; --against NAME"
    if found.mixture:
        why_not = f"a set is one recipe; {found.mixture}"
    if why_not or published is None:
        return Reproduction(score=found, published=published, margin=margin, why_not=why_not)
    ordered = sort_by_launch(run_set.logs)
    logs = [ordered[index] for index in found.counted]
    return Reproduction(
        score=found,
        published=published,
        margin=margin,
        factors=_factors(found, logs, published, margin),
        parts=_parts(found, published.score),
        countings=countings(logs, found.target) if found.benchmark == "bert" else (),
        published_countings=published_countings(published) if found.benchmark == "bert" else (),
        is_same_runs=_are_same(found, published.score),
    )


def _factors(found: Score, logs: Sequence[Log], published: Published, margin: float) -> tuple[Factor, ...]:
    points, note = _at_target(found, logs, published)
    theirs = published.score.converged
    has_evaluation = all(run.samples_per_s for run in theirs + found.converged)  # else: of the whole run

    def rates(runs: Sequence[Run]) -> list[float]:
        every = (run.samples_per_s if has_evaluation else run.samples_per_s_overall for run in runs)
        return [rate for rate in every if rate]

    return (
        _factor(
            "minutes",
            [p.minutes for p in points if p.minutes > 0],
            [run.minutes for run in theirs],
            margin,
            False,
            note,
        ),
        _factor(
            "throughput",
            rates(found.converged),
            rates(theirs),
            margin,
            True,
            "samples/s without evaluation" if has_evaluation else "samples/s, evaluation included",
        ),
        _factor(
            "samples to target",
            [p.samples for p in points if p.samples and p.samples > 0],
            [run.samples for run in theirs if run.samples],
            margin,
            False,
            note,
        ),
    )


def _at_target(found: Score, logs: Sequence[Log], published: Published) -> tuple[list[Point], str]:
    """Return where each converged run passed the target as the published set counts it, and that in words."""
    finished = [log for log, run in zip(logs, found.counting, strict=True) if math.isfinite(run.minutes)]
    is_bert, target = found.benchmark == "bert", published.score.target
    counted = published.masked_tokens
    curves = [masked_accuracy.curve(log, counted) if is_bert else log.curve for log in finished]
    points = []
    for log, curve in zip(finished, curves, strict=True):
        point = next((point for point in curve if point.accuracy >= target), None)
        if point and log.minutes and log.reached and point.minutes == log.reached.minutes:
            point = point._replace(minutes=log.minutes)  # where the run stopped, too
        points += [point] if point else []
    if not is_bert:
        return points, ""
    if not all(curves):
        return [], "another evaluation set, or too few evaluations to tell its count of masked tokens"
    note = f"to {target:g} by {COUNTINGS[counted]}"
    if len(points) < len(finished):
        return [], f"{len(points)} of {len(finished)} runs came {note}"
    return points, note


def _factor(
    name: str, ours: Sequence[float], theirs: Sequence[float], margin: float, more_is_better: bool, note: str
) -> Factor:
    if not ours or not theirs:
        return Factor(name=name, measured=None, published=None, ratio=None, verdict=UNKNOWN, note=note)
    ratio = intervals.ratio(ours, theirs)
    return Factor(
        name=name,
        measured=statistics.fmean(ours),
        published=statistics.fmean(theirs),
        ratio=ratio,
        verdict=_verdict(ratio, margin, more_is_better),
        note=note,
    )


def _verdict(ratio: Ratio, margin: float, more_is_better: bool) -> str:
    if ratio.is_within(margin):
        return REPRODUCED
    if ratio.interval is None or ratio.interval.low <= 1 <= ratio.interval.high:
        return UNDECIDED
    return BETTER if (ratio.value > 1) == more_is_better else WORSE


def _parts(found: Score, published: Score) -> tuple[Part, ...]:
    ours, theirs = found.factors, published.split
    evaluation = [run.evaluation for run in found.converged if run.evaluation is not None]
    return (
        Part(
            name="evaluation",
            measured=intervals.mean(evaluation) if evaluation else None,
            published=_mean([run.evaluation for run in published.converged if run.evaluation is not None]),
        ),
        Part(
            name="start-up",
            measured=ours.startup if ours else None,
            published=theirs.startup if theirs else None,
        ),
        Part(
            name="overshoot",
            measured=ours.overshoot if ours else None,
            published=theirs.overshoot if theirs else None,
        ),
    )


def countings(logs: Sequence[Log], target: float) -> tuple[Counting, ...]:
    """Return quality and samples to target of logs in both countings; nothing where they do not tell."""
    found = []
    for tokens in COUNTINGS:
        curves = [masked_accuracy.curve(log, tokens) for log in logs]
        if not curves or not all(curves) or min(curve[-1].accuracy for curve in curves) <= 0:
            return ()
        reached = [next((point for point in curve if point.accuracy >= target), None) for curve in curves]
        samples = [point.samples for point in reached if point and point.samples]
        found.append(
            Counting(
                masked_tokens=tokens,
                quality=statistics.geometric_mean(curve[-1].accuracy for curve in curves),
                num_reached=len(samples),
                num_runs=len(logs),
                samples_to_target=_mean(samples) if len(samples) == len(logs) else None,
            )
        )
    return tuple(found)


def published_countings(published: Published) -> tuple[Counting, ...]:
    """Return the same of a published set, as far as reported.yaml says.

    Its runs stopped at their first evaluation at the target. A run that was below it then by the stricter,
    official count was below it before.
    """
    found = []
    for tokens in COUNTINGS:
        values = [
            masked_accuracy.converted(run.quality, published.masked_tokens, tokens)
            for run in published.score.counting
            if run.quality
        ]
        num_reached = sum(value >= published.score.target for value in values)
        own = published.score.samples_to_target
        samples = own if tokens == published.masked_tokens else _mean(published.mosaic_samples)
        found.append(
            Counting(
                masked_tokens=tokens,
                quality=statistics.geometric_mean(values),
                num_reached=num_reached,
                num_runs=len(values),
                samples_to_target=samples if num_reached == len(values) else None,
            )
        )
    return tuple(found)


def _are_same(found: Score, published: Score) -> bool:
    """Whether the minutes of all runs agree to the published digits."""
    ours, theirs = (sorted(run.minutes for run in entry.counting) for entry in (found, published))
    return len(ours) == len(theirs) and all(
        math.isclose(a, b, abs_tol=2e-4) for a, b in zip(ours, theirs, strict=True)
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
