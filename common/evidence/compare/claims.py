"""Compute the claims in reported.yaml from the published runs, and judge them."""

import statistics
from dataclasses import dataclass

from common.evidence import intervals
from common.evidence.compare import masked_accuracy
from common.evidence.compare.masked_accuracy import MOSAIC, OFFICIAL
from common.evidence.compare.reported import Claim, Published, Reported
from common.evidence.compare.reproduce import positive
from common.evidence.intervals import Interval
from common.evidence.score import olympic_mean, speedup
from common.evidence.text import between, number

HOLDS, UNDERSTATED, OVERSTATED = "holds", "understated", "overstated"
VERDICTS = {  # as a person reads them
    HOLDS: "holds",
    UNDERSTATED: "understated, the runs give more",
    OVERSTATED: "overstated, the runs give less",
}

COUNTED = {  # ratio of a claim -> field of a run, and its unit
    "samples": ("samples", "samples"),
    "samples_per_s": ("samples_per_s_overall", "samples/s, evaluation included"),
}


@dataclass(frozen=True, kw_only=True)
class ComputedClaim:
    """A claimed ratio computed from the runs of one published set, with its interval, formula and files.

    `without_evaluation`: a ratio of rates without the evaluation of `of`, if only `of` logs it.
    """

    against: Published
    value: float
    interval: Interval | None
    formula: str
    sources: tuple[str, str]  # with their divisions: open and closed have different rules
    without_evaluation: float | None


@dataclass(frozen=True)
class JudgedClaim:
    """A claim, its figures (the first decides) and the verdict.

    A claim holds within the interval, if it is the rounded figure, or between two ways to count evaluation.
    """

    claim: Claim
    computed: tuple[ComputedClaim, ...]
    verdict: str
    official_metric: str  # bert: what is left of it by the official count of masked tokens


def judge(reported: Reported) -> list[JudgedClaim]:
    judged = []
    for claim in reported.claims:
        computed = tuple(_compute(claim, against) for against in claim.against)
        metric = _official_metric(claim, reported.target) if reported.benchmark == "bert" else ""
        judged.append(JudgedClaim(claim, computed, _verdict(claim, computed[0]), metric))
    return judged


def _verdict(claim: Claim, computed: ComputedClaim) -> str:
    value, limits = computed.value, computed.interval
    low, high = sorted((value, computed.without_evaluation or value))
    is_rounded = round(value, 2 if claim.is_less_time else 1) == claim.value
    is_inside = limits is not None and limits.holds(claim.value)
    if is_rounded or is_inside or low <= claim.value <= high:
        return HOLDS
    return UNDERSTATED if value > claim.value else OVERSTATED


def _compute(claim: Claim, against: Published) -> ComputedClaim:
    a, b = against.score, claim.of.score
    other = None
    if claim.ratio == "minutes":
        value, limits, formula = _of_minutes(claim, against)
    else:
        name, unit = COUNTED[claim.ratio]
        above, below = positive(a.converged, name), positive(b.converged, name)
        means = statistics.fmean(above), statistics.fmean(below)
        value, limits = means[0] / means[1], intervals.ratio(above, below).interval
        formula = f"{number(means[0])} / {number(means[1])} {unit}"
        training = positive(b.converged, "samples_per_s")
        if claim.ratio != "samples" and training and not positive(a.converged, "samples_per_s"):
            other = means[0] / statistics.fmean(training)
    return ComputedClaim(
        against=against,
        value=value,
        interval=limits,
        formula=formula,
        sources=(f"{a.source} ({against.division})", f"{b.source} ({claim.of.division})"),
        without_evaluation=other,
    )


def _of_minutes(claim: Claim, against: Published) -> tuple[float, Interval | None, str]:
    slow, fast = against.score, claim.of.score
    faster = speedup(slow, fast)
    if faster is None:
        raise ValueError(f"claim '{claim.says}': a set without a score")
    if not claim.is_less_time:
        return faster.ratio, faster.interval, f"{slow.minutes:.3f} / {fast.minutes:.3f} minutes"
    limits = faster.interval
    if limits:
        limits = Interval(low=1 - 1 / limits.low, high=1 - 1 / limits.high, method=limits.method)
    return 1 - 1 / faster.ratio, limits, f"1 - {fast.minutes:.3f} / {slow.minutes:.3f} minutes"


def _official_metric(claim: Claim, target: float) -> str:
    """Say what is left of a claim about BERT when both sides are counted officially."""
    of, against = claim.of, claim.against[0]
    qualities = _official(of), _official(against)
    if claim.ratio == "samples_per_s":
        return "does not depend on the target"
    if min(qualities) >= target:
        return "unchanged: both sides reached the official target"
    if max(qualities) < target:
        mean = statistics.fmean(qualities)
        return f"between equals, but only to {mean:.4f}: neither side reached the official {target:g}"
    lower = masked_accuracy.convert(target, MOSAIC, OFFICIAL)
    return (
        f"not the same target: {of.submitter} stopped at {qualities[0]:.4f} ({target:g} of {MOSAIC:,} tokens "
        f"is {lower:.4f}), {against.submitter} at {qualities[1]:.4f}. Both to {lower:.4f}: "
        f"{_at_equal_quality(claim, against)}, where {claim.value:g}x was stated. What {of.submitter} needs "
        f"to {target:g} was not measured"
    )


def _at_equal_quality(claim: Claim, against: Published) -> str:
    """Compute the claimed ratio up to where both sides passed the target by MosaicML's count."""
    is_time = claim.ratio == "minutes"
    above, form = (against.mosaic_minutes, ".3f") if is_time else (against.mosaic_samples, ",.0f")
    below = positive(claim.of.score.converged, claim.ratio)
    means = [(olympic_mean(v) if is_time else statistics.fmean(v)) if v else None for v in (above, below)]
    if means[0] is None or means[1] is None:
        return "not in the collected figures"
    limits = intervals.ratio(above, below).interval
    spread = f" (95 % {between(limits)})" if limits else ""
    figures = f"{means[0]:{form}} / {means[1]:{form}} {claim.ratio}"
    return f"{means[0] / means[1]:.2f}x{spread} = {figures}"


def _official(entry: Published) -> float:
    return masked_accuracy.convert(entry.score.quality or 0.0, entry.masked_tokens, OFFICIAL)
