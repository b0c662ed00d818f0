"""A comparison of two configurations in pairs: what is compared, and what the pairs so far decide.

Throughput is compared by the steps of a training, the other measures by whole runs of the same seed. Ratios
are of the second configuration over the first, taken on logarithms; quality is a difference. The test is
common/evidence/compare/sequential.py's. The error rate of 5 % is shared among the measures of one comparison.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from common.evidence.compare.factors import crossing, time_split
from common.evidence.compare.sequential import Decision, decide
from common.evidence.intervals import ALPHA
from common.evidence.log import Log

TEST = (
    "always-valid t-test, normal mixture (Wang and Ramdas 2025, arXiv:2310.03722): "
    "its error rate holds at every stop"
)
Verdict = Literal["better", "worse", "equivalent", "undecided", "unknown"]
Side = tuple[float | None, float | None]  # values of the first and the second configuration in a pair


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A quantity that is compared: as a ratio, or as a difference. `what` heads its row."""

    name: str
    what: str
    is_ratio: bool = True
    more_is_better: bool = False


THROUGHPUT = Measure(name="throughput", what="samples/s", more_is_better=True)
OF_RUNS = {
    measure.name: measure
    for measure in (
        Measure(name="time", what="seconds"),
        Measure(name="samples", what="samples"),
        Measure(name="quality", what="quality", is_ratio=False, more_is_better=True),
    )
}


@dataclass(frozen=True, kw_only=True)
class Margins:
    """The largest differences that do not matter: of a ratio as a fraction, of a quality absolute."""

    ratio: float
    quality: float

    def of(self, measure: Measure) -> float:
        return math.log1p(self.ratio) if measure.is_ratio else self.quality

    def describe(self, measure: Measure) -> str:
        return f"{100 * self.ratio:g} %" if measure.is_ratio else f"{self.quality:g}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measure. `means` are those of both sides, `value` their ratio or difference with its limits.

    Limits are None while they are infinite. The verdict is on the second configuration: it is unknown where
    a run has no value, as `note` says. `detectable` is the factor or difference that `max_pairs` pairs show.
    """

    measure: Measure
    pairs: tuple[Side, ...]
    means: tuple[float | None, float | None]
    verdict: Verdict
    value: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    decided_after: int | None = None
    more: int | None = None
    is_futile: bool = False
    detectable: float | None = None
    resolution: float = 0.0
    note: str = ""

    @property
    def is_over(self) -> bool:
        """True if no further pair is of use."""
        return self.verdict != "undecided" or self.is_futile


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The conditions of a decision; `alpha` is the error rate of one measure, a share of the whole."""

    margins: Margins
    max_pairs: int
    alpha: float

    def decide(self, measure: Measure, differences: Sequence[float], resolution: float) -> Decision:
        return decide(
            differences,
            margin=self.margins.of(measure),
            max_pairs=self.max_pairs,
            alpha=self.alpha,
            resolution=resolution,
        )


def judge(
    measure: Measure, pairs: Sequence[Side], rule: Rule, resolution: float = 0.0, note: str = ""
) -> Result:
    """Return what the pairs of a measure decide; `note` says why some have no value."""
    sides = tuple(zip(*pairs, strict=True)) or ((), ())
    means = tuple(_mean(measure, [value for value in side if value is not None]) for side in sides)
    known: dict[str, Any] = {"measure": measure, "pairs": tuple(pairs), "means": means}
    differences = known_differences(measure, pairs)
    if len(differences) < len(pairs) or not pairs:
        return Result(**known, verdict="unknown" if pairs else "undecided", note=note)
    decision = rule.decide(measure, differences, resolution)
    low, high, detectable = (
        _undo(measure, value) for value in (decision.low, decision.high, decision.detectable)
    )
    return Result(
        **known,
        value=_undo(measure, decision.mean),
        low=low,
        high=high,
        p=min(1.0, decision.p * ALPHA / rule.alpha),
        verdict=verdict_of(measure, decision),
        decided_after=decision.decided_after,
        more=decision.more,
        is_futile=decision.is_futile,
        detectable=detectable,
        resolution=resolution,
    )


