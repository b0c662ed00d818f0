"""Compare run sets with the published ones, factor by factor, and recompute the published claims.

A baseline is compared with the published baseline, optimized and mosaic with the published methods; --against
names another published set, or a part of its title (--against azure). Throughput and samples to target are
reproduced when two one-sided tests place their ratio within the margin, or when they are better. A set of
size mini is a proxy and reproduces nothing.

The exit code is 0 if every set is reproduced, 1 if any is not: worse, undecided by so few runs, or a proxy.
--claims reads no logs and exits with 0.

examples:
  ttt reproduce
  ttt reproduce results/8xA100-optimized --margin 0.03
  ttt reproduce results/1xH200-optimized/bert --against dgxa100_ngc22.09_pytorch
  ttt reproduce --claims
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator

from common.arguments import add_paths
from common.commands.score import score_json
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence import recipes
from common.evidence.compare.claims import VERDICTS, Judged, judge
from common.evidence.compare.masked_accuracy import COUNTINGS
from common.evidence.compare.reported import Reported, load_reported
from common.evidence.compare.reproduce import (
    MARGIN,
    MEANING,
    REPRODUCED,
    UNDECIDED,
    UNKNOWN,
    Counting,
    Factor,
    Part,
    Reproduction,
    reproduce,
)
from common.evidence.intervals import Interval
from common.evidence.log import load
from common.evidence.score import number

NO_SPREAD = 1e-6  # of a ratio; below it the runs agree to rounding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    parser.add_argument("--against", metavar="NAME", help="a published set of reported.yaml")
    parser.add_argument(
        "--margin", type=float, default=MARGIN, metavar="SHARE", help="0.05: within 5 %% counts as equal"
    )
    parser.add_argument("--claims", action="store_true", help="only what the published claims come to")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    if not 0 < args.margin < 1:
        raise UserError("the margin is a share between 0 and 1", where=f"--margin {args.margin:g}")
    published = load_reported()
    found = [] if args.claims else compared(args, published)
    benchmarks = set(published) if args.claims else {entry.score.benchmark for entry in found}
    claims = {name: judge(published[name]) for name in sorted(benchmarks & set(published))}
    if args.json:
        sets = [reproduction_json(entry) for entry in found]
        judged = {name: [claim_json(entry) for entry in entries] for name, entries in claims.items()}
        print(json.dumps({"sets": sets, "claims": judged}, indent=2, allow_nan=False))
    else:
        for entry in found:
            print(*reproduction_lines(entry), sep="\n")
        for name, entries in claims.items():
            print(f"{name}: what the published claims come to, from the published runs (reported.yaml)")
            print(*(line for entry in entries for line in claim_lines(entry)), sep="\n")
    return EXIT_OK if all(entry.is_reproduced for entry in found) else EXIT_FINDINGS


def compared(args: argparse.Namespace, published: dict[str, Reported]) -> list[Reproduction]:
    """Compare every run set found with its published one."""
    found = []
    for run_set in load(args.paths):
        facts = published.get(run_set.lead.benchmark)
        entry = None
        if facts:
            name = recipes.named(run_set.lead)
            entry = facts.named(args.against) if args.against else facts.of_configuration(name)
        found.append(reproduce(run_set, entry, args.margin))
    return found


def reproduction_lines(found: Reproduction) -> Iterator[str]:
    """Yield a set's comparison as text."""
    entry = found.score
    runs = f"{entry.num_converged} of {len(entry.runs)} runs"
    yield f"{entry.source}: {runs} of {entry.benchmark or 'unknown'} {entry.configuration}, {entry.label}"
    if found.why_not or found.published is None:
        yield f"  not compared: {found.why_not}"
        return
    theirs = found.published
    yield f"  against {theirs.title}, {len(theirs.score.converged)} runs, {theirs.score.source}"
    if found.is_same_runs:
        yield "  these are the published runs themselves: this checks the arithmetic, not a machine"
    for factor in found.factors:
        yield factor_line(factor, found.margin)
    for part in found.parts:
        yield part_line(part)
    for whose, countings in (("here", found.countings), ("published", found.published_countings)):
        yield from (counting_line(whose, counting) for counting in countings)
    yield f"  {conclusion(found)}"


