"""One self-contained HTML page about run sets: scores, plots, findings, versions, configuration differences.

Text from logs reaches the page through jinja2's escaping, or as text of an SVG that matplotlib escapes.
"""

import contextlib
import difflib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.errors import UserError
from common.evidence.audit import Finding, num_errors
from common.evidence.log import RunSet
from common.evidence.records import printable
from common.evidence.score import BASELINE, Score, Speedup, described, notes, number, score, speedups

PALETTE = ("#7d8590", "#2f7ed8", "#e07b39", "#3a9d5d", "#a371f7", "#d4a72c")  # readable on black and on white
PARTS = {"startup": PALETTE[5], "training": PALETTE[1], "evaluation": PALETTE[2], "overshoot": PALETTE[0]}
INK = "#010203"  # becomes currentColor, so that a plot follows the page's theme
STYLE: dict[Any, Any] = {  # matplotlib types its keys as literals
    "svg.fonttype": "none",
    "svg.hashsalt": "ttt",  # equal input gives an equal page
    "text.parse_math": False,  # a name may contain dollar signs
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A run set with its findings, and the official checker's verdicts in one line."""

    run_set: RunSet
    findings: Sequence[Finding]
    official: str

    @cached_property
    def score(self) -> Score:
        return score(self.run_set)

    @property
    def num_findings(self) -> int:
        return len(self.findings)

    @property
    def num_errors(self) -> int:
        return num_errors(self.findings)


@dataclass(frozen=True, kw_only=True)
class Section:
    """What is shown of one benchmark on one hardware: table rows, plots, configuration differences."""

    title: str
    is_proxy: bool
    rows: Sequence[dict[str, str]]
    plots: Sequence[Markup]
    diffs: Sequence[tuple[str, str]]


def write_report(path: Path, checked: Sequence[Checked], reported: Sequence[Score]) -> None:
    """Write the page to `path`, whole or not at all. Raises: UserError if the folder cannot be written."""
    page = render(checked, reported)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise UserError(f"cannot write the report: {error.strerror}", where=printable(str(path))) from error


def render(checked: Sequence[Checked], reported: Sequence[Score]) -> str:
    """Return the page."""
    scores = [entry.score for entry in checked]
    faster, reported_faster = speedups(scores), speedups(reported)
    groups = sorted({entry.group for entry in scores})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with matplotlib.rc_context():
        matplotlib.rcParams.update(STYLE)
        sections = [_section([c for c in checked if c.score.group == group], faster) for group in groups]
    return environment.get_template("report.html").render(
        sections=sections,
        reported=[
            {"benchmark": entry.benchmark, "source": entry.source}
            | described(entry, reported_faster.get(entry.source))
            for entry in reported
        ],
        checked=checked,
        notes=notes([*scores, *reported]),
    )


def _section(checked: Sequence[Checked], faster: dict[str, Speedup]) -> Section:
    checked = sorted(checked, key=lambda c: (c.score.configuration != BASELINE, c.score.configuration))
    scores = [entry.score for entry in checked]
    first = scores[0]
    return Section(
        title=f"{first.benchmark or 'unknown benchmark'} on {first.hardware}",
        is_proxy=first.is_proxy,
        rows=[described(entry, faster.get(entry.source)) for entry in scores],
        plots=[
            _svg(_quality([entry.run_set for entry in checked]), "quality against time, one line a run"),
            _svg(_factors(scores), "samples to target and samples per second"),
            _svg(_split(scores), "mean minutes of start-up, training, evaluation and overshoot"),
        ],
        diffs=[
            (f"{_name(first)} -> {_name(other)}", difference)
            for entry, other in zip(checked[1:], scores[1:], strict=True)
            if (difference := _difference(checked[0].run_set, entry.run_set))
        ],
    )


def _difference(before: RunSet, after: RunSet) -> str:
    lines = difflib.unified_diff(
        before.lead.settings,
        after.lead.settings,
        before.lead.configuration,
        after.lead.configuration,
        n=1,
        lineterm="",
    )
    return "\n".join(lines)


def _quality(run_sets: Sequence[RunSet]) -> Figure:
    figure, axes = _figure(3.2)
    points = [point for run_set in run_sets for log in run_set.logs for point in log.curve]
    unit, label = _unit(max((point.minutes for point in points), default=0.0))
    for run_set, colour in zip(run_sets, _colours(run_sets), strict=True):
        name = _ascii(run_set.lead.configuration)
        for log in run_set.logs:
            times = [point.minutes * unit for point in log.curve]
            axes.plot(
                times,
                [point.accuracy for point in log.curve],
                color=colour,
                marker=".",
                lw=1,
                alpha=0.8,
                label=name,
            )
            name = "_"  # matplotlib's word for: not in the legend
    target = run_sets[0].lead.target
    if target < 1:
        axes.axhline(target, color=INK, lw=0.8, ls="--", label=f"target {target:g}")
    axes.set(xlabel=f"{label} since run_start", ylabel="quality")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower right")
    return figure


def _factors(scores: Sequence[Score]) -> Figure:
    figure = Figure(figsize=(7, 0.8 + 0.35 * len(scores)), layout="constrained")
    columns = figure.subplots(1, 2, sharey=True)
    names = [_name(entry) for entry in scores]
    for axes, title, values in (
        (columns[0], "samples to target", [entry.samples_to_target or 0 for entry in scores]),
        (columns[1], "samples/s of training", [entry.samples_per_s or 0 for entry in scores]),
    ):
        bars = axes.barh(range(len(scores)), values, color=_colours(scores), height=0.6)
        axes.bar_label(bars, labels=[number(value) for value in values], padding=3)
        axes.set(title=title, xticks=[], yticks=range(len(scores)), yticklabels=names)
        axes.margins(x=0.25)
        axes.spines["bottom"].set_visible(False)
    columns[0].invert_yaxis()
    return figure


def _split(scores: Sequence[Score]) -> Figure:
    figure, axes = _figure(0.9 + 0.35 * len(scores))
    unit, label = _unit(max((entry.split.total for entry in scores if entry.split), default=0.0))
    left = [0.0] * len(scores)
    for part, colour in PARTS.items():
        widths = [getattr(entry.split, part) * unit if entry.split else 0.0 for entry in scores]
        axes.barh(range(len(scores)), widths, left=left, color=colour, height=0.6, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel=f"{label}, mean of the runs", yticks=range(len(scores)), yticklabels=map(_name, scores))
    axes.invert_yaxis()
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, description: str) -> Markup:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue().replace(INK, "currentColor")
    return Markup(f'<svg role="img" aria-label="{description}" ' + svg[svg.index("<svg") + 5 :])


def _colours(entries: Sequence[object]) -> list[str]:
    return [PALETTE[index % len(PALETTE)] for index in range(len(entries))]


def _unit(minutes: float) -> tuple[float, str]:
    return (1.0, "minutes") if minutes >= 5 else (60.0, "seconds")


def _name(entry: Score) -> str:
    return _ascii(entry.configuration)


def _ascii(text: str) -> str:
    """Return text without the characters that matplotlib's font may lack."""
    return text.encode("ascii", "replace").decode()
