"""The report of a comparison: lines after each pair, a table of 80 columns, JSON, and a plot as SVG."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.text import Text

from common.errors import list_some
from common.evidence.intervals import ALPHA, CONFIDENCE
from common.evidence.plots import INK, PALETTE, STYLE, as_svg, ascii_name, stand_alone
from common.evidence.records import counted
from common.evidence.text import DASH, make_table, open_console, size_title
from common.files import save_with_picture
from common.measure.device_run import NUM_DEVICES
from common.study.compare.comparison import TEST, THROUGHPUT, Measure, Result, Rule, known_differences

WIDTH = 80  # columns, where there is no terminal to ask
MAX_LISTED = 6  # differences of the two configurations


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two configurations, the rule, and what it decides about each measure.

    `targets` answer whether each configuration's runs end at the target, see judge_targets. `dependences`
    are those of step times, empty for runs.
    """

    benchmark: str
    size: str
    names: tuple[str, str]
    differences: tuple[str, ...]
    quality_name: str
    rule: Rule
    results: tuple[Result, ...]
    targets: dict[str, tuple[float, float, float, int]] = field(default_factory=dict)
    commits: tuple[str, ...] = ()
    dependences: dict[str, Any] = field(default_factory=dict)
    test: str = TEST
    confidence: float = CONFIDENCE  # of all measures together

    @property
    def is_over(self) -> bool:
        return all(result.is_over for result in self.results)

    @property
    def num_pairs(self) -> int:
        return max(len(result.pairs) for result in self.results)


def save(comparison: Comparison, path: Path) -> Iterator[Path]:
    """Write JSON and plot in place of those of fewer pairs; `path` has no suffix. Yields their paths."""
    return save_with_picture(path, comparison, draw(comparison))


def show(comparison: Comparison) -> None:
    console = open_console(WIDTH)
    rows = [
        [
            result.measure.what,
            *(format_figure(result.measure, mean) for mean in result.means),
            limits_of(result),
            format_p(result.p),
            "not known" if result.verdict == "unknown" else result.verdict,
        ]
        for result in comparison.results
    ]
    title = f"{comparison.benchmark}, {size_title(comparison.size)}, {counted(comparison.num_pairs, 'pair')}"
    columns = ["", "A", "B", "B over A", "p", "B is"]
    console.print(Text("\n".join(describe_sides(comparison))))
    console.print(make_table(title, columns, rows, left=("", "B is")))
    for line in describe(comparison):
        console.print(Text(line))


def describe_sides(comparison: Comparison) -> Iterator[str]:
    for letter, name in zip("AB", comparison.names, strict=True):
        yield f"{letter}: {name}"
    if comparison.size == "full" and THROUGHPUT in (result.measure for result in comparison.results):
        yield f"steps of one of {NUM_DEVICES} devices with its share of the batch; nothing is exchanged"
    differences = list_some(comparison.differences, MAX_LISTED)
    yield f"they differ in {differences}" if differences else "they are the same configuration"


