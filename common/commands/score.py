"""Minutes to target by MLPerf's rule: the mean of the runs without the fastest and the slowest.

Each score comes with a 95 % interval, its two factors (samples to target, samples per second of training),
its speed-up over the baseline of the same hardware, benchmark and size, and the smallest difference that so
many runs could show. Of more runs than needed the window with the median score counts. Published scores
follow.

A second table says where the mean run's minutes went, from log lines alone:
minutes = samples / (60 x samples/s) + evaluation + start-up + overshoot.

examples:
  ttt score
  ttt score results/8xA100-baseline results/8xA100-optimized
  ttt score --json
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.commands import add_paths
from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence.factors import Factors
from common.evidence.intervals import Estimate
from common.evidence.log import load
from common.evidence.reported import reported
from common.evidence.score import SPEEDUP, Run, Score, Speedup, described, notes, number, score, speedups

PIPE_WIDTH = 140  # columns, where there is no terminal to ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    parser.add_argument(
        "--include-resumed",
        action="store_true",
        help="count runs that went on from a checkpoint, in place of their interrupted logs",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    return show(args.paths, include_resumed=args.include_resumed, as_json=args.json)


def show(paths: Sequence[Path], *, include_resumed: bool = False, as_json: bool = False) -> int:
    """Print the scores of the sets below the paths; the exit code says whether there is one."""
    measured = [score(run_set, include_resumed=include_resumed) for run_set in load(paths)]
    published = reported()
    faster = speedups(measured) | speedups(published)
    lines = notes(measured + published) + [SPEEDUP]
    if as_json:
        rows = [score_json(entry, faster.get(entry.source)) for entry in measured + published]
        print(json.dumps({"scores": rows, "notes": lines}, indent=2, allow_nan=False))
    else:
        console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
        for group in sorted({entry.group[:2] for entry in measured + published}):
            console.print(table([s for s in measured + published if s.group[:2] == group], faster))
            split = [s for s in measured if s.group[:2] == group and s.factors]
            console.print(*[factor_table(split)] if split else [], "")
        for line in lines:
            console.print(Text(line))
    return EXIT_OK if any(entry.minutes for entry in measured) else EXIT_FINDINGS


def table(scores: Sequence[Score], faster: dict[str, Speedup]) -> Table:
    """Return the scores of one benchmark and size, each with its label."""
    rows = []
    for entry in scores:
        cells = described(entry, faster.get(entry.source))
        cells["system"] += "\n" + cells.pop("label").replace(", runs ", "\nruns ")
        rows.append(cells)
    title = f"{scores[0].benchmark or 'unknown benchmark'}{', mini (proxy)' if scores[0].is_proxy else ''}"
    return _table(title, rows)


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
        is_name = name == "system"
        result.add_column(
            name,
            justify="left" if is_name else "right",
            overflow="fold",
            no_wrap=is_name,
            min_width=max(map(len, name.split())),
        )
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
