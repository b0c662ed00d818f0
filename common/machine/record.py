"""The best speeds that this machine has reached, to compare later checks with."""

import json
from importlib import metadata
from pathlib import Path

from common import files
from common.evidence.records import finite
from common.machine import system
from common.machine.line import Line, judge, ok

FOLDER = system.LOCAL
SLOW = 0.7  # of the record; a processor's clock alone changes a speed by a fifth
OTHERS = "end other programs (top names them), or wait; a laptop on battery is slower, too"


def record_path() -> Path:
    """Name the file of this machine alone: machines that share a folder or a model do not share it."""
    name, digest = system.hardware_name(), system.machine_digest()
    return FOLDER / f"{name.removesuffix(f'-{digest}')}-{digest}.json"


def read_record(path: Path) -> dict[str, float]:
    """Read the best speeds by what was measured; empty for a file that is missing or nonsense."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    rates = {name: finite(rate) for name, rate in entries}
    return {name: rate for name, rate in rates.items() if rate and rate > 0}


def name_entry(what: str) -> str:
    return f"{what}, torch {metadata.version('torch')}"  # each version has speeds of its own


def best_speed(what: str) -> float | None:
    """Return the best speed of this machine with this version of torch; None where none is recorded."""
    return read_record(record_path()).get(name_entry(what))


def keep_speed(what: str, rate: float) -> str:
    """Keep a speed that is better than the best; returns why it cannot be kept, or ''."""
    path = record_path()
    record = read_record(path)
    if rate <= record.get(name_entry(what), 0.0):
        return ""
    try:
        files.write_text(path, files.to_json(record | {name_entry(what): rate}))
    except OSError as error:
        return f"cannot be kept ({error.strerror})"
    return ""


def judge_speed(line: Line, what: str, rate: float) -> Line:
    """Turn an ok line about a speed into a warning when this machine has been much faster.

    A better speed is stored; each version of torch has speeds of its own.
    """
    best = best_speed(what)
    trouble = keep_speed(what, rate)
    if best is None:
        note = trouble or "the first of this machine is kept"
        return ok(line.check, f"{line.found}; {note}", **line.values)
    factor = best / rate
    is_slow = factor > 1 / SLOW
    share = f", {min(1.0, 1 / factor):.0%} of this machine's best"
    text = line.found + (f": this machine has been {factor:.1f} times as fast" if is_slow else share)
    return judge(line.check, text, OTHERS, is_warning=is_slow, **line.values | {"factor": factor})
