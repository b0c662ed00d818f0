"""The plots of the report, as SVG with readable labels that follows the page's theme."""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeVar

import matplotlib
import numpy as np
from cycler import cycler
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.evidence import recipes
from common.evidence.intervals import Estimate
from common.evidence.log import QUALITIES, RunSet
from common.evidence.score import COLOURED_FIRST, Score
from common.evidence.text import number, target_beside

PALETTE = ("#7d8590", "#2f7ed8", "#d9702c", "#3a9d5d", "#a371f7", "#b58a1a")  # readable on black and on white
PARTS = {"startup": PALETTE[5], "training": PALETTE[1], "evaluation": PALETTE[2], "overshoot": PALETTE[0]}
INK = "#010203"  # becomes currentColor, so that a plot follows the page's theme
OWN_THEME = Markup(  # for an SVG outside a page, where currentColor is black on any background
    "<style>svg { color: #1f2328; background: #ffffff } "
    "@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117 } }</style>"
)
STYLE: dict[Any, Any] = {  # matplotlib types its keys as literals
    "svg.fonttype": "none",
    "svg.hashsalt": "ttt",  # equal input gives an equal page
    "text.parse_math": False,  # a name may contain dollar signs
    "text.color": INK,
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
}

Content = TypeVar("Content")


def draw(title: str, run_sets: Sequence[RunSet], scores: Sequence[Score]) -> list[Markup]:
    """Return the plots of one group; `title` begins their descriptions for screen readers."""
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.6)
        _plot_quality(axes, run_sets)
        return [
            as_svg(figure, f"{title}: quality against time, one line a run"),
            as_svg(_factors(scores), f"{title}: samples to target and samples per second"),
            as_svg(_split(scores), f"{title}: mean time of start-up, training, evaluation and overshoot"),
        ]


def draw_quality(groups: Mapping[str, Sequence[RunSet]]) -> Markup:
    """Return an SVG file of quality against time: a panel for each titled group, a line for each run."""

    def plot(axes: Axes, title: str, run_sets: Sequence[RunSet]) -> None:
        _plot_quality(axes, run_sets)
        axes.set_title(ascii_name(title))

    return draw_panels(groups, plot, size=(4, 3), description="quality against time, one line a run")


