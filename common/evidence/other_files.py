"""Files that are no logs, refused by name before anything is read as one."""

from pathlib import Path

from common.errors import UserError
from common.evidence.records import TOKEN, printable

SEARCHED_BYTES = 2**20  # of a file's start: a head without a record is a few kilobytes


def require_log(path: Path) -> Path:
    """Return the path; raises UserError unless the file is called like a result or holds a record."""
    is_result = path.name.startswith("result_") and path.suffix == ".txt"
    if is_result or not path.is_file():
        return path
    try:
        with path.open("rb") as stream:
            is_log = f"{TOKEN}{{".encode() in stream.read(SEARCHED_BYTES)
    except OSError:
        return path  # the reader says why
    if not is_log:
        raise UserError(f"is no log: no line with '{TOKEN}{{'", where=printable(str(path)))
    return path
