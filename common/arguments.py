"""Arguments that several commands share, and how their help is written."""

import argparse
import math
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from common import repository
from common.errors import UserError, nearest

MAX_RANKS = 1024
MAX_BATCH = 10**9  # samples
SETTING = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)


def add_shared(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add arguments that several commands share; `changes` replace their keywords of `add_argument`.

    The default size is full: nobody gets figures of the proxy, mini, without typing its name.
    `settle_folders` completes `paths`, `--data`, `--results` and `--systems`.
    """
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    shared: dict[str, dict[str, Any]] = {
        "benchmark": {"type": benchmark_folder, "help": f"one of: {list_benchmarks()}"},
        "--benchmarks": {
            "nargs": "+",
            "type": benchmark_folder,
            "default": sorted(benchmark_names().values()),
            "metavar": "NAME",
            "help": f"of {list_benchmarks()}; default: all",
        },
        "configuration": {
            "help": "see 'ttt list'; NAME+METHOD adds a method, NAME-METHOD leaves one out; or a YAML file",
        },
        "configurations": {
            "nargs": "*",
            "default": [],  # else argparse calls it required
            "metavar": "CONFIGURATION",
            "help": "as 'ttt list' names them; NAME+KEY=VALUE changes a key; default: every one",
        },
        "--size": {
            "choices": repository.SIZES,
            "default": "full",
            "help": "full: the benchmark itself; mini: a small proxy of it, minutes on a CPU",
        },
        "--set": {
            "action": "append",
            "default": [],
            "metavar": "KEY=VALUE",
            "help": "change a key, such as data.directory",
        },
        "--batch-size": {
            "type": whole_number(1, MAX_BATCH),
            "metavar": "N",
            "help": "samples in a step; default: the configuration's, at size full an eighth of it",
        },
        "--micro-batch-size": {
            "type": whole_number(1, MAX_BATCH),
            "metavar": "N",
            "help": "samples at a time; default: the whole batch",
        },
        "--runs": {"metavar": "N", "help": "a number, or official: 5 (resnet), 10 (bert)"},
        "--nproc": {
            "type": whole_number(1, MAX_RANKS),
            "metavar": "N",
            "help": "ranks that share each batch, one per GPU; "
            "default: as many as this machine has GPUs, else 1",
        },
        "--json": {"action": "store_true", "help": "print the figures as JSON"},
        "--out": {"type": Path, "metavar": "FILE"},
        "paths": {
            "nargs": "*",
            "metavar": "PATH",
            "type": Path,
            "help": "result files or folders; default: all below --results",
        },
        "--data": folder
        | {"help": "prepared data, as <benchmark>/<size>; default: $TTT_DATA, else data/ of the repository"},
        "--results": folder
        | {
            "default": repository_path("results"),
            "help": "the folder of results; default: results/ of the repository",
        },
        "--systems": folder
        | {"help": "the folder of system descriptions; default: systems/ beside results/, else in --results"},
    }
    for name in names:
        flags = ("-o", name) if name == "--out" else (name,)
        parser.add_argument(*flags, **shared[name] | changes)


def benchmark_folder(name: str) -> str:
    """The `type` of an argument: turns the name of a benchmark, or MLPerf's name for it, into its folder.

    Raises UserError with the nearest name.
    """
    known = benchmark_names()
    if name in known or name in known.values():
        return known.get(name, name)
    hint = nearest(name, [*known, *known.values()])
    if hint.startswith("known"):
        hint = f"known: {list_benchmarks()}"
    raise UserError(f"unknown benchmark '{name}'", hint=hint)


def list_benchmarks() -> str:
    return ", ".join(f"{name} ({folder})" for name, folder in benchmark_names().items())


@cache
def benchmark_names() -> dict[str, str]:
    """Map MLPerf's name to the folder of each benchmark, read from source files without importing them."""
    names = {}
    for folder in repository.benchmarks():
        text = (repository.ROOT / folder / "benchmark.py").read_text(encoding="utf-8")
        name = re.search(r'^ +names = Names\(mlperf="(\w+)"', text, re.MULTILINE)
        names[name[1] if name else folder] = folder
    return dict(sorted(names.items()))


def settle_folders(args: argparse.Namespace) -> None:
    """Complete the folders of a command, and make --data known to the processes that it starts.

    Without a PATH a command reads --results. Raises UserError for a PATH together with --results, and for a
    --systems, --data or --results that is not a folder.
    """
    options, usual = vars(args), repository_path("results")
    if "data" in options:
        repository.set_data_folder(args.data)
    if isinstance(results := options.get("results"), Path):  # else the PATHs of a command
        repository.refuse_file(results, "--results")
    if "paths" not in options:
        if "systems" in options:
            args.systems = args.systems or repository.systems_beside(args.results)
        return
    if args.paths and options.get("results", usual) != usual:
        raise UserError(
            "cannot be combined with a PATH", where=f"--results {args.results}", hint="leave one out"
        )
    args.paths = args.paths or [args.results]
    if (systems := options.get("systems")) and not os.path.isdir(systems):
        raise UserError("no such folder", where=f"--systems {systems}")


def repository_path(name: str) -> Path:
    """Return a path in the repository, relative to the working folder."""
    return Path(os.path.relpath(repository.WORKSPACE / name))


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Make the `type` of an argument: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return parse


seed = whole_number(0, 2**31 - 1)


def positive_number(text: str) -> float | None:
    """Return a positive number, None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def positive(text: str) -> float:
    """The `type` of an argument: a positive number."""
    if (number := positive_number(text)) is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def share(text: str) -> float:
    """The `type` of an argument: a positive number below 1."""
    if (number := positive_number(text)) is None or number >= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number below 1, such as 0.05")
    return number


def svg_file(text: str) -> Path:
    """The `type` of an argument: the file of a picture, which is always written as SVG."""
    if not text.lower().endswith(".svg"):
        raise argparse.ArgumentTypeError(f"'{text}' does not end in .svg, and the picture is an SVG")
    return Path(text)


def spread_settings(words: Sequence[str]) -> list[str]:
    """Return the words with a `--set` before every setting, where several follow one `--set`."""
    spread: list[str] = []
    is_after_set = is_after_setting = False  # whether the word before is `--set`, or one of its settings
    for word in words:
        if is_after_setting and SETTING.fullmatch(word):
            spread += ["--set", word]
            continue
        spread.append(word)
        is_after_setting = is_after_set or word.startswith("--set=")
        is_after_set = word == "--set"
    return spread


class Formatter(argparse.HelpFormatter):
    """Wraps the prose and examples of a description at the terminal's width, and states defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = []
        for part in text.split("\n\n"):
            is_prose = not any(line.startswith(" ") for line in part.splitlines())
            lines = [part] if is_prose else part.splitlines()
            parts.append("\n".join(fill(line, width) for line in lines))
        return "\n\n".join(parts)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if isinstance(default, list):
            default = " ".join(map(str, default))
        if default in (None, "", argparse.SUPPRESS) or isinstance(default, bool) or "default" in text:
            return text
        return f"{text} (default: {str(default).replace('%', '%%')})".lstrip()


def fill(text: str, width: int) -> str:
    """Break prose into lines; a line of an example that goes on ends with a backslash, as in a shell."""
    is_example = text.startswith("  ttt ")
    wrapper = textwrap.TextWrapper(
        width - 2 * is_example,
        subsequent_indent="      " * is_example,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if is_example:
        text = re.sub(r"( -\S+) (?=[^-])", "\\1\0", text)  # an option stays beside its value
    lines = wrapper.wrap(text)
    return (" \\\n" if is_example else "\n").join(lines).replace("\0", " ") or text
