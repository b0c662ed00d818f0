"""Sources of text: MLCommons' cleaned Wikipedia, the reference's TFRecords, or a data set of Hugging Face.

A source is a folder with these files at any depth: `part-00000-of-00500` and so on, `eval.txt` (text) or
`eval_10k` (TFRecords), for text `vocab.txt`, and the checkpoint `model.ckpt-28252`. MLCommons has two
checkpoints of this name: one written by TensorFlow 1, which is read here, and one by TensorFlow 2.
`model.safetensors`, see tf_checkpoint.py, may stand for the 4 GB of its data, but not for its index.

Parquet or Arrow files of another corpus may replace parts and evaluation set; every row of their text column
is a document. Files of the split `train` are the parts, the first of `validation` or `test` is the evaluation
set; without such a split, the last rows of the last part are. Nothing is unpacked.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.data import preparation, tables
from common.errors import UserError
from language_bert.data.corpus import HELD_OUT_FRACTION, SENTENCE_END

PART = re.compile(r"part-\d{5}-of-(\d{5})")
TEXT, RECORDS, TABLES = "eval.txt", "eval_10k", "tables"  # of a source: its evaluation set, or its form
SUFFIXES = (".parquet", ".arrow")  # of a data set of Hugging Face
COLUMN = "text"  # where a table has several columns of text
CHECKPOINT = "model.ckpt-28252"
DATA_SUFFIX, INDEX_SUFFIX = ".data-00000-of-00001", ".index"
WEIGHTS = "model.safetensors"  # of a prepared data set, and of a source: the converted checkpoint
WIKIPEDIA = "wikipedia-20200101"  # `data.corpus`; no other value is checked
CHECKPOINT_HINT = "of MLCommons' two checkpoints the one of TensorFlow 1 is read"
NUM_PARTS = 500
OFFICIAL_MD5 = {  # MLPerf Training, retired_benchmarks/bert/README.md
    "vocab.txt": "64800d5d8528ce344256daf115d4965e",
    TEXT: "2a220f790517261547b1b45ed3ada07a",
    "part-00000-of-00500": "a64a7c31eff5cd38ae6d94f7a6229dab",
    "part-00001-of-00500": "549a9ed4f805257245bec936563abfd0",
    "part-00002-of-00500": "1a1366ddfc03aef9d41ce552ee247abf",
    "part-00497-of-00500": "66835aa75d4855f2e678e8f3d73812e9",
    "part-00498-of-00500": "e6d68a7632e9f4aa1a94128cce556dc9",
    "part-00499-of-00500": "b3b087ad24e3770d879a351664cebc5a",
    CHECKPOINT + INDEX_SUFFIX: "f97de3ae180eb8d479555c939d50d048",
    CHECKPOINT + DATA_SUFFIX: "50797acd537880bfb5a7ade80d976129",
}
OTHER = "other"  # `data.corpus` of any other text
OTHER_HINT = f"this benchmark is defined on one dump; for another text: --set data.corpus={OTHER}"


class Rows(NamedTuple):
    """Documents in a column of a table: the rows from `first` to before `last`, or to the end."""

    column: str
    first: int = 0
    last: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of a source; `vocabulary` is None for TFRecords, `checkpoint` where it is not needed.

    `column` names the text of a data set of Hugging Face.
    """

    parts: list[Path]
    evaluation: Path
    vocabulary: Path | None
    checkpoint: Path | None  # without its suffix
    weights: Path | None = None  # the converted checkpoint, where the data of the checkpoint are missing
    column: str | None = None

    def rows(self, path: Path, *, is_evaluation: bool) -> Rows | None:
        """Return the documents of a file that a part of the data is made of; None: the file is no table."""
        if self.column is None:
            return None
        if path != self.evaluation or path != self.parts[-1]:
            return Rows(self.column)
        return split_rows(path, self.column)[is_evaluation]

    def describe(self) -> dict[str, str]:
        if self.column is not None:
            return {"form": self.parts[0].suffix[1:], "column": self.column}
        return {"form": "TFRecords" if self.vocabulary is None else "text"}


class Files(defaultdict[str, list[Path]]):
    """The files below a folder by name, in order."""

    def __init__(self, directory: Path) -> None:
        super().__init__(list)
        self.directory = directory
        for path in sorted(directory.rglob("*")):
            self[path.name].append(path)

    def one(self, name: str) -> Path:
        """Return the file of this name. Raises UserError for one that is missing or there twice."""
        if not self[name]:
            hint = "see language_bert/README.md"
            raise UserError(f"there is no {name}", where=str(self.directory), hint=hint)
        if len(self[name]) > 1:
            what = f"{name} is there twice: {self[name][0]} and {self[name][1]}"
            raise UserError(what, where=str(self.directory))
        return self[name][0]