def describe(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence for each measure, the p-values of the target, and how the test was made."""
    for result in comparison.results:
        yield f"{result.measure.name}: {sentence(result, comparison.rule)}"
    for name, (target, mean, p, number) in comparison.targets.items():
        side = f"shown to be {'above' if mean > target else 'below'}"
        shown = side if p < ALPHA else "not shown to be above or below"
        asked = f", {len(comparison.targets)} sides together" if len(comparison.targets) > 1 else ""
        yield f"{name}: mean {mean:.4f} of {number} runs, target {target:g}: {shown} (p={p:.4f}{asked})"
    shares = len(comparison.results)
    together = f", {shares} measures together" if shares > 1 else ""
    yield f"limits of {100 * comparison.confidence:g} %{together}; {comparison.test}"


def sentence(result: Result, rule: Rule, subject: str = "B", reference: str = "A") -> str:
    """Say what is decided about a measure, or what would decide it."""
    margin = rule.margins.describe(result.measure)
    to, than = (f" {word} {reference}" if reference else "" for word in ("to", "than"))
    if result.verdict == "unknown":
        return f"not known: {result.note}; --set target=Q compares at a lower quality"
    if result.verdict == "equivalent":
        return f"{subject} is equivalent{to} within {margin}, after {result.decided_after} pairs"
    if result.verdict != "undecided":
        return f"{subject} is {result.verdict}{than}, after {result.decided_after} pairs (p={result.p:.4f})"
    if not result.pairs:
        return "no pair is finished yet"
    if result.more is None:
        needs = "too few pairs for a forecast"
    else:
        needs = f"about {result.more:,} more would decide, if mean and spread stay"
    undecided = f"undecided after {len(result.pairs)} of at most {rule.max_pairs} pairs: {needs}"
    if result.detectable is None:
        return undecided
    size = f"{result.detectable:.2f}x" if result.measure.is_ratio else f"{result.detectable:.4f}"
    return f"{undecided}; {rule.max_pairs} pairs show a true difference of {size} in 80 % of cases"


def describe_progress(result: Result, rule: Rule) -> str:
    value = f"{limits_of(result)}, p={format_p(result.p)}: " if result.value is not None else ""
    return f"  {result.measure.name}: {value}{sentence(result, rule).partition('; ')[0]}"


def limits_of(result: Result) -> str:
    """Write the ratio or difference with its limits, if there are any; a dash stands for no value."""
    if result.value is None:
        return DASH
    form = "{:.2f}x" if result.measure.is_ratio else "{:+.4f}"
    if result.low is None or result.high is None:
        return form.format(result.value)
    plain = form.removesuffix("x")
    return f"{form.format(result.value)} ({plain.format(result.low)} to {plain.format(result.high)})"


def format_figure(measure: Measure, value: float | None) -> str:
    if value is None:
        return DASH
    if not measure.is_ratio:
        return f"{value:.4f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def format_p(p: float | None) -> str:
    return DASH if p is None else f"{p:.4f}"


def draw(comparison: Comparison) -> Markup:
    """Return an SVG file: the mean of each measure with its limits after every pair, and the single pairs."""
    with matplotlib.rc_context(STYLE):
        number = len(comparison.results)
        drawing = Figure(figsize=(7, 0.4 + 2.2 * number), layout="constrained")
        panels = drawing.subplots(number, 1, squeeze=False)[:, 0]
        for axes, result in zip(panels, comparison.results, strict=True):
            _plot_result(axes, result, comparison.rule)
        panels[-1].set_xlabel("pairs")
        one, other = map(ascii_name, comparison.names)
        panels[0].set_title(f"{other} over {one}", loc="left")
        return stand_alone(as_svg(drawing, "mean and limits of each measure after every pair"))


def _plot_result(axes: Axes, result: Result, rule: Rule) -> None:
    measure, margin = result.measure, rule.margins.of(result.measure)
    undo = math.exp if measure.is_ratio else float
    axes.axhspan(undo(-margin), undo(margin), color=PALETTE[0], alpha=0.25, lw=0, label="margin")
    axes.axhline(undo(0.0), color=INK, lw=0.8)
    differences = known_differences(measure, result.pairs)
    counts = range(1, len(differences) + 1)
    if differences:
        states = [rule.decide(measure, differences[:count], result.resolution) for count in counts]
        axes.plot(counts, [undo(state.mean) for state in states], color=PALETTE[1], lw=1.2, label="mean")
        limited = [
            (state.num_pairs, undo(state.low), undo(state.high))
            for state in states
            if state.low is not None and state.high is not None
        ]
        if limited:
            places, lows, highs = zip(*limited, strict=True)
            axes.fill_between(places, lows, highs, color=PALETTE[1], alpha=0.25, lw=0, label="limits")
        axes.plot(counts, np.vectorize(undo)(differences), "o", ms=3, color=PALETTE[2], label="a pair")
    axes.set(ylabel=ascii_name(measure.what), xlim=(0.5, max(len(differences), 1) + 0.5))
    if measure.is_ratio:
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=7, loc="best")
