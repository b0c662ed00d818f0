"""The best speeds that this machine has reached, to compare later checks with."""

import json
from importlib import metadata
from pathlib import Path

from common import files
from common.machine import system
from common.machine.line import Line, ok, warning

FOLDER = system.LOCAL
SLOW = 0.7  # of the record; a processor's clock alone changes a speed by a fifth
OTHERS = "end other programs (top names them), or wait; a laptop on battery is slower, too"


def record_path(folder: Path | None = None) -> Path:
    """Name the file of this machine alone: machines with one folder, or one model, do not share it."""
    name, digest = system.hardware_name(), system.machine_digest()
    return (folder or FOLDER) / f"{name.removesuffix(f'-{digest}')}-{digest}.json"


def read_record(path: Path) -> dict[str, float]:
    """Read the best speeds by what was measured; empty for a file that is missing or nonsense."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    return {name: float(rate) for name, rate in entries if isinstance(rate, int | float) and rate > 0}


def compare_with_record(what: str, rate: float, folder: Path | None = None) -> tuple[float | None, str]:
    """Return the factor by which this is slower than this machine's best; stores a better speed.

    The factor is None where no speed was known; the second value then says whether this one was stored. Each
    version of torch has speeds of its own.
    """
    path, name = record_path(folder), f"{what}, torch {metadata.version('torch')}"
    record = read_record(path)
    best = record.get(name)
    if best is None or rate > best:
        try:
            files.write_text(path, json.dumps(record | {name: rate}, indent=1) + "\n")
        except OSError as error:
            return (best / rate if best else None), f"cannot be kept ({error.strerror})"
    return (None, "the first of this machine is kept") if best is None else (best / rate, "")


def judge_speed(line: Line, what: str, rate: float, folder: Path | None = None) -> Line:
    """Turn an ok line about a speed into a warning when this machine has been much faster."""
    factor, note = compare_with_record(what, rate, folder)
    if factor is None:
        return ok(line.check, f"{line.found}; {note}", **line.values)
    values = line.values | {"factor": factor}
    if factor > 1 / SLOW:
        return warning(
            line.check, f"{line.found}: this machine has been {factor:.1f} times as fast", OTHERS, **values
        )
    return ok(line.check, f"{line.found}, {min(1.0, 1 / factor):.0%} of this machine's best", **values)