def factor_line(factor: Factor, margin: float) -> str:
    """Return one factor's ratio, interval and verdict, the two means, and what so many runs could show."""
    note = f" ({factor.note})" if factor.note else ""
    ratio = factor.ratio
    if ratio is None or factor.measured is None or factor.published is None:
        return f"  {factor.name:18}{UNKNOWN}{note or ': not in the logs'}"
    means = (
        f"{value:.3f}" if factor.name == "minutes" else number(value)
        for value in (factor.measured, factor.published)
    )
    spread = f" (95 % {between(ratio.interval)})" if ratio.interval else " (a single run: no interval)"
    agreement, difference = MEANING[factor.name]
    verdict = f"{factor.verdict}: {difference}"
    if factor.verdict == REPRODUCED:
        verdict = f"{agreement} reproduced within {percent(margin)}"
    elif factor.verdict == UNDECIDED:
        verdict = f"undecided at a margin of {percent(margin)}"
    line = f"  {factor.name:18}{ratio.value:.2f}x{spread}: {verdict}; {' / '.join(means)}{note}"
    if ratio.detectable is None:
        return line
    if ratio.detectable < NO_SPREAD:
        return f"{line}; equal in every run, as far as evaluations tell"
    return f"{line}; runs could show {percent(ratio.detectable)}"


def part_line(part: Part) -> str:
    """Return the minutes of one part of the mean run, and the published mean."""
    if part.measured is None:
        return f"  {part.name:18}not in the logs"
    limits = part.measured.interval
    spread = f" (95 % {between(limits, 3)})" if limits else ""
    published = "not published" if part.published is None else f"published {part.published:.3f}"
    gap = "" if part.published is None else f", difference {part.measured.value - part.published:+.3f}"
    return f"  {part.name:18}{part.measured.value:.3f} min{spread}; {published}{gap}"


def counting_line(whose: str, counting: Counting) -> str:
    """Return a set's quality and samples to target in one counting of masked tokens."""
    reached = f"target reached by {counting.num_reached} of {counting.num_runs} runs"
    if counting.samples_to_target:
        reached += f", after {number(counting.samples_to_target)} samples"
    elif counting.num_reached == 0:
        reached = "target not reached"
    name = f"{COUNTINGS[counting.masked_tokens]} of {counting.masked_tokens:,} masked tokens"
    return f"  {whose:10}accuracy at the stop {counting.quality:.5f} by {name}: {reached}"


def conclusion(found: Reproduction) -> str:
    """Return the set's verdict in one sentence."""
    if found.is_reproduced:
        return "REPRODUCED: throughput and samples to target"
    if not found.score.minutes:
        return "NOT REPRODUCED: no score (two runs or more missed the target)"
    words = {factor.name: factor.verdict for factor in found.factors if factor.name != "minutes"}
    return "NOT REPRODUCED: " + ", ".join(f"{name} {verdict}" for name, verdict in words.items())


def claim_lines(judged: Judged) -> Iterator[str]:
    """Yield a claim, its figures with formula and files, and the verdict."""
    claim = judged.claim
    yield f'  "{claim.says}" ({claim.source}): {VERDICTS[judged.verdict]}'
    for found in judged.computed:
        value = percent(found.value) if claim.is_less_time else f"{found.value:.2f}x"
        limits = found.interval
        if limits and claim.is_less_time:
            value += f" (95 % {percent(limits.low)} to {percent(limits.high)})"
        elif limits:
            value += f" (95 % {between(limits)})"
        yield f"    {value} = {found.formula}"
        if found.without_evaluation:
            ratio = f"{found.without_evaluation:.2f}x"
            yield f"      {ratio} with the second's evaluation left out; the first's is not logged apart"
        yield f"      {found.sources[0]} over {found.sources[1]}"
    if judged.official_metric:
        yield f"    official metric: {judged.official_metric}"


def percent(share: float) -> str:
    """Return a share as text: 5 %, 3.7 %."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def between(limits: Interval, digits: int = 2) -> str:
    """Return an interval as text."""
    return f"{limits.low:.{digits}f} to {limits.high:.{digits}f}"


def reproduction_json(found: Reproduction) -> dict[str, object]:
    """Return a comparison for JSON."""
    theirs = found.published
    return {
        "score": score_json(found.score, None),
        "against": theirs and {"name": theirs.name, "title": theirs.title, "source": theirs.score.source},
        "reproduced": found.is_reproduced,
        "why_not": found.why_not,
        "margin": found.margin,
        "is_same_runs": found.is_same_runs,
        "factors": [dataclasses.asdict(factor) for factor in found.factors],
        "parts": [dataclasses.asdict(part) for part in found.parts],
        "countings": [dataclasses.asdict(counting) for counting in found.countings],
        "published_countings": [dataclasses.asdict(counting) for counting in found.published_countings],
    }


def claim_json(judged: Judged) -> dict[str, object]:
    """Return a claim for JSON."""
    return {
        "says": judged.claim.says,
        "source": judged.claim.source,
        "value": judged.claim.value,
        "verdict": judged.verdict,
        "official_metric": judged.official_metric,
        "computed": [
            {
                "against": found.against.title,
                "value": found.value,
                "interval": found.interval and dataclasses.asdict(found.interval),
                "formula": found.formula,
                "without_evaluation": found.without_evaluation,
                "sources": found.sources,
            }
            for found in judged.computed
        ],
    }
