"""Compare a run set with a published one, factor by factor: throughput, samples to target, the other parts.

A factor is reproduced when two one-sided tests at 5 % place the ratio of geometric means within the margin,
and better or worse when its 95 % interval excludes 1; otherwise the runs are too few to decide. Another
machine explains another throughput, but not other samples to target. On other or unknown accelerators a
better factor does not count as reproduced. A run that missed its target has no factors.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.evidence import intervals
from common.evidence.compare import masked_accuracy
from common.evidence.compare.devices import Devices, devices_of, of_text
from common.evidence.compare.masked_accuracy import COUNTINGS
from common.evidence.compare.rcp import Convergence, compare_with_reference
from common.evidence.compare.reported import SOURCE, Published, Reported
from common.evidence.intervals import Estimate, Ratio
from common.evidence.log import Log, Point, RunSet
from common.evidence.recipes import recipe_name
from common.evidence.score import Run, Score, mean_of, score, sort_by_launch, timed_logs

MARGIN = 0.05
DIGITS_MINUTES, DIGITS_QUALITY = 2e-4, 2e-6  # of reported.yaml, rounded
REPRODUCED, BETTER, WORSE, UNDECIDED, UNKNOWN = "reproduced", "better", "worse", "undecided", "unknown"
MEANING = {  # factor -> the meaning of agreement, and of a difference
    "minutes": ("minutes", "the factors below say where from"),
    "throughput": ("throughput", "hardware or software"),
    "samples to target": ("convergence", "recipe, data or metric"),
}


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One factor: its ratio, ours over the published one, and the verdict; the means are for reading only."""

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
    """A run set against a published one. `why_not`: why they are not compared; then there are no factors.

    `convergence` compares it with MLCommons' reference and decides nothing; None for a proxy or a mixed set.
    """

    score: Score
    published: Published | None
    margin: float
    why_not: str = ""
    factors: tuple[Factor, ...] = ()
    parts: tuple[Part, ...] = ()
    countings: tuple[Counting, ...] = ()
    published_countings: tuple[Counting, ...] = ()
    convergence: Convergence | None = None
    devices: Devices = Devices()
    is_same_runs: bool = False

    @property
    def has_other_devices(self) -> bool:
        theirs = self.published and of_text(self.published.accelerators)
        return bool(theirs and self.devices.are_others_than(theirs)) and not self.is_same_runs

    @property
    def is_reproduced(self) -> bool:
        """True if the set has a score, and throughput and samples to target are reproduced.

        On the published accelerators a better factor counts, too. The published runs reproduce themselves.
        """
        if self.is_same_runs:
            return True
        is_alike = self.published and self.devices.are_those_of(of_text(self.published.accelerators))
        enough = (REPRODUCED, BETTER) if is_alike else (REPRODUCED,)
        return bool(self.factors and self.score.minutes) and all(
            factor.verdict in enough for factor in self.factors if factor.name != "minutes"
        )


def reproduce(run_set: RunSet, published: Published | None, margin: float = MARGIN) -> Reproduction:
    """Compare a run set with a published one; a proxy, or a set without a counterpart, is not compared."""
    ours = score(run_set)
    why_not = ""
    if ours.is_proxy:
        why_not = "a proxy (size mini) trains a small stand-in and cannot reproduce a published result"
    elif published is None:
        name = f"{ours.benchmark or 'unknown benchmark'} {ours.configuration}"
        why_not = f"no published result belongs to '{name}'; --against NAME"
    if ours.mixture:
        why_not = f"a set is one recipe; {ours.mixture}"
    ordered = sort_by_launch(timed_logs(run_set.logs))
    logs = [ordered[index] for index in ours.counted]
    is_alike = not ours.is_proxy and not ours.mixture
    convergence = compare_with_reference(ours.benchmark, logs) if is_alike else None
    comparison = Reproduction(
        score=ours, published=published, margin=margin, why_not=why_not, convergence=convergence
    )
    if why_not or published is None:
        return comparison
    is_bert = ours.benchmark == "bert"
    return replace(
        comparison,
        factors=_factors(ours, logs, published, margin),
        parts=_parts(ours, published.score),
        countings=count_logs(logs, ours.target) if is_bert else (),
        published_countings=count_published(published) if is_bert else (),
        devices=devices_of(run_set),
        is_same_runs=are_same_runs(ours, published.score),
    )


def _factors(ours: Score, logs: Sequence[Log], published: Published, margin: float) -> tuple[Factor, ...]:
    points, note = _at_target(ours, logs, published)
    theirs = published.score.converged
    has_evaluation = all(run.samples_per_s for run in theirs + ours.converged)
    rate = "samples_per_s" if has_evaluation else "samples_per_s_overall"
    rate_note = "samples/s without evaluation" if has_evaluation else "samples/s, evaluation included"
    values = {
        "minutes": (positive(points, "minutes"), positive(theirs, "minutes"), note),
        "throughput": (positive(ours.converged, rate), positive(theirs, rate), rate_note),
        "samples to target": (positive(points, "samples"), positive(theirs, "samples"), note),
    }
    return tuple(_factor(name, *value, margin) for name, value in values.items())


def positive(rows: Sequence[Run | Point], name: str) -> list[float]:
    """Return a field of each row, where it is known and above 0."""
    return [value for row in rows if (value := getattr(row, name)) and value > 0]


