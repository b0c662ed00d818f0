"""List the benchmarks, their sizes and their configurations, a line each; nothing is imported or measured.

examples:
  ttt list
  ttt list bert
  ttt list methods
  ttt list methods unpad
"""

import argparse
import json
from typing import Any

from common.arguments import add_shared, benchmark_names
from common.errors import EXIT_OK
from common.repository import SIZES, configurations, read_title

FULL = "the benchmark itself; needs its data, and GPUs"
MORE = (
    "'ttt run BENCHMARK CONFIGURATION' times a configuration\n"
    "'ttt list methods' lists the methods, which a configuration applies"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark", nargs="?")
    add_shared(parser, "--json")


def main(args: argparse.Namespace) -> int:
    entries = [
        describe(name, folder)
        for name, folder in benchmark_names().items()
        if args.benchmark in (None, folder)
    ]
    print(json.dumps({"benchmarks": entries}, indent=1) if args.json else "\n".join(lines(entries)))
    return EXIT_OK


def describe(name: str, folder: str) -> dict[str, Any]:
    """Return the facts of a benchmark; `name` is MLPerf's."""
    return {
        "name": folder,
        "mlperf_name": name,
        "title": read_title(folder, "__init__.py"),
        "sizes": {size: FULL if size == "full" else read_title(folder, f"{size}.yaml") for size in SIZES},
        "configurations": {name: read_title(folder, f"{name}.yaml") for name in configurations(folder)},
    }


def lines(entries: list[dict[str, Any]]) -> list[str]:
    """Return the facts as lines of at most 80 columns."""
    text: list[str] = []
    for entry in entries:
        text += [f"{entry['name']} ({entry['mlperf_name']}): {entry['title']}", "  sizes"]
        text += [f"    {size:17}{title}" for size, title in entry["sizes"].items()]
        text += ["  configurations"]
        text += [f"    {name:17}{title}" for name, title in entry["configurations"].items()] + [""]
    return [*text, MORE]
