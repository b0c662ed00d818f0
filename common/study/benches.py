"""The results of `ttt bench` for the explorer: throughput/<hardware>/<benchmark>_N.json below any folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.evidence.paths import find_files, label
from common.evidence.records import finite, printable
from common.study.points import by_folder, read_each

MAX_RATES = 1000  # of one bench result
RATE = ("samples_per_s", "tokens_per_s", "step_ms", "flops_share", "bytes_share", "memory_gb")
NOISE = ("deviation", "num_turns")


def read_benches(paths: Sequence[Path], report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the figures of throughput/<hardware>/*.json below `paths`; `report` is told what is none."""
    files = find_files((path.absolute() for path in paths), "throughput/*/*.json")
    return [
        {"file": label(file), "hardware": printable(file.parent.name, 64)} | figures
        for file, figures in read_each(files, bench, report)
    ]


def bench(figures: object) -> dict[str, Any]:
    """Return one bench result; `model` is MLPerf's name. Raises ValueError for anything else."""
    if not isinstance(figures, dict) or not isinstance(rates := figures.get("rates"), list):
        raise ValueError("not what `ttt bench` writes")
    rows = []
    for rate in rates[:MAX_RATES]:
        if not isinstance(rate, dict) or (finite(rate.get("samples_per_s")) or 0) <= 0:
            raise ValueError("a rate states no samples_per_s above 0")
        row: dict[str, Any] = {name: printable(rate.get(name, ""), 80) for name in ("configuration", "shape")}
        noise = {name: value for name in NOISE if (value := finite(rate.get(name))) is not None}
        row["batch"] = finite(rate.get("batch_size")) or finite(figures.get("batch_size"))
        rows.append(row | {name: finite(rate.get(name)) for name in RATE} | noise)
    benchmark = printable(figures.get("benchmark", ""), 64)
    return {
        "benchmark": benchmark,
        "model": facts.benchmark if (facts := by_folder().get(benchmark)) else benchmark,
        "size": printable(figures.get("size", ""), 16),
        "rates": rows,
        "projected": projected(figures.get("projected")),
    }


def projected(stated: object) -> dict[str, dict[str, Any]]:
    """Return the minutes that a bench projects, their interval and assumptions, by configuration."""
    rows = {}
    for name, projection in stated.items() if isinstance(stated, dict) else ():
        if isinstance(projection, dict):
            stated_figures = {key: finite(projection.get(key)) for key in ("minutes", "low", "high")}
            row = {key: value for key, value in stated_figures.items() if value and value > 0}
            if "minutes" in row:
                rows[printable(name, 80)] = row | {"assuming": printable(projection.get("assuming", ""), 400)}
    return rows
