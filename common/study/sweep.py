"""A sweep: configurations at several budgets, and the answers of their trade-off curves as tables and SVG."""

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup

from common.errors import UserError
from common.evidence.log import Log
from common.evidence.plots import (
    INK,
    STYLE,
    as_svg,
    ascii_name,
    colours,
    new_figure,
    reach,
    stand_alone,
    unit_of,
)
from common.evidence.text import DASH, Form, make_table, open_console, spread, spread_of
from common.study import curves
from common.study.cells import TABLE_WIDTH, Cell, Study, list_codes, name_cell
from common.study.compare.compare import list_differences
from common.study.compare.comparison import resolution_of
from common.study.curves import Answers, Curve, Gap, Value
from common.training.load import load_open

MAX_BUDGETS = 20
ONE_DIGIT, FOUR_DIGITS = "{:.1f}".format, "{:.4f}".format


def parse_budgets(text: str) -> list[float]:
    """Return the budgets of `0.25,0.5,1`, rising. Raises UserError."""
    try:
        budgets = sorted({float(part) for part in text.split(",")})
    except ValueError:
        budgets = []
    if not 0 < len(budgets) <= MAX_BUDGETS or not all(0 < budget <= 10 for budget in budgets):
        raise UserError(f"--budgets {text}: expected shares of a training, such as 0.25,0.5,1")
    return budgets


def check_configurations(args: argparse.Namespace) -> None:
    """Raise UserError for two names of one configuration, and for a budget beside those of --budgets."""
    names = dict.fromkeys(args.configurations)
    loaded = {name: load_open(args.benchmark, name, size=args.size, settings=args.set) for name in names}
    for name in names:
        if not args.trials and (place := loaded[name].origins.get(("budget",))):
            hint = "--budgets says those of every cell: leave this one out"
            raise UserError(f"{name} has a budget already", where=f"{place}: budget", hint=hint)
    for one, other in itertools.combinations(names, 2):
        if not list_differences(loaded[one].config, loaded[other].config):
            what = f"{one} and {other} are the same configuration at size {args.size}"
            raise UserError(what, hint="leave one of them out")


def sweep_cells(benchmark: str, configurations: Sequence[str], budgets: Sequence[float]) -> list[Cell]:
    """Return a cell for each configuration and budget; the shortest come first."""
    return [
        Cell(name=name_cell(benchmark, name, f"{budget:g}"), configuration=name, budget=budget)
        for budget in budgets
        for name in dict.fromkeys(configurations)
    ]


def compare_curves(study: Study, logs: Mapping[str, Sequence[Log]], price: float | None) -> Answers | None:
    """Compare the curves of a sweep by its finished runs; None without any."""
    resolution = max((resolution_of(log) for runs in logs.values() for log in runs), default=0.0)
    points: dict[str, list[curves.Point]] = {cell.configuration: [] for cell in study.cells}  # in this order
    for cell in study.cells:
        if logs[cell.name]:
            assert cell.budget is not None  # as sweep_cells makes them
            runs = [curves.read_run(log) for log in logs[cell.name]]
            points[cell.configuration].append(curves.make_point(cell.budget, runs, price, resolution))
    by_time = {name: sorted(some, key=lambda point: point.seconds.value) for name, some in points.items()}
    lines = [Curve(configuration=name, points=tuple(some)) for name, some in by_time.items() if some]
    if not lines:
        return None
    target = next(runs[0].target for runs in logs.values() if runs)
    answers = curves.compare_curves(lines, target=target, price=price, resolution=resolution)
    return replace(answers, codes=list_codes(logs))


def draw(answers: Answers, quality_name: str, title: str) -> Markup:
    """Return an SVG file of the curves with the intervals of their points; up and left is better."""
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(3.6)
        per_minute, unit = unit_of(max(curve.mean.times[-1] for curve in answers.curves) / 60)
        scale = per_minute / 60  # of seconds
        names = [curve.configuration for curve in answers.curves]
        for curve, colour in zip(answers.curves, colours(names), strict=True):
            times = [seconds * scale for seconds in curve.mean.times]
            name = ascii_name(curve.configuration)
            axes.plot(times, curve.mean.qualities, color=colour, lw=1.2, label=name)
            axes.errorbar(
                [point.seconds.value * scale for point in curve.points],
                [point.quality.value for point in curve.points],
                xerr=np.transpose([reach(point.seconds) for point in curve.points]) * scale,
                yerr=np.transpose([reach(point.quality) for point in curve.points]),
                fmt="o",
                ms=4,
                lw=0.8,
                capsize=2,
                color=colour,
            )
            for point in curve.points:
                place = (point.seconds.value * scale, point.quality.value)
                axes.annotate(f"{point.budget:g}", place, (4, -10), textcoords="offset points", fontsize=7)
        axes.axhline(answers.target, color=INK, lw=0.8, ls="--", label=f"target {answers.target:g}")
        axes.set(xlabel=f"{unit} of training (up and left is better)", ylabel=quality_name, xlim=(0, None))
        if (price := answers.price_per_hour) is not None:
            rate = price / 3600 / scale
            there_and_back: Any = (lambda time: time * rate, lambda cost: cost / rate)
            cost_axis = axes.secondary_xaxis("top", functions=there_and_back)
            cost_axis.set_xlabel(f"dollars, at {price:g} an hour")
        axes.set_title(f"{title}, 95 % intervals")
        axes.legend(frameon=False, loc="lower right")
        about = "quality against training time, one curve a configuration, one point a budget"
        return stand_alone(as_svg(figure, about))


