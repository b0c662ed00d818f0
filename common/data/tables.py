"""Data sets of Hugging Face on disk: the files of a split, and their columns, which pyarrow reads undecoded.

The files are parquet, as on the hub, or Arrow, as `save_to_disk` writes and `load_dataset` keeps them.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from common.data import preparation
from common.errors import UserError
from common.files import FULL, write_whole
from common.repository import OF_MACHINE, install_hint

SPLITS = {  # the words in a file's path that name its split, as in the library `datasets`
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing"},
}
CACHED = "cache-"  # begins the names of what `datasets` computed from a data set
ARROW_FILE = b"ARROW1"  # begins Arrow's file format; its stream format, which `datasets` writes, has none
ROWS_AT_ONCE = 256


def data_files(directory: Path, suffix: str) -> list[Path]:
    """List the files with this suffix at any depth, in the order of their paths, without hidden ones."""
    paths = (path.relative_to(directory) for path in directory.rglob(f"*{suffix}"))
    return [
        directory / path
        for path in sorted(paths)
        if not path.name.startswith(CACHED) and not any(part.startswith(".") for part in path.parts)
    ]


def split_files(directory: Path, split: str, suffix: str) -> list[Path]:
    """List the files of a split; the last word of any split in a file's path below `directory` decides."""
    paths = data_files(directory, suffix)
    return [path for path in paths if split_of(path.relative_to(directory)) == split]


def split_of(path: Path) -> str | None:
    # as in train_test/train-0.parquet and pre_training_text-validation.arrow
    words = re.split("[^a-z]+", path.as_posix().lower())
    named = (split for word in reversed(words) for split in SPLITS if word in SPLITS[split])
    return next(named, None)


def import_pyarrow() -> ModuleType:
    try:
        for module in ("pyarrow.ipc", "pyarrow.parquet"):
            import_module(module)
        return import_module("pyarrow")
    except ImportError as error:
        what = "pyarrow, which reads parquet and Arrow files, is not installed"
        raise UserError(what, hint=install_hint("hf")) from error


@contextmanager
def explain_arrow_errors(path: Path) -> Iterator[ModuleType]:
    """Yield pyarrow to the block; raises UserError that names the file if pyarrow cannot read it."""
    pyarrow = import_pyarrow()
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        code, reason = getattr(error, "errno", None), str(error).partition("\n")[0]
        if code in FULL:
            raise
        what = "cannot be read" if code in OF_MACHINE else f"not a whole {path.suffix[1:]} file"
        raise UserError(f"{what} ({reason})", where=str(path)) from error


def read_schema(path: Path) -> Any:
    """Return the `pyarrow.Schema` of a file. Raises UserError for a damaged one."""
    with explain_arrow_errors(path) as pyarrow:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_schema(path)
        with pyarrow.memory_map(str(path)) as source:
            return open_arrow(pyarrow, source.read_buffer()).schema


def class_names(schema: Any, column: str) -> list[str]:
    """Return the names of the classes of a column, by number, as `datasets` wrote them; [] without any."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[column]["names"]]
    except (KeyError, TypeError, ValueError):
        return []


def count_rows(path: Path) -> int:
    """Count the rows of a file: for parquet by its metadata, for Arrow by the heads of its batches."""
    if path.suffix == ".parquet":
        with explain_arrow_errors(path) as pyarrow:
            return int(pyarrow.parquet.read_metadata(path).num_rows)
    return sum(batch.num_rows for batch, _ in map_batches(path))


def read_column(path: Path, column: str) -> Iterator[Any]:
    """Yield the values of a column, as objects of Python. Raises UserError for a damaged file."""
    with explain_arrow_errors(path) as pyarrow:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[column]):
                    yield from batch.column(column).to_pylist()
        else:
            for batch, _ in map_batches(path):
                yield from batch.column(column).to_pylist()


def open_arrow(pyarrow: ModuleType, content: Any) -> Any:
    """Open the buffer of an Arrow file or an Arrow stream."""
    is_file = content[: len(ARROW_FILE)].to_pybytes() == ARROW_FILE
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(content)


def map_batches(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield the record batches of an Arrow file, and the address at which it is mapped into memory.

    Raises UserError for a damaged file.
    """
    with explain_arrow_errors(path) as pyarrow:
        content = pyarrow.memory_map(str(path)).read_buffer()
        reader = batches = open_arrow(pyarrow, content)
        if isinstance(reader, pyarrow.ipc.RecordBatchFileReader):
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        for batch in batches:
            yield batch, content.address


def locate(values: Any, address: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the offset in an Arrow file, and the number, of the bytes of each value: (num,) int64 each.

    `values` is a column of one of `map_batches`, of binary type, and `address` came with it. Raises UserError
    where the file is compressed, so that its values have no offset.
    """
    if not len(values):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    is_large = import_pyarrow().types.is_large_binary(values.type)
    _, bounds, content = values.buffers()
    first = values.offset
    places = np.frombuffer(bounds, np.int64 if is_large else np.int32)[first : first + len(values) + 1]
    start = 0 if content is None else content.address - address
    if not 0 <= start < path.stat().st_size:
        raise UserError("its columns are compressed", where=str(path), hint="write it again without that")
    places = places.astype(np.int64)
    return start + places[:-1], np.diff(places)


def unpack(paths: Sequence[Path], columns: Sequence[str], folder: Path) -> list[Path]:
    """Write these columns of parquet files as Arrow files in `folder`, where each value has an offset.

    Parquet compresses many values in one page, so that a value in random order would need the whole page.
    Files of an earlier call are kept while their parquet files are the same. Raises UserError where the disk
    has no room for them and for prepared data of the same size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / f"{path.name}-{digest_of(path, columns)}.arrow" for path in paths]
    for path in set(folder.iterdir()) - set(targets):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    missing = [(path, target) for path, target in zip(paths, targets, strict=True) if not target.is_file()]
    num_bytes = sum(path.stat().st_size for path, _ in missing)
    preparation.check_free_space(folder, 2 * num_bytes)
    progress = preparation.Progress(num_items=len(missing), num_bytes=num_bytes, items="parquet files")
    for path, target in missing:
        write_arrow(path, columns, target)
        progress.add(1, path.stat().st_size)
    return targets


def digest_of(path: Path, columns: Sequence[str]) -> str:
    status = path.stat()
    text = repr((str(path), status.st_size, status.st_mtime_ns, list(columns)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write_arrow(path: Path, columns: Sequence[str], target: Path) -> None:
    """Write these columns of a parquet file as an Arrow stream, whole or not at all."""
    with (
        explain_arrow_errors(path) as pyarrow,
        pyarrow.parquet.ParquetFile(path) as file,
        write_whole(target) as draft,
    ):
        fields = [file.schema_arrow.field(column) for column in columns]
        schema = pyarrow.schema(fields, metadata=file.schema_arrow.metadata)
        with pyarrow.OSFile(str(draft), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=list(columns)):
                arrays = [batch.column(column) for column in columns]
                writer.write_batch(pyarrow.RecordBatch.from_arrays(arrays, schema=schema))
