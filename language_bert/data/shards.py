"""Instances on disk: token ids as uint16, concatenated in large files, with an index.

`train-00000.shard` and so on hold, for each instance, its input ids, its masked positions and the original
tokens there. `train.index.npy` has the offset, the CRC and the lengths of each instance. With variable
lengths and two bytes a token the files have a twentieth of the size of the reference's TFRecords.
"""

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common.data.shards import index_path, read_index, shard_path
from common.errors import UserError
from common.files import synchronize
from language_bert.data.instances import Instance, InstanceSettings

INDEX = np.dtype(  # 24 bytes an instance
    [
        ("shard", "<u4"),
        ("crc32", "<u4"),
        ("offset", "<u8"),  # in words of two bytes
        ("num_tokens", "<u2"),
        ("num_a_tokens", "<u2"),
        ("num_masked", "<u2"),
        ("is_random_next", "<u2"),
    ]
)
HISTOGRAM_TOKENS = 64  # width of a bin


def write_shard(path: Path, number: int, instances: Iterable[Instance]) -> np.ndarray:
    """Write a shard through to the disk; returns its rows of the index, (num_instances,) INDEX."""
    rows, offset = [], 0
    with path.open("wb") as file:
        for item in instances:
            words = np.concatenate([item.input_ids, item.masked_positions, item.masked_ids])
            content = words.astype("<u2").tobytes()
            counts = (len(item.input_ids), item.num_a_tokens, len(item.masked_ids), item.is_random_next)
            rows.append((number, zlib.crc32(content), offset, *counts))
            offset += file.write(content) // 2
    synchronize(path)
    return np.array(rows, dtype=INDEX)


def describe(part: str, index: np.ndarray, settings: InstanceSettings) -> dict[str, Any]:
    """Print the histogram of the lengths of a part; returns its facts for the manifest."""
    lengths, width = index["num_tokens"], HISTOGRAM_TOKENS
    counts = np.bincount((lengths - 1) // width)
    bins = [f"to {number * width}: {count / len(lengths):.1%}" for number, count in enumerate(counts, 1)]
    mean = lengths.mean()
    print(f"{part}: {len(lengths):,} instances, mean {mean:.1f} tokens; {', '.join(bins)}", flush=True)
    return {
        f"num_{part}_masked_tokens": int(index["num_masked"].sum()),
        f"num_{part}_short": int((index["num_masked"] < settings.max_predictions).sum()),
        f"{part}_valid_fraction": round(float(mean) / settings.max_seq_length, 4),
        f"{part}_length_histogram_{width}": counts.tolist(),
    }


class Shards:
    """Random access to a part through memory maps; each record is checked when it is read.

    A record without a masked token is refused: a batch of such records has no loss.
    """

    def __init__(
        self, directory: Path, part: str, *, max_seq_length: int = 512, vocab_size: int = 2**16
    ) -> None:
        """Open index and shards.

        Raises UserError for a file that is missing or has another length than the index says, and for a
        record that is longer than `max_seq_length` or has no masked token.
        """
        self.directory, self.part, self.vocab_size = directory, part, vocab_size
        self.index = np.array(read_index(index_path(directory, part), INDEX))  # in memory: read row by row
        for is_wrong, what in (
            (self.index["num_masked"] == 0, "has no masked token"),
            (self.index["num_tokens"] > max_seq_length, f"has more than {max_seq_length} tokens"),
        ):
            if is_wrong.any():
                raise UserError(what, where=self.where(int(is_wrong.argmax())))
        self.num_words = self.index["num_tokens"].astype(np.int64) + 2 * self.index["num_masked"]
        lengths = np.bincount(self.index["shard"], weights=self.num_words)  # one pass for all shards
        self.shards = [self.open_shard(number, int(length)) for number, length in enumerate(lengths)]

    def open_shard(self, number: int, expected: int) -> np.ndarray:
        path = shard_path(self.directory, self.part, number)
        try:
            words = np.asarray(np.memmap(path, dtype="<u2", mode="r"))  # slices of a memmap are slow
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be read ({error})", where=str(path)) from error
        if len(words) != expected:
            raise UserError(f"{len(words)} words, its index says {expected}", where=str(path))
        return words

    def __len__(self) -> int:
        return len(self.index)

    def where(self, number: int) -> str:
        shard = self.index["shard"][number]
        first = int(np.searchsorted(self.index["shard"], shard))
        return f"{shard_path(self.directory, self.part, int(shard))} record {number - first}"

    def __getitem__(self, number: int) -> Instance:
        """Read a record. Raises UserError that names file and record for damage."""
        row = self.index[number]
        num_tokens, num_masked, first = int(row["num_tokens"]), int(row["num_masked"]), int(row["offset"])
        words = self.shards[row["shard"]][first : first + int(self.num_words[number])]
        if zlib.crc32(words.tobytes()) != row["crc32"]:
            raise UserError("is corrupt (CRC differs)", where=self.where(number))
        body = words.astype(np.int64)
        input_ids, masked_ids = body[:num_tokens], body[num_tokens + num_masked :]
        positions = body[num_tokens : num_tokens + num_masked]
        if max(input_ids.max(initial=0), masked_ids.max()) >= self.vocab_size:
            what = f"has a token outside of the vocabulary of {self.vocab_size}"
            raise UserError(what, where=self.where(number))
        if positions.max() >= num_tokens:
            raise UserError("has a masked position outside of the sequence", where=self.where(number))
        return Instance(
            input_ids=input_ids,
            num_a_tokens=int(row["num_a_tokens"]),
            masked_positions=positions,
            masked_ids=masked_ids,
            is_random_next=bool(row["is_random_next"]),
        )
