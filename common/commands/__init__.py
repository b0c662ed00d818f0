"""The verbs of `ttt`: a module each, with `add_arguments` and `main`. Here is what several take."""

import argparse
from collections.abc import Callable
from pathlib import Path


def add_paths(parser: argparse.ArgumentParser, help: str = "result files or folders") -> None:
    """Add the argument of the verbs that read results."""
    parser.add_argument("paths", nargs="*", metavar="PATH", type=Path, default=[Path("results")], help=help)


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return what parses a number from `low` to `high`, the `type` of an argument."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number from {low} to {high}")
        return int(text)

    return parse
