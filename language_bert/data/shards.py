"""Training instances on disk: records of uint16 one behind the other, an index of offsets and CRCs.

A record is [length, num_a_tokens, num_masked, is_random_next, input_ids..., masked_positions...,
masked_ids...]. Variable length and two bytes a token: a twentieth of the reference's TFRecords.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UserError
from language_bert.data.instances import Instance

HEADER = 4
MAX_ID = 2**16 - 1


def write_shard(path: Path, instances: Iterable[Instance]) -> int:
    """Write `<path>.bin` and `<path>.index.npy`; returns the number of records."""
    index = [(0, 0)]
    with path.with_suffix(".bin").open("wb") as file:
        for instance in instances:
            record = np.array(
                [
                    len(instance.input_ids),
                    instance.num_a_tokens,
                    len(instance.masked_ids),
                    int(instance.is_random_next),
                    *instance.input_ids,
                    *instance.masked_positions,
                    *instance.masked_ids,
                ],
                dtype="<u2",
            )
            file.write(record.tobytes())
            index.append((index[-1][0] + len(record), zlib.crc32(record.tobytes())))
    np.save(path.with_suffix(".index.npy"), np.array(index, dtype="<u8"), allow_pickle=False)
    return len(index) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One instance, arrays int64: `input_ids` (length,), `masked_positions`, `masked_ids` (num_masked,)."""

    input_ids: np.ndarray
    num_a_tokens: int
    masked_positions: np.ndarray
    masked_ids: np.ndarray
    is_random_next: bool


class Shard:
    """Random access to a shard through a memory map; every record read is checked against its CRC."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_suffix(".bin")
        try:
            self.words = np.memmap(self.path, dtype="<u2", mode="r")
            self.index = np.load(path.with_suffix(".index.npy"), allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be read ({error})", where=str(self.path)) from error
        if self.index[-1, 0] != len(self.words):
            raise UserError(
                f"{len(self.words)} words, its index says {self.index[-1, 0]}", where=str(self.path)
            )

    def __len__(self) -> int:
        return len(self.index) - 1

    def __getitem__(self, number: int) -> Record:
        """Return a record. Raises UserError that names file and record when its content has changed."""
        first, last = self.index[number, 0], self.index[number + 1, 0]
        words = self.words[first:last]
        if zlib.crc32(words.tobytes()) != self.index[number + 1, 1]:
            raise UserError(f"record {number} is corrupt (CRC differs)", where=str(self.path))
        length, num_a_tokens, num_masked, is_random_next = (int(word) for word in words[:HEADER])
        body = words[HEADER:].astype(np.int64)
        return Record(
            input_ids=body[:length],
            num_a_tokens=num_a_tokens,
            masked_positions=body[length : length + num_masked],
            masked_ids=body[length + num_masked :],
            is_random_next=bool(is_random_next),
        )
