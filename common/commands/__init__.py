"""The verbs of `ttt`: a module each, with `add_arguments` and `main`. Here is what several take."""

import argparse
from pathlib import Path


def add_paths(parser: argparse.ArgumentParser, help: str = "result files or folders") -> None:
    """Add the argument of the verbs that read results."""
    parser.add_argument("paths", nargs="*", metavar="PATH", type=Path, default=[Path("results")], help=help)