def known_differences(measure: Measure, pairs: Sequence[Side]) -> list[float]:
    """Return the differences that the test sees, of the pairs in which both sides have a value."""
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    return [math.log(other / one) if measure.is_ratio else other - one for one, other in known]


def verdict_of(measure: Measure, decision: Decision) -> Verdict:
    if decision.outcome in ("higher", "lower"):
        return "better" if (decision.outcome == "higher") == measure.more_is_better else "worse"
    return "equivalent" if decision.outcome == "equivalent" else "undecided"


def _mean(measure: Measure, values: Sequence[float]) -> float | None:
    """Average so that the ratio, or difference, of two sides is the mean of their pairs."""
    if not values:
        return None
    return statistics.geometric_mean(values) if measure.is_ratio else statistics.fmean(values)


def _undo(measure: Measure, value: float | None) -> float | None:
    return math.exp(value) if measure.is_ratio and value is not None else value


def judge_runs(
    measures: Sequence[Measure],
    logs: tuple[Sequence[Log], Sequence[Log]],
    names: Sequence[str],
    rule: Rule,
    target: float | None = None,
) -> list[Result]:
    """Return what the runs of both sides, paired by seed, decide about each measure.

    `target` is a quality in place of that of the logs; not for the measure of time.
    """
    pairs = pair_runs(*logs)
    results = []
    for measure in measures:
        sides = [
            (read_value(measure, one, target), read_value(measure, other, target)) for one, other in pairs
        ]
        notes = [
            f"{name} did not cross the target between two evaluations in {missing} of {len(sides)} runs"
            for name, side in zip(names, zip(*sides, strict=True), strict=bool(sides))
            if (missing := side.count(None))
        ]
        steps = [resolution_of(log) for pair in pairs for log in pair]
        resolution = 0.0 if measure.is_ratio else max(steps, default=0.0)
        results.append(judge(measure, sides, rule, resolution, "; ".join(notes)))
    return results


def pair_runs(one: Sequence[Log], other: Sequence[Log]) -> list[tuple[Log, Log]]:
    """Return the runs of both sides that have a seed in common, in the order of the first side."""
    of_seed = {log.value("seed"): log for log in other}
    return [(log, of_seed[seed]) for log in one if (seed := log.value("seed")) in of_seed]


def read_value(measure: Measure, log: Log, target: float | None = None) -> float | None:
    """Read a measure from a run that went to its end; None where it did not cross the target.

    Times are of start-up and training, without evaluations: a study has more of them than a timed run. A run
    whose first evaluation is past the target has no known crossing either.
    """
    if measure.name == "quality":
        return log.curve[-1].accuracy
    passed = crossing(log.curve, log.target if target is None else target)
    if passed is None or passed.before is None:
        return None
    if measure.name == "samples":
        return passed.samples
    split = time_split(log)
    return 60 * (split.startup + split.training) if split else None


def resolution_of(log: Log) -> float:
    """Return the step of a run's accuracy, 1 / number of images or masked tokens; 0 if it is not logged."""
    last = log.last("eval_accuracy")
    number = last.metadata.get("total") if last else None
    return 1 / number if isinstance(number, int) and number > 0 else 0.0


def judge_targets(
    logs: Mapping[str, Sequence[Log]], rule: Rule
) -> dict[str, tuple[float, float, float, int]]:
    """Return by configuration whether its runs end at the target: target, mean quality, p-value, runs.

    Records over a fixed number of steps answer this question: is the mean of further runs above the target?
    The p-value is two-sided, for a mean at the target, times the number of configurations.
    """
    answers = {}
    for name, runs in logs.items():
        if runs:
            above = [log.curve[-1].accuracy - log.target for log in runs]
            steps = max(map(resolution_of, runs))
            decision = decide(above, margin=0.0, max_pairs=rule.max_pairs, resolution=steps)
            target, mean = runs[0].target, statistics.fmean(log.curve[-1].accuracy for log in runs)
            answers[name] = (target, mean, min(1.0, decision.p * len(logs)), len(runs))
    return answers