def draw_panels(
    contents: Mapping[str, Content],
    plot: Callable[[Axes, str, Content], None],
    *,
    size: tuple[float, float],
    description: str,
) -> Markup:
    """Return an SVG file with a panel of `size`, in inches, for each key; `plot` fills it."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(size[0] * len(contents), size[1]), layout="constrained")
        panels = figure.subplots(1, len(contents), squeeze=False)[0]
        for axes, (name, content) in zip(panels, contents.items(), strict=True):
            plot(axes, name, content)
        return stand_alone(as_svg(figure, description))


def _plot_quality(axes: Axes, run_sets: Sequence[RunSet]) -> None:
    points = [point for run_set in run_sets for log in run_set.logs for point in log.curve]
    unit, time = unit_of(max((point.minutes for point in points), default=0.0))
    names = [ascii_name(recipes.recipe_name(run_set.lead)) for run_set in run_sets]
    for run_set, name, colour in zip(run_sets, names, colours(names), strict=True):
        label = name
        for log in run_set.logs:
            times = [point.minutes * unit for point in log.curve]
            accuracies = [point.accuracy for point in log.curve]
            axes.plot(times, accuracies, color=colour, marker=".", lw=1, alpha=0.8, label=label)
            label = "_"  # matplotlib leaves this label out of the legend
    targets: dict[float, list[str]] = {}
    for run_set, name in zip(run_sets, names, strict=True):
        targets.setdefault(run_set.lead.target, []).append(name)
    for (target, those), style in zip(sorted(targets.items()), cycle(("--", ":", "-.")), strict=False):
        if target < 1:
            of = f" ({', '.join(those)})" * (len(targets) > 1)
            axes.axhline(target, color=INK, lw=0.8, ls=style, label=f"target {target:g}{of}")
    quality = QUALITIES.get(run_sets[0].lead.benchmark, "quality")
    axes.set(xlabel=f"{time} since run_start", ylabel=quality, xlim=(0, None))
    if axes.get_legend_handles_labels()[0]:  # below the axis, where no line crosses it
        axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _factors(scores: Sequence[Score]) -> Figure:
    figure = Figure(figsize=(7, 0.8 + 0.35 * len(scores)), layout="constrained")
    columns = figure.subplots(1, 2, sharey=True)
    factors = [entry.factors for entry in scores]
    for axes, title, estimates in (
        (columns[0], "samples to the target, interpolated", [f.samples if f else None for f in factors]),
        (columns[1], "samples/s of training", [f.samples_per_s if f else None for f in factors]),
    ):
        values = [estimate.value if estimate else 0.0 for estimate in estimates]
        errors = np.transpose([reach(estimate) for estimate in estimates])
        style = {"ecolor": INK, "capsize": 3, "lw": 1}
        bars = axes.barh(
            range(len(scores)),
            values,
            xerr=errors,
            color=colours([entry.configuration for entry in scores]),
            height=0.6,
            error_kw=style,
        )
        axes.bar_label(bars, labels=[number(value) if value else "not logged" for value in values], padding=6)
        axes.set(title=title, xticks=[], yticks=range(len(scores)), yticklabels=_names(scores))
        axes.margins(x=0.35)
        axes.spines["bottom"].set_visible(False)
    columns[0].invert_yaxis()
    return figure


def reach(estimate: Estimate | None) -> tuple[float, float]:
    """Return the lengths of an error bar below and above the mean."""
    if estimate is None or estimate.interval is None:
        return 0.0, 0.0
    below, above = estimate.value - estimate.interval.low, estimate.interval.high - estimate.value
    return max(below, 0.0), max(above, 0.0)


def _split(scores: Sequence[Score]) -> Figure:
    figure, axes = new_figure(0.9 + 0.35 * len(scores))
    unit, label = unit_of(max((entry.split.total for entry in scores if entry.split), default=0.0))
    left = [0.0] * len(scores)
    for part, colour in PARTS.items():
        widths = [getattr(entry.split, part) * unit if entry.split else 0.0 for entry in scores]
        name = part.replace("startup", "start-up")
        axes.barh(range(len(scores)), widths, left=left, color=colour, height=0.6, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel=f"{label}, mean of the runs", yticks=range(len(scores)), yticklabels=_names(scores))
    axes.invert_yaxis()
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def new_figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, height), layout="constrained")
    return figure, figure.subplots()


def as_svg(figure: Figure, description: str) -> Markup:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue().replace(INK, "currentColor")
    return Markup(f'<svg role="img" aria-label="{escape(description)}" ' + svg[svg.index("<svg") + 5 :])


def stand_alone(svg: Markup) -> Markup:
    """Return an SVG for a file of its own, with its own colours in light and dark theme."""
    start = svg.index(">") + 1
    return Markup(svg[:start] + OWN_THEME + svg[start:])


def colours(configurations: Sequence[str]) -> list[str]:
    """Return a colour for each: of a name in COLOURED_FIRST always the same, of its repetitions another."""
    named = dict(zip(COLOURED_FIRST, PALETTE, strict=False))
    free = cycle([colour for colour in PALETTE if colour not in map(named.get, configurations)])
    return [named.pop(name, "") or next(free) for name in configurations]


def unit_of(minutes: float) -> tuple[float, str]:
    return (1.0, "minutes") if minutes >= 5 else (60.0, "seconds")


def _names(scores: Sequence[Score]) -> list[str]:
    return [ascii_name(entry.configuration + target_beside(entry, scores, " to")) for entry in scores]


def ascii_name(text: str) -> str:
    """Replace characters that matplotlib's font may lack."""
    return text.encode("ascii", "replace").decode()