def show(answers: Answers, quality_name: str, title: str) -> None:
    console = open_console(TABLE_WIDTH)
    names = [curve.configuration for curve in answers.curves]
    rows = [
        [
            curve.configuration,
            f"{point.budget:g}",
            f"{len(point.runs)}",
            f"{point.samples:,.0f}",
            spread_of(point.seconds, ONE_DIGIT),
            spread_of(point.cost, FOUR_DIGITS) if point.cost else DASH,
            spread_of(point.quality, FOUR_DIGITS),
        ]
        for curve in answers.curves
        for point in curve.points
    ]
    columns = ["configuration", "budget", "runs", "samples", "seconds", "dollars", quality_name]
    heading = f"{title}: {quality_name} at the end of each budget"
    console.print(make_table(heading, columns, rows, left=columns[:1]))
    rows = [
        [
            f"{level.quality:.4f}" + " (target)" * (level.quality == answers.target),
            *(with_bound(value, ONE_DIGIT) for value in level.seconds.values()),
            *(with_bound(value, "{:.2f}".format, "x") for value in level.times_faster.values()),
        ]
        for level in answers.equal_quality
    ]
    columns = [quality_name, *(f"{name}, s" for name in names), *(f"{name} faster" for name in names[1:])]
    console.print(make_table("time at equal quality", columns, rows))
    rows = [
        [f"{moment.seconds:.1f}", *(with_bound(value, FOUR_DIGITS) for value in moment.quality.values())]
        for moment in answers.equal_time
    ]
    console.print(make_table("quality at equal time", ["seconds", *names], rows))
    console.print(*describe_comparisons(answers), answers.interpolation + ".", sep="\n")


def with_bound(value: Value, form: Form, unit: str = "") -> str:
    if value.estimate is None:
        return DASH
    text, limits = f"{value.bound} {spread_of(value.estimate, form, unit)}".lstrip(), value.estimate.interval
    text += "" if value.budget is None else f", budget {value.budget:g}"
    is_undecided = limits is not None and limits.holds(1)
    return f"{text}, could show {1 + value.detectable:.2f}x" if value.detectable and is_undecided else text


def describe_comparisons(answers: Answers) -> Iterator[str]:
    """Yield which of two curves is shown to be above, when, and where they are shown to cross."""
    alone = [curve.configuration for curve in answers.curves if len(curve.seeds) < 2]
    if alone:
        yield (
            f"warning: one seed of {' and of '.join(alone)} says nothing of chance: what has no interval may "
            "be luck, and no difference can be shown; --seeds 3 makes more."
        )
    for pair in answers.comparisons:
        names = {pair.one, pair.other}
        if names.intersection(alone):
            continue
        crossings = [entry for entry in answers.crossings if {entry.leader, entry.other} == names]
        for crossing in crossings:
            beyond = ", beyond the largest budget of one of them" if crossing.is_extended else ""
            yield (
                f"{crossing.leader} overtakes {crossing.other} after "
                f"{spread(crossing.seconds, crossing.interval, ONE_DIGIT, unit=' s')}, "
                f"at {crossing.quality:.4f}{beyond}."
            )
        if not crossings:
            yield f"No crossing of {pair.one} and {pair.other} is shown."
        for name, sign in ((pair.one, 1), (pair.other, -1)):
            ahead = [f"{gap.seconds:.1f}" for gap in pair.gaps if gap.sign == sign]
            if ahead:
                yield f"  {name} is ahead at {', '.join(ahead)} s."
        undecided = [gap for gap in pair.gaps if not gap.sign]
        if undecided:
            yield f"  No difference is shown at {', '.join(map(describe_gap, undecided))}."


def describe_gap(gap: Gap) -> str:
    """Write the time of a gap, and the smallest gap that the runs could show there."""
    smallest = gap.difference.detectable
    if not smallest:
        return f"{gap.seconds:.1f} s"
    could = f"one of {100 * smallest:.1f} points" if smallest < 1 else "none"  # a quality is at most 1
    return f"{gap.seconds:.1f} s ({could} could be)"
