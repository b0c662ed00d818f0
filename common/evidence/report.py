"""One self-contained HTML page about run sets: scores, plots, comparison, findings, systems, differences.

Text from logs reaches the page through jinja2's escaping, or as text of an SVG that matplotlib escapes.
"""

import difflib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from common.evidence.audit import Audited, by_rule, summary
from common.evidence.compare.claims import VERDICTS, judge
from common.evidence.compare.lines import conclusion, figure_lines
from common.evidence.compare.reported import Reported, load_reported
from common.evidence.compare.reproduce import Reproduction, choose_published, reproduce
from common.evidence.ledger import Ledger
from common.evidence.log import Log, RunSet
from common.evidence.page import fill_template, save_page
from common.evidence.plots import ascii_name, draw, draw_quality
from common.evidence.records import counted, printable
from common.evidence.score import BASELINE, Score, Speedup, baseline_of, name_processors, score, speedups
from common.evidence.system import describe_set, fields_of
from common.evidence.text import between, duration, notes, number, score_cells
from common.files import existing_folder, explain_os_error

EXPLORER = "explore.html"  # the page of `ttt report --explore`, linked if it lies beside or one folder up


def write_report(
    path: Path, audited: Sequence[Audited], ledgers: Sequence[tuple[str, Ledger | str]] = ()
) -> None:
    save_page(path, render(audited, load_reported(), path.parent, ledgers))


def write_plot(path: Path, run_sets: Sequence[RunSet]) -> None:
    """Write an SVG file of quality against time: a panel for each benchmark and hardware, baselines first."""
    groups: dict[str, list[RunSet]] = {}
    for run_set in sorted(run_sets, key=lambda run_set: run_set.lead.configuration != BASELINE):
        first = score(run_set)
        groups.setdefault(_title(first) + " (a proxy)" * first.is_proxy, []).append(run_set)
    save_page(path, draw_quality(groups))


def page_path(out: Path, name: str, hint: str = "choose another --out") -> Path:
    """Return the page that --out names: `out` if that is NAME.html, else `name` in the folder `out`.

    Raises UserError unless it can be written; the folder need not be there yet.
    """
    page = out if out.suffix == ".html" and not os.path.isdir(out) else out / name
    with explain_os_error("cannot write here", printable(str(out)), hint=hint):
        tempfile.TemporaryFile(dir=existing_folder(page.parent)).close()
    return page


def render(
    audited: Sequence[Audited],
    published: Mapping[str, Reported],
    folder: Path,
    ledgers: Sequence[tuple[str, Ledger | str]] = (),
) -> str:
    """Return the page; its links to logs are relative to `folder`, where it will lie.

    `ledgers` are pairs of a file's label and its ledger, or why it could not be read.
    """
    checked = [(entry, score(entry.run_set)) for entry in audited]
    scores = [ours for _, ours in checked]
    theirs = [entry.score for facts in published.values() for entry in facts.sets]
    faster = speedups(scores) | speedups(theirs)
    explorers = [path for path in (folder / EXPLORER, folder.parent / EXPLORER) if path.is_file()]
    return fill_template(
        Path(__file__).parent / "templates" / "report.html",
        {
            form.__name__: form
            for form in (number, counted, between, lines, by_rule, summary, describe_system)
        },
        link=lambda path: link(path, folder),
        sections=[
            _section([(entry.run_set, ours) for entry, ours in checked if ours.group == group], faster)
            for group in sorted({ours.group for ours in scores})
        ],
        reported=[
            row | {"source": s.source} for s in theirs for row in [score_cells(s, faster.get(s.source))]
        ],
        compared=[
            comparison for entry, ours in checked if (comparison := _compare(entry.run_set, ours, published))
        ],
        conclusion=conclusion,
        figure_lines=figure_lines,
        verdicts=VERDICTS,
        claims=[claim for facts in published.values() for claim in judge(facts)],
        checked=checked,
        explorer=str(explorers[0]) if explorers else "",
        ledgers=[(path, ledger) for path, ledger in ledgers if isinstance(ledger, Ledger)],
        unread=[(path, why) for path, why in ledgers if isinstance(why, str)],
        notes=notes([*scores, *theirs]),
    )


def link(path: str, folder: Path) -> str:
    """Return the address of a file as seen from a folder: always a relative path, never a scheme."""
    return quote(os.path.relpath(path, folder))


def lines(text: str) -> Markup:
    """Return text as HTML, escaped, with its line breaks."""
    return Markup("<br>").join(text.split("\n"))


def describe_system(run_set: RunSet) -> dict[str, str]:
    """List the fields of a set's system description as text; {} without one."""
    fields = fields_of(describe_set(run_set))
    return {printable(name, 64): printable(value) for name, value in fields.items()}


