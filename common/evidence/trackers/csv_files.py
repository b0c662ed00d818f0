"""Two CSV files: runs.csv with a row for each run, measurements.csv with a row for each value of a metric."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from common.errors import UserError
from common.evidence.trackers.store import Store
from common.evidence.trackers.tracked_run import Scalar, TrackedRun
from common.files import write_text

KEYS = ("run", "start")  # the first columns of both files
FORMULA = ("=", "+", "-", "@")  # a spreadsheet computes text that begins with one

Row = dict[str, str]


class CsvFiles(Store):
    """Rows of earlier exports stay; those of a run that is exported again are replaced."""

    view: ClassVar[str] = "{out}/runs.csv, {out}/measurements.csv"

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.changed: dict[str, TrackedRun] = {}

    def update(self, run: TrackedRun) -> None:
        self.changed[run.key] = run

    def flush(self) -> None:
        replaced = {to_cell(key) for key in self.changed}
        files = {self.out / "runs.csv": run_rows, self.out / "measurements.csv": measurement_rows}
        earlier = {path: read_rows(path) for path in files}  # both, before one is written
        for path, rows_of in files.items():
            rows = [row for row in earlier[path] if row["run"] not in replaced]
            new = (row for run in self.changed.values() for row in rows_of(run))
            rows += [{column: to_cell(value) for column, value in row.items()} for row in new]
            if self.changed:
                write_text(path, to_csv(sorted(rows, key=lambda row: (row["start"], row["run"]))))
        self.changed = {}


def run_rows(run: TrackedRun) -> Iterator[Mapping[str, Scalar]]:
    yield {
        "run": run.key,
        "start": run.start,
        "system": run.system,
        "benchmark": run.benchmark,
        "size": run.size,
        "number": run.number,
        "status": run.status,
        **run.outcome,
        **run.tags,
        **{f"parameter {name}": value for name, value in run.parameters.items()},
    }


def measurement_rows(run: TrackedRun) -> Iterator[Mapping[str, Scalar]]:
    for one in run.measurements:
        yield {"run": run.key, "start": run.start, **one._asdict()}


def to_cell(value: Scalar) -> str:
    """Write a value as text that a spreadsheet shows and does not compute."""
    text = str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(FORMULA) else text


def read_rows(path: Path) -> list[Row]:
    """Return the rows of an earlier export; none without a file. Raises UserError for another file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file, suppress(UnicodeDecodeError, csv.Error):
        reader = csv.DictReader(file)
        rows = [{name: text for name, text in row.items() if text} for row in reader]
        is_ours = tuple(reader.fieldnames or ())[: len(KEYS)] == KEYS
        if is_ours and all(row.keys() >= {*KEYS} and None not in row for row in rows):
            return rows
    raise UserError("was not written by `ttt export`", where=str(path), hint="choose another --out")


def to_csv(rows: Sequence[Row]) -> str:
    """Write rows as CSV; a column that a row lacks is empty there."""
    columns: Iterable[str] = dict.fromkeys([*KEYS, *(name for row in rows for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