def list_source(directory: Path, *, is_official: bool, has_checkpoint: bool) -> Source:
    """Find the files in `directory`, and check official ones against their published MD5.

    Raises UserError for a file that is missing, there twice, damaged or of another dump.
    """
    files, where = Files(directory), str(directory)
    if not any(map(PART.fullmatch, files)) and (source := list_tables(files, has_checkpoint=has_checkpoint)):
        if is_official:
            raise UserError("is not MLCommons' text", where=str(source.parts[0]), hint=OTHER_HINT)
        return source
    is_text = bool(files[TEXT])
    if is_text and files[RECORDS]:
        raise UserError(f"has both {TEXT} and {RECORDS}", where=where, hint="name the folder of one")
    parts = list_parts(files, is_official=is_official)
    if not (is_text or files[RECORDS]):
        what = f"has neither {TEXT} (of text) nor {RECORDS} (of TFRecords)"
        raise UserError(what, where=where, hint="see language_bert/README.md")
    evaluation = files.one(TEXT if is_text else RECORDS)
    vocabulary = files.one("vocab.txt") if is_text else None
    checked = [evaluation, vocabulary, *parts] if is_text else []
    checkpoint = weights = None
    if has_checkpoint:
        index = find_checkpoint(files)
        checkpoint, weights = index.with_suffix(""), find_weights(files, index)
        checked += [index, *[index.with_name(CHECKPOINT + DATA_SUFFIX)] * (weights is None)]
    for path in checked if is_official else ():
        if path is not None and (md5 := OFFICIAL_MD5.get(path.name)):
            hint = CHECKPOINT_HINT if path.name.startswith(CHECKPOINT) else OTHER_HINT
            preparation.check_md5(path, md5, hint=hint)
    return Source(
        parts=parts, evaluation=evaluation, vocabulary=vocabulary, checkpoint=checkpoint, weights=weights
    )


def part_names(total: int) -> list[str]:
    return [f"part-{number:05}-of-{total:05}" for number in range(total)]


def read_totals(files: Files) -> set[int]:
    """Read from the names of parts how many there are: one number for the parts of one text."""
    return {int(match[1]) for match in map(PART.fullmatch, files) if match}


def list_parts(files: Files, *, is_official: bool) -> list[Path]:
    """Find the parts of the training set. Raises UserError for none, a missing one or an empty one."""
    where, totals = str(files.directory), read_totals(files)
    if len(totals) != 1:
        has = f"parts of {len(totals)} sets" if totals else "no part of a training set and no table of text"
        what = f"has {has}, expected part-00000-of-{NUM_PARTS:05} and so on"
        raise UserError(what, where=where)
    parts = [files.one(name) for name in part_names(totals.pop())]
    if is_official and len(parts) != NUM_PARTS:
        raise UserError(f"{len(parts)} parts, expected {NUM_PARTS}", where=where, hint=OTHER_HINT)
    if empty := next((path for path in parts if not path.stat().st_size), None):
        raise UserError("is empty", where=str(empty), hint="fetch it again")
    return parts


def list_tables(files: Files, *, has_checkpoint: bool) -> Source | None:
    """Find the files of a data set of Hugging Face, vocabulary and checkpoint; None without such files."""
    for suffix in SUFFIXES:
        splits = {name: tables.split_files(files.directory, name, suffix) for name in tables.SPLITS}
        named = {path for paths in splits.values() for path in paths}
        others = [path for path in tables.data_files(files.directory, suffix) if path not in named]
        parts = splits["train"] or others
        if not parts:
            continue
        evaluation = [*splits["validation"], *splits["test"], parts[-1]][0]
        columns = {path: find_column(path) for path in (*parts, evaluation)}
        if odd := [path for path, column in columns.items() if column != columns[parts[0]]]:
            what = f"its text is in column {columns[odd[0]]}, that of {parts[0].name} in {columns[parts[0]]}"
            raise UserError(what, where=str(odd[0]))
        index = find_checkpoint(files) if has_checkpoint else None
        return Source(
            parts=parts,
            evaluation=evaluation,
            vocabulary=files.one("vocab.txt"),
            checkpoint=index and index.with_suffix(""),
            weights=index and find_weights(files, index),
            column=columns[parts[0]],
        )
    return None


def find_checkpoint(files: Files) -> Path:
    """Find the index of the checkpoint; of several, the one whose MD5 is published for TensorFlow 1."""
    name = CHECKPOINT + INDEX_SUFFIX
    for path in files[name]:
        if preparation.md5_of(path) == OFFICIAL_MD5.get(name):
            return path
    return files.one(name)


def find_weights(files: Files, index: Path) -> Path | None:
    """Find the converted checkpoint; None where the data of the checkpoint are beside its index.

    Raises UserError where there is neither.
    """
    data = index.with_name(CHECKPOINT + DATA_SUFFIX)
    if data.is_file():
        return None
    if not files[WEIGHTS]:
        raise UserError("no such file, beside its index", where=str(data), hint=CHECKPOINT_HINT)
    return files.one(WEIGHTS)


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