def _at_target(ours: Score, logs: Sequence[Log], published: Published) -> tuple[list[Point], str]:
    """Find where each converged run passed the target as the published set counts it; say it in words."""
    finished = [log for log, run in zip(logs, ours.counting, strict=True) if math.isfinite(run.minutes)]
    is_bert, target = ours.benchmark == "bert", published.score.target
    counted = published.masked_tokens
    curves = [masked_accuracy.curve(log, counted) if is_bert else log.curve for log in finished]
    points = []
    for log, curve in zip(finished, curves, strict=True):
        if point := first_reaching(curve, target):
            if log.minutes and log.reached and point.minutes == log.reached.minutes:
                point = point._replace(minutes=log.minutes)  # where the run stopped, too
            points.append(point)
    if not is_bert:
        return points, ""
    if not all(curves):
        return [], "another evaluation set, or too few evaluations to tell its count of masked tokens"
    note = f"to {target:g} by {COUNTINGS[counted]}"
    if len(points) < len(finished):
        return [], f"{len(points)} of {len(finished)} runs came {note}"
    return points, note


def first_reaching(curve: Sequence[Point], target: float) -> Point | None:
    return next((point for point in curve if point.accuracy >= target), None)


def _factor(name: str, ours: Sequence[float], theirs: Sequence[float], note: str, margin: float) -> Factor:
    if not ours or not theirs:
        return Factor(name=name, measured=None, published=None, ratio=None, verdict=UNKNOWN, note=note)
    ratio = intervals.ratio(ours, theirs)
    if ratio.is_within(margin):
        verdict = REPRODUCED
    elif ratio.interval is None or ratio.interval.holds(1):
        verdict = UNDECIDED
    else:
        verdict = BETTER if (ratio.value > 1) == (name == "throughput") else WORSE
    return Factor(
        name=name,
        measured=statistics.fmean(ours),
        published=statistics.fmean(theirs),
        ratio=ratio,
        verdict=verdict,
        note=note,
    )


def _parts(ours: Score, published: Score) -> tuple[Part, ...]:
    evaluation, theirs = (
        [run.evaluation for run in score.converged if run.evaluation is not None]
        for score in (ours, published)
    )
    measured = intervals.mean(evaluation) if evaluation else None
    parts = [Part(name="evaluation", measured=measured, published=mean_of(theirs))]
    for name, part in (("start-up", "startup"), ("overshoot", "overshoot")):
        measured, mean = getattr(ours.factors, part, None), getattr(published.split, part, None)
        parts.append(Part(name=name, measured=measured, published=mean))
    return tuple(parts)


def count_logs(logs: Sequence[Log], target: float) -> tuple[Counting, ...]:
    """Return quality and samples to target of logs in both countings; () if they do not tell."""
    countings = []
    for tokens in COUNTINGS:
        curves = [masked_accuracy.curve(log, tokens) for log in logs]
        if not curves or not all(curves) or min(curve[-1].accuracy for curve in curves) <= 0:
            return ()
        reached = [first_reaching(curve, target) for curve in curves]
        samples = [point.samples for point in reached if point and point.samples]
        qualities = [curve[-1].accuracy for curve in curves]
        countings.append(_counting(tokens, qualities, len(samples), mean_of(samples)))
    return tuple(countings)


def count_published(published: Published) -> tuple[Counting, ...]:
    """Return quality and samples to target of a published set, as far as reported.yaml says.

    Its runs stopped at their first evaluation at the target. A run that was below the target then by the
    stricter, official count was below it before.
    """
    score, countings = published.score, []
    for tokens in COUNTINGS:
        counted = published.masked_tokens
        stops = [run.quality for run in score.counting if run.quality]
        qualities = [masked_accuracy.convert(quality, counted, tokens) for quality in stops]
        samples = score.samples_to_target if tokens == counted else mean_of(published.mosaic_samples)
        num_reached = sum(quality >= score.target for quality in qualities)
        countings.append(_counting(tokens, qualities, num_reached, samples))
    return tuple(countings)


def _counting(tokens: int, qualities: Sequence[float], num_reached: int, samples: float | None) -> Counting:
    return Counting(
        masked_tokens=tokens,
        quality=statistics.geometric_mean(qualities),
        num_reached=num_reached,
        num_runs=len(qualities),
        samples_to_target=samples if num_reached == len(qualities) else None,
    )


def choose_published(reported: Reported, run_set: RunSet) -> Published | None:
    """Return the entry of the same runs, else of a foreign set's name, else of the set's configuration."""
    ours = score(run_set)
    entries = reported.sets + reported.peers
    same = next((entry for entry in entries if are_same_runs(ours, entry.score)), None)
    by_name = None if run_set.lead.is_ours else find_named(reported, run_set)
    return same or by_name or reported.of_configuration(recipe_name(run_set.lead))


def find_named(reported: Reported, run_set: RunSet) -> Published | None:
    """Find the one entry with the submitter, system and, where the path tells it, round of a set."""
    lead = run_set.lead
    place = SOURCE.search(lead.file.parent.as_posix() if lead.file else "")
    version, submitter = (place[1], place[2]) if place else ("", lead.text("submission_org"))
    matches = [
        entry
        for entry in reported.sets + reported.peers
        if entry.name == lead.system
        and letters(entry.submitter) == letters(submitter)
        and version in ("", entry.round)
    ]
    return matches[0] if len(matches) == 1 else None


def letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def are_same_runs(ours: Score, published: Score) -> bool:
    """True if minutes and final accuracies of all runs agree to the published digits."""
    return all(
        len(values[0]) == len(values[1])
        and all(math.isclose(a, b, abs_tol=tolerance) for a, b in zip(*values, strict=True))
        for values, tolerance in (
            ([sorted(run.minutes for run in s.counting) for s in (ours, published)], DIGITS_MINUTES),
            ([sorted(run.quality or 0 for run in s.counting) for s in (ours, published)], DIGITS_QUALITY),
        )
    )
