"""Text of a data set of Hugging Face: every row of one column is a document."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.data import tables
from common.errors import UserError
from language_bert.data.corpus import HELD_OUT_FRACTION, SENTENCE_END

COLUMN = "text"  # where a table has several columns of text


class Rows(NamedTuple):
    """Documents in a column of a table: the rows from `first` to before `last`, or to the end."""

    column: str
    first: int = 0
    last: int | None = None


def find_column(path: Path) -> str:
    """Return the column `text`, or else the only one of strings. Raises UserError without either."""
    types = tables.import_pyarrow().types
    schema = tables.read_schema(path)
    strings = [
        field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)
    ]
    if COLUMN in strings or len(strings) == 1:
        return COLUMN if COLUMN in strings else strings[0]
    what = (
        f"{len(strings)} columns of strings among {', '.join(schema.names)}, expected one, or one named text"
    )
    raise UserError(what, where=str(path))


def split_rows(path: Path, column: str) -> tuple[Rows, Rows]:
    """Split the rows of a file into those to train on and the last ones, to evaluate on."""
    num_rows = tables.count_rows(path)
    first = num_rows - int(num_rows * HELD_OUT_FRACTION)
    return Rows(column, 0, first), Rows(column, first)


def document_lines(path: Path, rows: Rows) -> Iterator[str]:
    """Yield a sentence a line and a blank line after each document, the form of MLCommons' text.

    A sentence ends at a line break, and where `SENTENCE_END` of the embedded corpus says.
    """
    for text in islice(tables.read_column(path, rows.column), rows.first, rows.last):
        for paragraph in (text or "").split("\n"):
            if words := " ".join(paragraph.split()):
                yield from SENTENCE_END.split(words)
        yield ""
