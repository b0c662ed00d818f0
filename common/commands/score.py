"""Minutes to target by MLPerf's rule: the mean of the runs without the fastest and the slowest.

Each score comes with a 95 % interval, its two factors (samples to target, samples per second of training) and
its speed-up over the baseline of the same hardware, benchmark and size. Published scores follow as reported.

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

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import EXIT_FINDINGS, EXIT_OK
from common.evidence.log import load
from common.evidence.score import Score, Speedup, described, notes, reported, score, speedups

PIPE_WIDTH = 140  # columns, where there is no terminal to ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        type=Path,
        default=[Path("results")],
        help="result files or folders",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    measured, published = (
        [score(run_set) for run_set in load([Path(path) for path in args.paths])],
        reported(),
    )
    faster = speedups(measured) | speedups(published)
    lines = notes(measured + published)
    if args.json:
        rows = [as_json(entry, faster.get(entry.source)) for entry in measured + published]
        print(json.dumps({"scores": rows, "notes": lines}, indent=2, allow_nan=False))
    else:
        console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
        for group in sorted({entry.group[:2] for entry in measured + published}):
            console.print(table([s for s in measured + published if s.group[:2] == group], faster))
        for line in lines:
            console.print(Text(line))
    return EXIT_OK if any(entry.minutes for entry in measured) else EXIT_FINDINGS


def table(scores: Sequence[Score], faster: dict[str, Speedup]) -> Table:
    """Return the scores of one benchmark and size, each with its label."""
    title = f"{scores[0].benchmark or 'unknown benchmark'}{', mini (proxy)' if scores[0].is_proxy else ''}"
    result = Table(title=Text(title), title_justify="left")
    for entry in scores:
        cells = described(entry, faster.get(entry.source))
        cells["system"] += "\n" + cells.pop("label")
        if not result.columns:
            for name in cells:
                is_name = name == "system"
                result.add_column(
                    name, justify="left" if is_name else "right", overflow="fold", no_wrap=is_name
                )
        result.add_row(*(Text(cell.replace(" (", "\n(")) for cell in cells.values()))
    return result


def as_json(entry: Score, speedup: Speedup | None) -> dict[str, object]:
    """Return a score for JSON, where a run that missed its target has null minutes."""
    minutes = [m if math.isfinite(m) else None for m in entry.run_minutes]
    target = entry.target if math.isfinite(entry.target) else None
    faster = dataclasses.asdict(speedup) if speedup else None
    return dataclasses.asdict(entry) | {"run_minutes": minutes, "target": target, "speedup": faster}
