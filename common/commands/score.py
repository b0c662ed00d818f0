"""Minutes to target by MLPerf's rule: the mean of the runs without the fastest and the slowest.

Each score comes with a 95 % interval, its two factors (samples to target, samples per second of training),
its speed-up over the baseline of the same hardware, benchmark and size, and the smallest difference that so
many runs could show. Of more runs than needed the window with the median score counts. Published scores
follow.

A second table says where the mean run's minutes went, from log lines alone:
minutes = samples / (60 x samples/s) + evaluation + start-up + overshoot.

A terminal that is too narrow for all of it shows minutes and speed-up with their intervals; --wide prints the
rest, too.

examples:
  ttt score
  ttt score --wide
  ttt score results/8xA100-baseline results/8xA100-optimized
  ttt score --json
"""

import argparse
import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.arguments import add_paths
from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence.compare.factors import Factors
from common.evidence.compare.reported import reported
from common.evidence.intervals import Estimate
from common.evidence.log import load
from common.evidence.score import (
    DASH,
    SPEEDUP,
    Run,
    Score,
    Speedup,
    described,
    notes,
    number,
    score,
    speedups,
)

PIPE_WIDTH = 140  # columns of the notes, where there is no terminal to ask
MAX_WIDTH = 10_000  # more than any table needs
REST = (
    "`ttt score --wide` adds samples to target, samples/s, evaluation, quality, what the runs could show, "
    "and where the minutes went."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    parser.add_argument(
        "--include-resumed",
        action="store_true",
        help="count runs that went on from a checkpoint, in place of their interrupted logs",
    )
    parser.add_argument("--wide", action="store_true", help="print every column, also where they do not fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    return show(args.paths, include_resumed=args.include_resumed, as_json=args.json, is_wide=args.wide)


def show(
    paths: Sequence[Path], *, include_resumed: bool = False, as_json: bool = False, is_wide: bool = False
) -> int:
    """Print the scores of the sets below the paths; the exit code says whether there is one."""
    measured = [score(run_set, include_resumed=include_resumed) for run_set in load(paths)]
    published = reported()
    faster = speedups(measured) | speedups(published)
    lines = notes(measured + published) + [SPEEDUP]
    if as_json:
        rows = [score_json(entry, faster.get(entry.source)) for entry in measured + published]
        print(json.dumps({"scores": rows, "notes": lines}, indent=2, allow_nan=False))
    else:
        groups = sorted({entry.group[:2] for entry in measured + published})
        print_groups(
            [[s for s in measured + published if s.group[:2] == group] for group in groups],
            measured,
            faster,
            lines,
            is_wide=is_wide,
        )
    return EXIT_OK if any(entry.minutes for entry in measured) else EXIT_FINDINGS


def print_groups(
    groups: Sequence[Sequence[Score]],
    measured: Sequence[Score],
    faster: dict[str, Speedup],
    lines: Sequence[str],
    *,
    is_wide: bool,
) -> None:
    """Print whole tables where they fit, or are asked for, else compact ones, then the notes."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    whole = []
    for scores in groups:
        split = [entry for entry in scores if entry in measured and entry.factors]
        whole.append([table(scores, faster), *([factor_table(split)] if split else [])])
    widest = max(Console(width=MAX_WIDTH).measure(each).maximum for tables in whole for each in tables)
    if is_wide or not console.is_terminal or widest <= console.width:
        for tables in whole:
            Console(width=max(widest, console.width), highlight=False).print(*tables, "")
    else:
        for scores in groups:
            console.print(Text("\n".join([*compact(scores, faster, console.width), ""])), soft_wrap=True)
        console.print(Text(REST))
    for line in lines:
        console.print(Text(line))


def title(score: Score) -> str:
    return f"{score.benchmark or 'unknown benchmark'}{', mini (proxy)' if score.is_proxy else ''}"


def compact(scores: Sequence[Score], faster: dict[str, Speedup], width: int) -> list[str]:
    """Return lines for one benchmark and size: each name and label, below them the figures in columns."""
    header = ("minutes", "95 % interval", "speed-up", "95 % interval", "runs")
    rows = []
    for entry in scores:
        cells = described(entry, faster.get(entry.source))
        ratio, _, limits = cells["speed-up"].partition(" (")
        limits = limits.rstrip(")") or DASH
        rows.append((cells["minutes"], cells["95 % interval"], ratio, limits, cells["runs"]))
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def columns(cells: Sequence[str]) -> str:
        return "  " + "  ".join(cell.rjust(size) for cell, size in zip(cells, widths, strict=True))

    lines = [title(scores[0]), columns(header)]
    for entry, row in zip(scores, rows, strict=True):
        name = f"{entry.system} ({entry.label})"
        lines += textwrap.wrap(
            name, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines.append(columns(row))
    return lines


def table(scores: Sequence[Score], faster: dict[str, Speedup]) -> Table:
    """Return the scores of one benchmark and size, each with its label."""
    rows = []
    for entry in scores:
        cells = described(entry, faster.get(entry.source))
        cells["system"] += "\n" + cells.pop("label").replace(", runs ", "\nruns ")
        rows.append(cells)
    return _table(title(scores[0]), rows)


def factor_table(scores: Sequence[Score]) -> Table:
    """Return the two factors and the other parts of the mean run's minutes, each with its interval."""
    rows = []
    for entry in scores:
        terms = entry.factors
        if terms:
            total = f"{terms.minutes.value:.3f}\n{terms.num_runs} runs"
            cells = {"system": entry.system, "mean minutes": total}
            rows.append(cells | {name: _cell(estimate) for name, estimate in _terms(terms).items()})
    return _table("mean minutes = samples / (60 x samples/s) + evaluation + start-up + overshoot", rows)


def _terms(terms: Factors) -> dict[str, Estimate]:
    return {
        "samples": terms.samples,
        "samples/s": terms.samples_per_s,
        "evaluation": terms.evaluation,
        "start-up": terms.startup,
        "overshoot": terms.overshoot,
    }


def _cell(estimate: Estimate) -> str:
    def show(value: float) -> str:
        return number(value) if estimate.value >= 50 else f"{value:.4f}"

    limits = estimate.interval
    spread = f" ({show(limits.low)} to {show(limits.high)})" if limits else ""
    return show(estimate.value) + spread


def _table(title: str, rows: Sequence[dict[str, str]]) -> Table:
    result = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for name in rows[0]:
        header = "\n".join(name.rsplit(maxsplit=1))
        result.add_column(header, justify="left" if name == "system" else "right", no_wrap=True)
    for cells in rows:
        result.add_row(*(Text(cell.replace(" (", "\n(")) for cell in cells.values()))
    return result


def score_json(entry: Score, speedup: Speedup | None) -> dict[str, object]:
    """Return a score for JSON, where a run that missed its target has null minutes."""
    figures = (
        "benchmark system hardware configuration is_proxy label counted source minutes samples_to_target "
        "samples_per_s evaluation_share quality"
    )
    parts = {name: getattr(entry, name) for name in ("interval", "split", "factors")} | {"speedup": speedup}
    return {
        **{name: getattr(entry, name) for name in figures.split()},
        **{name: part and dataclasses.asdict(part) for name, part in parts.items()},
        "run_minutes": [minutes if math.isfinite(minutes) else None for minutes in entry.run_minutes],
        "target": entry.target if math.isfinite(entry.target) else None,
        "runs": [_run_json(run) for run in entry.runs],
    }


def _run_json(run: Run) -> dict[str, object]:
    return dataclasses.asdict(run) | {"minutes": run.minutes if math.isfinite(run.minutes) else None}
