"""A sweep: configurations at several budgets, and what their trade-off curves answer."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from common.errors import UserError
from common.evidence.intervals import Estimate
from common.evidence.log import Log
from common.evidence.text import make_table, open_console
from common.files import save_text
from common.repository import benchmark_module
from common.study import curves
from common.study.cells import TABLE_WIDTH, Cell, Study
from common.study.curve_plot import draw
from common.study.curves import Answers, Curve, Value

MAX_BUDGETS = 20
DASH = "-"


def parse_budgets(text: str) -> list[float]:
    """Return the budgets of `0.25,0.5,1`, rising. Raises UserError."""
    try:
        budgets = sorted({float(part) for part in text.split(",")})
    except ValueError:
        budgets = []
    if not 0 < len(budgets) <= MAX_BUDGETS or not all(0 < budget <= 10 for budget in budgets):
        raise UserError(f"--budgets {text}: expected shares of a training, such as 0.25,0.5,1")
    return budgets


def sweep_cells(configurations: Sequence[str], budgets: Sequence[float]) -> list[Cell]:
    """Return a cell for each configuration and budget; the shortest come first."""
    return [
        Cell(name=f"{name}-{budget:g}", configuration=name, budget=budget)
        for budget in budgets
        for name in dict.fromkeys(configurations)
    ]


def compare_curves(study: Study, logs: Mapping[str, Sequence[Log]], price: float | None) -> Answers | None:
    """Return what the finished runs of a sweep's cells say; None without any."""
    lines = []
    for name in dict.fromkeys(cell.configuration for cell in study.cells):
        cells = [cell for cell in study.cells if cell.configuration == name and logs[cell.name]]
        points = [curves.read_point(cell.budget, logs[cell.name], price) for cell in cells]
        if points:
            ordered = sorted(points, key=lambda point: point.seconds.value)
            lines.append(Curve(configuration=name, points=tuple(ordered)))
    if not lines:
        return None
    target = next(runs[0].target for runs in logs.values() if runs)
    return curves.compare_curves(lines, target=target, price=price)


def save(study: Study, answers: Answers) -> list[Path]:
    """Write answers and plot beside the study's logs, in place of those of fewer runs."""
    quality = benchmark_module(study.benchmark).Benchmark.names.quality
    texts = {
        ".json": json.dumps(dataclasses.asdict(answers), indent=1) + "\n",
        ".svg": draw(answers, quality),
    }
    paths = {study.report.with_name(study.report.name + suffix): text for suffix, text in texts.items()}
    for path, text in paths.items():
        save_text(path, text)
    return list(paths)


def show(answers: Answers, quality_name: str) -> None:
    """Print the curves and the answers."""
    console = open_console(TABLE_WIDTH)
    names = [curve.configuration for curve in answers.curves]
    rest = names[1:]
    rows = [
        [
            curve.configuration,
            f"{point.budget:g}",
            f"{len(point.runs)}",
            f"{point.samples:,.0f}",
            with_interval(point.seconds, ".1f"),
            DASH if point.cost is None else with_interval(point.cost, ".4f"),
            with_interval(point.quality, ".4f"),
        ]
        for curve in answers.curves
        for point in curve.points
    ]
    columns = ["configuration", "budget", "runs", "samples", "seconds", "dollars", quality_name]
    title = f"{quality_name} at the end of each budget"
    console.print(make_table(title, columns, rows, left=columns[:1]))
    rows = []
    for level in answers.equal_quality:
        mark = " (target)" if level.quality == answers.target else ""
        faster = [level.times_faster[name] for name in rest]
        rows.append(
            [
                f"{level.quality:.4f}{mark}",
                *(with_bound(level.seconds[name], ".1f") for name in names),
                *(f"{with_bound(value, '.2f')}x" if value.estimate else DASH for value in faster),
            ]
        )
    columns = [quality_name, *(f"{name}, s" for name in names), *(f"{name} faster" for name in rest)]
    console.print(make_table("time at equal quality", columns, rows))
    rows = [
        [f"{moment.seconds:.1f}", *(with_bound(moment.quality[name], ".4f") for name in names)]
        for moment in answers.equal_time
    ]
    console.print(make_table("quality at equal time", ["seconds", *names], rows))
    console.print(*describe_crossings(answers), answers.interpolation + ".", sep="\n")


def describe_crossings(answers: Answers) -> Iterator[str]:
    """Yield where curves cross, or that they do not."""
    for crossing in answers.crossings:
        low_high = crossing.interval
        limits = f" ({low_high.low:.1f} to {low_high.high:.1f})" if low_high else ""
        beyond = ", beyond the largest budget of one of them" if crossing.is_extended else ""
        yield (
            f"{crossing.leader} overtakes {crossing.other} after {crossing.seconds:.1f} s{limits}, "
            f"at {crossing.quality:.4f}{beyond}."
        )
    crossed = {frozenset((crossing.leader, crossing.other)) for crossing in answers.crossings}
    for one, other in curves.pairs(answers.curves):
        if {one.configuration, other.configuration} not in crossed:
            above, start = curves.leader(one, other), max(one.mean.times[0], other.mean.times[0])
            outcome = f"{above} is above from {start:.1f} s on" if above else "the curves are the same"
            yield f"{one.configuration} and {other.configuration} do not cross: {outcome}."


def with_interval(estimate: Estimate, form: str) -> str:
    limits = estimate.interval
    interval = f" ({limits.low:{form}} to {limits.high:{form}})" if limits else ""
    return f"{estimate.value:{form}}{interval}"


def with_bound(value: Value, form: str) -> str:
    return f"{value.bound} {with_interval(value.estimate, form)}".strip() if value.estimate else DASH
