"""A sweep: configurations at several budgets, and what their trade-off curves answer."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from common.errors import UserError
from common.evidence.intervals import Estimate
from common.evidence.log import Log
from common.evidence.records import printable
from common.files import write_text
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


def answer(study: Study, logs: Mapping[str, Sequence[Log]], price: float | None) -> Answers | None:
    """Return what the finished runs of a sweep's cells say; None without any."""
    found = []
    for name in dict.fromkeys(cell.configuration for cell in study.cells):
        own = [cell for cell in study.cells if cell.configuration == name and logs[cell.name]]
        points = [curves.read_point(cell.budget, logs[cell.name], price) for cell in own]
        if points:
            ordered = sorted(points, key=lambda point: point.seconds.value)
            found.append(Curve(configuration=name, points=tuple(ordered)))
    if not found:
        return None
    target = next(each[0].target for each in logs.values() if each)
    return curves.answers(found, target=target, price=price)


def keep(study: Study, found: Answers) -> list[Path]:
    """Write answers and plot beside the study's logs, in place of those of fewer runs."""
    quality = benchmark_module(study.benchmark).Benchmark.names.quality
    texts = {".json": json.dumps(dataclasses.asdict(found), indent=1) + "\n", ".svg": draw(found, quality)}
    paths = []
    for suffix, text in texts.items():
        paths.append(study.report.with_name(study.report.name + suffix))
        try:
            write_text(paths[-1], text)
        except OSError as error:
            what = f"cannot write what was found ({error.strerror})"
            raise UserError(what, where=printable(os.path.relpath(paths[-1]))) from error
    return paths


def show(found: Answers, quality_name: str) -> None:
    """Print the curves and the answers."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)
    names = [curve.configuration for curve in found.curves]
    rows = []
    for curve in found.curves:
        for point in curve.points:
            cells = [curve.configuration, f"{point.budget:g}", f"{len(point.runs)}", f"{point.samples:,.0f}"]
            cells += [spread(point.seconds, ".1f"), DASH if point.cost is None else spread(point.cost, ".4f")]
            rows.append([*cells, spread(point.quality, ".4f")])
    columns = ["configuration", "budget", "runs", "samples", "seconds", "dollars", quality_name]
    console.print(table(f"{quality_name} at the end of each budget", columns, rows))
    rows = []
    for level in found.equal_quality:
        mark = " (target)" if level.quality == found.target else ""
        cells = [f"{level.quality:.4f}{mark}", *(shown(level.seconds[name], ".1f") for name in names)]
        faster = [level.times_faster[name] for name in names[1:]]
        rows.append([*cells, *(f"{shown(each, '.2f')}x" if each.estimate else DASH for each in faster)])
    columns = [quality_name, *(f"{name}, s" for name in names), *(f"{name} faster" for name in names[1:])]
    console.print(table("time at equal quality", columns, rows))
    rows = [
        [f"{each.seconds:.1f}", *(shown(each.quality[name], ".4f") for name in names)]
        for each in found.equal_time
    ]
    console.print(table("quality at equal time", ["seconds", *names], rows))
    for text in (*crossing_lines(found), found.interpolation + "."):
        console.print(text)


def crossing_lines(found: Answers) -> Iterator[str]:
    """Yield where curves cross, or that they do not."""
    for each in found.crossings:
        limits = f" ({each.interval.low:.1f} to {each.interval.high:.1f})" if each.interval else ""
        beyond = ", beyond the largest budget of one of them" if each.is_extended else ""
        yield (
            f"{each.leader} overtakes {each.other} after {each.seconds:.1f} s{limits}, "
            f"at {each.quality:.4f}{beyond}."
        )
    crossed = {frozenset((each.leader, each.other)) for each in found.crossings}
    for one, other in curves.pairs(found.curves):
        if {one.configuration, other.configuration} not in crossed:
            above, first = curves.leader(one, other), max(one.mean.times[0], other.mean.times[0])
            told = f"{above} is above from {first:.1f} s on" if above else "the curves are the same"
            yield f"{one.configuration} and {other.configuration} do not cross: {told}."


def spread(estimate: Estimate, form: str) -> str:
    """Return a mean with its interval."""
    limits = estimate.interval
    told = f" ({limits.low:{form}} to {limits.high:{form}})" if limits else ""
    return f"{estimate.value:{form}}{told}"


def shown(value: Value, form: str) -> str:
    """Return where a curve stands, and whether that is a bound."""
    return f"{value.bound} {spread(value.estimate, form)}".strip() if value.estimate else DASH


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column is text where it holds names."""
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(columns):
        is_text = number == 0 and not rows[0][0][0].isdigit()
        result.add_column(name, justify="left" if is_text else "right")
    for row in rows:
        result.add_row(*row)
    return result
