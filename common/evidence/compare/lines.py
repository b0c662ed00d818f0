"""Comparisons with published results and judged claims, as lines of text and for JSON."""

from collections.abc import Iterator
from dataclasses import asdict

from common.evidence.compare.claims import VERDICTS, ComputedClaim, JudgedClaim
from common.evidence.compare.masked_accuracy import COUNTINGS
from common.evidence.compare.rcp import ACCEPTED, REFUSED, SCALED, Convergence
from common.evidence.compare.reported import Claim
from common.evidence.compare.reproduce import (
    MEANING,
    REPRODUCED,
    UNDECIDED,
    UNKNOWN,
    Counting,
    Factor,
    Part,
    Reproduction,
)
from common.evidence.score import score_json
from common.evidence.text import TWO_DIGITS, between, number, percent

NO_SPREAD = 1e-6  # of a ratio; below it the runs agree to rounding


def reproduction_lines(comparison: Reproduction) -> Iterator[str]:
    score, theirs = comparison.score, comparison.published
    runs = f"{score.num_converged} of {len(score.runs)} runs"
    yield f"{score.source}: {runs} of {score.benchmark or 'unknown'} {score.configuration}, {score.label}"
    yield from (f"  missed: {text}" for text in score.missed)
    if comparison.why_not or theirs is None:
        yield f"  not compared: {comparison.why_not}"
        yield from convergence_lines(comparison.convergence)
        return
    yield f"  against {theirs.title}, {len(theirs.score.converged)} runs, {theirs.score.source}"
    yield from (factor_line(factor, comparison.margin) for factor in comparison.factors)
    yield from map(part_line, comparison.parts)
    yield from (counting_line("here", counting) for counting in comparison.countings)
    yield from (counting_line("published", counting) for counting in comparison.published_countings)
    yield from convergence_lines(comparison.convergence)
    yield f"  {conclusion(comparison)}"


def factor_line(factor: Factor, margin: float) -> str:
    """Return one factor's ratio, interval and verdict, the two means, and the detectable difference."""
    note = f" ({factor.note})" if factor.note else ""
    ratio = factor.ratio
    if ratio is None or factor.measured is None or factor.published is None:
        return f"  {factor.name:18}{UNKNOWN}{note or ': not in the logs'}"
    form = "{:.3f}".format if factor.name == "minutes" else number
    limits = f"95 % {between(ratio.interval)}" if ratio.interval else "a single run: no interval"
    agreement, difference = MEANING[factor.name]
    verdict = f"{factor.verdict}: {difference}"
    if factor.verdict == REPRODUCED:
        verdict = f"{agreement} reproduced within {percent(margin)}"
    elif factor.verdict == UNDECIDED:
        verdict = f"undecided at a margin of {percent(margin)}"
    means = f"{form(factor.measured)} / {form(factor.published)}"
    line = f"  {factor.name:18}{ratio.value:.2f}x ({limits}): {verdict}; {means}{note}"
    if ratio.detectable is None:
        return line
    if ratio.detectable < NO_SPREAD:
        return f"{line}; equal in every run; a difference smaller than the evaluation interval cannot be seen"
    return f"{line}; runs could show {percent(ratio.detectable)}"


def part_line(part: Part) -> str:
    if part.measured is None:
        return f"  {part.name:18}not in the logs"
    value, limits = part.measured.value, part.measured.interval
    spread = f" (95 % {between(limits, '{:.3f}'.format)})" if limits else ""
    published = "not published"
    if part.published is not None:
        published = f"published {part.published:.3f}, difference {value - part.published:+.3f}"
    return f"  {part.name:18}{value:.3f} min{spread}; {published}"


def counting_line(whose: str, counting: Counting) -> str:
    reached = f"target reached by {counting.num_reached} of {counting.num_runs} runs"
    if counting.samples_to_target:
        reached += f", after {number(counting.samples_to_target)} samples"
    elif counting.num_reached == 0:
        reached = "target not reached"
    name = f"{COUNTINGS[counting.masked_tokens]} of {counting.masked_tokens:,} masked tokens"
    return f"  {whose:10}accuracy at the stop {counting.quality:.5f} by {name}: {reached}"


