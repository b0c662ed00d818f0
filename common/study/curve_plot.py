"""Trade-off curves as SVG: time to the right, quality up, a curve for each configuration."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from markupsafe import Markup

from common.evidence.intervals import Estimate
from common.evidence.plots import INK, STYLE, as_svg, ascii_name, colours, new_figure, stand_alone, unit_of
from common.study.curves import Answers


def draw(answers: Answers, quality_name: str) -> Markup:
    """Return a file of the curves with the intervals of their points; up and left is better."""
    with matplotlib.rc_context():
        matplotlib.rcParams.update(STYLE)
        figure, axes = new_figure(3.6)
        longest = max(curve.mean.times[-1] for curve in answers.curves)
        per_minute, unit = unit_of(longest / 60)
        scale = per_minute / 60  # of seconds
        for curve, colour in zip(answers.curves, colours(answers.curves), strict=True):
            line = curve.mean
            times = [seconds * scale for seconds in line.times]
            axes.plot(times, line.qualities, color=colour, lw=1.2, label=ascii_name(curve.configuration))
            axes.errorbar(
                [point.seconds.value * scale for point in curve.points],
                [point.quality.value for point in curve.points],
                xerr=errors([point.seconds for point in curve.points], scale),
                yerr=errors([point.quality for point in curve.points]),
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
        axes.legend(frameon=False, loc="lower right")
        about = "quality against training time, one curve a configuration, one point a budget"
        return stand_alone(as_svg(figure, about))


def errors(estimates: Sequence[Estimate], scale: float = 1.0) -> list[list[float]]:
    """Return how far each interval reaches below and above its mean, as matplotlib wants it."""
    reach = []
    for estimate in estimates:
        centre, limits = estimate.value, estimate.interval
        reach.append((centre - limits.low, limits.high - centre) if limits else (0.0, 0.0))
    return [[max(0.0, span[side]) * scale for span in reach] for side in (0, 1)]
