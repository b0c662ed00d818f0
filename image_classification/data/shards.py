"""Encoded images in large files, one behind the other, with an index: the full-size data on disk.

`train-00000.shard` and so on hold the bytes of the image files; `train.index.npy` says where each sample is,
and its CRC, class and size in pixels. A reader takes large files in sequence, or any sample with one read.
"""

import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.data.shards import index_path, read_index, shard_path
from common.errors import UserError
from common.files import explain_os_error, synchronize

INDEX = np.dtype(  # 32 bytes a sample
    [
        ("shard", "<u4"),
        ("length", "<u4"),  # bytes
        ("offset", "<u8"),
        ("crc32", "<u4"),
        ("label", "<u4"),
        ("height", "<u4"),  # pixels
        ("width", "<u4"),
    ]
)


class EncodedImage(NamedTuple):
    """The bytes of an image file, its class, and its size in pixels."""

    content: bytes
    label: int
    height: int
    width: int


def split_by_bytes(lengths: Sequence[int], shard_bytes: int) -> Iterator[slice]:
    """Yield the samples of each shard: as many as fit by their lengths in bytes, at least one."""
    first = num_bytes = 0
    for sample, length in enumerate(lengths):
        if sample > first and num_bytes + length > shard_bytes:
            yield slice(first, sample)
            first, num_bytes = sample, 0
        num_bytes += length
    if lengths:
        yield slice(first, len(lengths))


def write_shard(path: Path, number: int, images: Iterable[EncodedImage]) -> np.ndarray:
    """Write one shard and wait until the disk has it; returns its rows of the index (num_samples,) INDEX."""
    rows, offset = [], 0
    with path.open("wb") as file:
        for image in images:
            crc = zlib.crc32(image.content)
            length = file.write(image.content)
            rows.append((number, length, offset, crc, *image[1:]))
            offset += length
    synchronize(path)
    return np.array(rows, dtype=INDEX)


class Shards:
    """The samples of one part: `Images` of images.py. Every sample read is checked against its CRC.

    Reads carry their own offset, so threads and forked workers may share an object; a pickled one opens the
    files anew.
    """

    def __init__(self, directory: Path, part: str, *, hint: str = "") -> None:
        """Open index and shards. Raises UserError for one that is missing, or not as long as it should be."""
        self.directory, self.part, self.hint = directory, part, hint
        self.index = read_index(index_path(directory, part), INDEX, hint=hint)
        self.labels = self.index["label"].astype(np.int64)
        numbers = self.index["shard"]
        last = np.append(np.flatnonzero(numbers[1:] != numbers[:-1]), len(numbers) - 1)
        if numbers[last].tolist() != list(range(len(last))):
            where = str(index_path(directory, part))
            raise UserError("its shards are not numbered in order", where=where, hint=hint)
        self.first_samples = np.append(0, last[:-1] + 1)
        self.descriptors: list[int] = []
        weakref.finalize(self, close_all, self.descriptors)
        ends = self.index[last]
        for number, num_bytes in enumerate((ends["offset"] + ends["length"]).tolist()):
            self.descriptors.append(open_shard(shard_path(directory, part, number), num_bytes, hint=hint))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Shards, self.directory, self.part, hint=self.hint), ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, sample: int) -> bytes:
        return self.jpeg(sample)

    def where(self, sample: int) -> str:
        """Return the shard of a sample and the record in it, from 0."""
        number = int(self.index["shard"][sample])
        record = sample - int(self.first_samples[number])
        return f"{shard_path(self.directory, self.part, number)} record {record}"

    def jpeg(self, sample: int) -> bytes:
        """Return the encoded image. Raises UserError when its content is not what was written."""
        row = self.index[sample]
        try:
            content = os.pread(self.descriptors[row["shard"]], int(row["length"]), int(row["offset"]))
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror})", where=self.where(sample)) from error
        if zlib.crc32(content) != row["crc32"]:
            raise UserError("its content has changed (CRC differs)", where=self.where(sample), hint=self.hint)
        return content

    def size(self, sample: int) -> tuple[int, int]:
        row = self.index[sample]
        return int(row["height"]), int(row["width"])


def open_shard(path: Path, num_bytes: int, *, hint: str) -> int:
    """Return a descriptor of a shard. Raises UserError unless it is there and has so many bytes."""
    with explain_os_error("cannot be opened", path, hint=hint):
        descriptor = os.open(path, os.O_RDONLY)
    size = os.fstat(descriptor).st_size
    if size != num_bytes:
        os.close(descriptor)
        raise UserError(f"{size} bytes, its index says {num_bytes}", where=str(path), hint=hint)
    return descriptor


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