def _compare(run_set: RunSet, ours: Score, published: Mapping[str, Reported]) -> Reproduction | None:
    """Compare a full-size run set with the published one that `ttt reproduce` chooses, if there is one."""
    facts = published.get(ours.benchmark)
    comparison = reproduce(run_set, choose_published(facts, run_set)) if facts else None
    return comparison if comparison and comparison.factors else None


def answers(scores: Sequence[Score], faster: Mapping[str, Speedup]) -> list[str]:
    """Return a sentence for each score but the baseline's: its speed-up over the baseline, with interval."""
    others = [s for s in scores if s.configuration != BASELINE] or list(scores)
    return [
        _answer(entry, baseline, scores, faster.get(entry.source))
        + "".join(_disturbance(one) for one in (entry, baseline) if one)
        for entry in others
        for baseline in [baseline_of(entry, scores)]
    ]


def _disturbance(entry: Score) -> str:
    """Remark that a set whose runs were all disturbed measures nothing; '' for any other set."""
    num_runs = len(entry.runs)
    if not num_runs or len(entry.disturbed) < num_runs:
        return ""
    return f" ({num_runs} of {num_runs} runs of {entry.configuration} disturbed: no measure.)"


def _answer(entry: Score, baseline: Score | None, scores: Sequence[Score], speedup: Speedup | None) -> str:
    name = entry.configuration
    if not entry.minutes:
        return f"{name} has no score: {entry.why_none}."
    if baseline is None or baseline is entry or speedup is None:
        return _answer_alone(entry, duration(entry.minutes, " minutes"), baseline, scores)
    num_runs = [len(score.converged) for score in (entry, baseline)]
    runs = f"{num_runs[0]} and {num_runs[1]} runs"
    if num_runs[0] == num_runs[1]:
        runs = f"{counted(num_runs[0], 'run')} each"
    if speedup.interval is None:
        has_miss = any(len(score.converged) < len(score.counting) for score in (entry, baseline))
        is_single = min(num_runs) < 2
        why = "a run missed its target" if has_miss else "too few runs" if is_single else "equal runs"
        return f"{name} was {speedup.ratio:.2f}x as fast as {BASELINE} in {runs}; no interval: {why}."
    low, high = speedup.interval.low, speedup.interval.high
    if low <= 1 <= high:
        return (
            f"No difference between {name} and {BASELINE} was shown: {speedup.ratio:.2f}x, but the "
            f"95 % interval, {low:.2f} to {high:.2f}, includes 1 ({runs})."
        )
    ratio, word = speedup.ratio, "faster"
    if high < 1:
        ratio, low, high, word = 1 / ratio, 1 / high, 1 / low, "slower"
    return f"{name} is {ratio:.2f}x {word} than {BASELINE} (95 % interval {low:.2f} to {high:.2f}, {runs})."


def _answer_alone(entry: Score, minutes: str, baseline: Score | None, scores: Sequence[Score]) -> str:
    """Answer for a score that is compared with no baseline, and say why not."""
    name = entry.configuration
    targets = {score.target for score in scores if score.configuration == BASELINE}
    others = [f"{target:g}" for target in sorted(targets - {entry.target})]
    if baseline is None and others:
        of = f"with {BASELINE}, whose target is {' or '.join(others)}"
        return f"{name} reaches its own target, {entry.target:g}, in {minutes}. It is not compared {of}."
    at = f", {entry.target:g}," if entry.target < 1 else ""
    answer = f"{name} reaches the target{at} in {minutes}."
    if name == BASELINE:
        return answer
    lack = f"no single {BASELINE} lies beside it" if targets else f"no {BASELINE} was scored on this hardware"
    return f"{answer} It is not compared: {name_processors(entry, scores) or lack}."


def _section(checked: Sequence[tuple[RunSet, Score]], faster: dict[str, Speedup]) -> dict[str, Any]:
    """Make the section of one benchmark and hardware; the baseline comes first."""
    checked = sorted(checked, key=lambda c: (c[1].configuration != BASELINE, c[1].configuration))
    run_sets, scores = zip(*checked, strict=True)
    first, diffs = scores[0], []
    for run_set, other in checked[1:]:
        if difference := _difference(run_sets[0].lead, run_set.lead):
            names = ascii_name(first.configuration), ascii_name(other.configuration)
            diffs.append((" -> ".join(names), difference))
    return {
        "title": _title(first),
        "is_proxy": first.is_proxy,
        "answers": answers(scores, faster),
        "rows": [score_cells(entry, faster.get(entry.source), scores) for entry in scores],
        "plots": draw(_title(first), run_sets, scores),
        "diffs": diffs,
    }


def _title(entry: Score) -> str:
    return f"{entry.benchmark or 'unknown benchmark'} on {entry.hardware}"


def _difference(before: Log, after: Log) -> str:
    names = before.configuration, after.configuration
    return "\n".join(difflib.unified_diff(before.settings, after.settings, *names, n=1, lineterm=""))