def convergence_lines(convergence: Convergence | None) -> Iterator[str]:
    """Compare a set with the reference of the closed division, and say what the difference means."""
    if convergence is None:
        return
    point, measured = convergence.point, convergence.measured
    reference = f"MLCommons' reference convergence points, ruleset {convergence.ruleset}"
    note = f"{convergence.note}; " if convergence.note else ""
    if point is None or measured is None:
        yield f"  closed reference  {UNKNOWN}: {note}{reference}"
        return
    where = f"batch {point.batch_size:,}"
    if len(point.batch_sizes) > 1:
        where += " between {:,} and {:,}".format(*point.batch_sizes)
    figures = f"{number(measured)} / {number(point.mean)} {convergence.unit}"
    verdict = {
        ACCEPTED: "the closed division would accept it",
        SCALED: f"the closed division would multiply the score by {convergence.scale:.4f}",
        REFUSED: "the closed division would refuse so few",
        UNKNOWN: "verdict unknown",
    }[convergence.verdict]
    yield f"  closed reference  {measured / point.mean:.2f}x: {figures} ({reference}, {where})"
    limits = f"95 % {between(convergence.interval, number)} over all runs; " if convergence.interval else ""
    yield f"                    {limits}the closed division accepts a mean of {number(point.least)} or more"
    rest = "" if convergence.is_closed else "; the open division need not match it"
    yield f"                    {note}{verdict}{rest}"


def conclusion(comparison: Reproduction) -> str:
    """Return the verdict, after a remark on accelerators that are not the published ones or unknown."""
    theirs, verdict = comparison.published, "NOT REPRODUCED"
    if comparison.is_same_runs:
        return "IDENTICAL: these are the published runs themselves: this checks the arithmetic, not a machine"
    factors = [factor for factor in comparison.factors if factor.name != "minutes"]
    text = ", ".join(f"{factor.name} {factor.verdict}" for factor in factors)
    if comparison.is_reproduced:
        verdict, text = "REPRODUCED", "throughput and samples to target"
    elif not comparison.score.minutes:
        text = f"no score ({comparison.score.why_none})"
    place = ""
    if theirs and comparison.has_other_devices:
        place = f"on other hardware ({comparison.devices} here, {theirs.accelerators} published): "
    elif not (comparison.devices.number and comparison.devices.kind):
        place = "on hardware that neither logs nor description nor name state: "
    return f"{place}{verdict}: {text}"


def claim_lines(judged: JudgedClaim) -> Iterator[str]:
    """Yield a claim, its figures with formula and files, and the verdict."""
    claim = judged.claim
    yield f'  "{claim.says}" ({claim.source}): {VERDICTS[judged.verdict]}'
    for computed in judged.computed:
        yield from (f"    {line}" for line in figure_lines(claim, computed))
        yield f"      {computed.sources[0]} over {computed.sources[1]}"
    if judged.official_metric:
        yield f"    official metric: {judged.official_metric}"


def figure_lines(claim: Claim, computed: ComputedClaim) -> Iterator[str]:
    """Yield the claimed figure computed from the runs, with interval and formula, and without evaluation."""
    form, unit = (percent, "") if claim.is_less_time else (TWO_DIGITS, "x")
    limits = f" (95 % {between(computed.interval, form)})" if computed.interval else ""
    yield f"{form(computed.value)}{unit}{limits} = {computed.formula}"
    if computed.without_evaluation:
        ratio = f"{computed.without_evaluation:.2f}x"
        yield f"  {ratio} with the second's evaluation left out; the first's is not logged apart"


def reproduction_json(comparison: Reproduction) -> dict[str, object]:
    theirs = comparison.published
    rows = ("factors", "parts", "countings", "published_countings")
    return {
        "score": score_json(comparison.score),
        "against": theirs and {"name": theirs.name, "title": theirs.title, "source": theirs.score.source},
        "reproduced": comparison.is_reproduced,
        "why_not": comparison.why_not,
        "margin": comparison.margin,
        "is_same_runs": comparison.is_same_runs,
        "accelerators": comparison.devices._asdict(),
        "has_other_accelerators": comparison.has_other_devices,
        "reference_convergence": comparison.convergence and asdict(comparison.convergence),
        **{name: [asdict(row) for row in getattr(comparison, name)] for name in rows},
    }


def claim_json(judged: JudgedClaim) -> dict[str, object]:
    return {
        "says": judged.claim.says,
        "source": judged.claim.source,
        "value": judged.claim.value,
        "verdict": judged.verdict,
        "official_metric": judged.official_metric,
        "computed": [asdict(computed) | {"against": computed.against.title} for computed in judged.computed],
    }
