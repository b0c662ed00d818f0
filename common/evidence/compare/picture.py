"""The picture of `ttt reproduce --plot`: samples to the target by batch size, published and measured."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from common.evidence.compare.masked_accuracy import COUNTINGS, MOSAIC
from common.evidence.compare.rcp import last_step, load_points, mean_of_stops, point_at
from common.evidence.compare.reported import Reported
from common.evidence.intervals import Estimate
from common.evidence.log import IMAGENET_SAMPLES, RunSet
from common.evidence.page import save_page
from common.evidence.plots import INK, PALETTE, ascii_name, draw_panels, reach
from common.evidence.records import finite
from common.evidence.rules.rounds import last_round
from common.evidence.score import Score, score

MILLION = 1e6
KINDS = {  # of a set -> colour and marker
    "closed": (PALETTE[1], "o"),
    "open": (PALETTE[2], "s"),
    "measured here": (PALETTE[3], "D"),
}
BY_MOSAIC = f"by {COUNTINGS[MOSAIC]}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Samples to target of the runs of a set (infinite: a miss), at evaluations `step` samples apart.

    `is_hollow`: by MosaicML's count of masked tokens.
    """

    kind: str
    batch_size: int
    samples: Sequence[float]
    step: float
    name: str = ""  # written beside it
    is_hollow: bool = False


def write_picture(path: Path, published: Mapping[str, Reported], run_sets: Sequence[RunSet]) -> None:
    """Write an SVG file with a panel for each benchmark; run sets of size mini are left out."""

    def plot(axes: Axes, _: str, facts: Reported) -> None:
        _plot_benchmark(axes, facts, [*published_places(facts), *measured_places(facts, run_sets)])

    description = "samples to the target by batch size, a point a set"
    save_page(path, draw_panels(published, plot, size=(5, 4), description=description))


def published_places(facts: Reported) -> Iterator[Place]:
    """Yield each published set, and for closed ones where they passed the target by MosaicML's count."""
    for entry in facts.sets + facts.peers:
        configuration = entry.score.configuration if entry.configurations else ""
        place = Place(
            kind=entry.division,
            batch_size=entry.batch_size,
            samples=stops_of(entry.score),
            step=entry.evaluated_every,
            name=f"{entry.submitter} {configuration}".strip() if entry.division == "open" else "",
            is_hollow=facts.benchmark == "bert" and entry.masked_tokens == MOSAIC,
        )
        yield place
        if entry.mosaic_samples:
            yield replace(place, samples=entry.mosaic_samples, name="", is_hollow=True)


def measured_places(facts: Reported, run_sets: Sequence[RunSet]) -> Iterator[Place]:
    for run_set in run_sets:
        ours, batch_size = score(run_set), finite(run_set.lead.value("global_batch_size"))
        steps = [last_step([point.samples for point in log.curve]) for log in run_set.logs]
        if ours.benchmark == facts.benchmark and not (ours.is_proxy or ours.mixture) and batch_size:
            yield Place(
                kind="measured here",
                batch_size=int(batch_size),
                samples=stops_of(ours),
                step=max(steps, default=0.0),
                name=ours.configuration,
            )


def stops_of(scored: Score) -> list[float]:
    """List the samples to target of the runs that count, infinite for a miss."""
    return [
        run.samples if run.samples and math.isfinite(run.minutes) else math.inf for run in scored.counting
    ]


def mean_in_millions(place: Place) -> Estimate | None:
    return mean_of_stops([count / MILLION for count in place.samples], place.step / MILLION)


def _plot_benchmark(axes: Axes, facts: Reported, places: Sequence[Place]) -> None:
    sizes = [place.batch_size for place in places]
    _plot_reference(axes, facts.benchmark, min(sizes), max(sizes))
    beside: dict[tuple[int, int], list[str]] = {}  # names of places that overlap
    for kind, is_hollow in product(KINDS, (False, True)):
        means = [
            (place, mean)
            for place in places
            if (place.kind, place.is_hollow) == (kind, is_hollow) and (mean := mean_in_millions(place))
        ]
        if not means:
            continue
        colour, marker = KINDS[kind]
        axes.errorbar(
            [place.batch_size for place, _ in means],
            [mean.value for _, mean in means],
            yerr=np.transpose([reach(mean) for _, mean in means]),
            fmt=marker,
            color=colour,
            markerfacecolor="none" if is_hollow else colour,
            ms=4,
            lw=0.8,
            alpha=0.7,
            label=f"{kind}, {BY_MOSAIC}" if is_hollow else kind,
        )
        for place, mean in means:
            if place.name:
                beside.setdefault((place.batch_size, round(5 * mean.value)), []).append(place.name)
    for (batch_size, fifths), names in beside.items():
        text = ascii_name(", ".join(sorted(set(names))))
        axes.annotate(text, (batch_size, fifths / 5), (6, 4), textcoords="offset points", fontsize=7)
    axes.set(
        title=f"{facts.benchmark}: samples to {facts.target:g}",
        xlabel="batch size",
        ylabel="million samples",
        ylim=(0, None),
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.legend(frameon=False, fontsize=7, loc="lower left")


def _plot_reference(axes: Axes, benchmark: str, smallest: int, largest: int) -> None:
    """Plot the mean of MLCommons' reference, and the least mean that the closed division accepts."""
    ruleset = last_round(benchmark)
    points = load_points(benchmark, ruleset)
    largest = min(largest, points[-1].batch_size)
    sizes = np.unique(np.geomspace(smallest, largest, 200).astype(int))
    scale = MILLION / IMAGENET_SAMPLES if benchmark == "resnet" else MILLION
    known = [point for size in sizes.tolist() if (point := point_at(benchmark, size, ruleset))]
    means, least = ([getattr(point, name) / scale for point in known] for name in ("mean", "least"))
    label = f"reference convergence points, ruleset {ruleset}"
    axes.plot(sizes, means, color=INK, lw=1, label=label)
    axes.fill_between(
        sizes, least, means, color=PALETTE[0], alpha=0.3, lw=0, label="as low as closed accepts"
    )
