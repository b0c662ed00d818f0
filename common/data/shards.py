"""The shards of a large data set and their index; a stopped preparation continues with the missing ones.

A shard is finished when its rows of the index exist, in a file whose name holds a digest of the shard's
source: after a change of the source the shard is written again.
"""

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, TypeVar

import numpy as np

from common.data.manifest import SHARD
from common.errors import UserError, list_some
from common.files import write_text, write_whole
from common.yaml_file import spell

NUM_NAMED = 5  # changed records in a message
SETTINGS = "settings.json"  # of a preparation, in its folder


def shard_path(directory: Path, part: str, number: int) -> Path:
    return directory / f"{part}-{number:05}{SHARD}"


def index_path(directory: Path, part: str) -> Path:
    return directory / f"{part}.index.npy"


def read_index(path: Path, dtype: np.dtype, *, hint: str = "") -> np.ndarray:
    """Map an index (num_samples,) of this type into memory. Raises UserError for any other file."""
    try:
        index: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:  # the last two of a head
        raise UserError(f"cannot be read ({error})", where=str(path), hint=hint) from error
    if index.dtype != dtype or index.ndim != 1 or not len(index):
        raise UserError("not an index of shards", where=str(path), hint=hint)
    return index


def changed_records(shards: Any, number: int) -> str:
    """Name the records of one shard (counted from 0) that differ from the index.

    `shards` are the `Shards` of a benchmark: each record is checked against its CRC when it is read.
    """
    members, changed = np.flatnonzero(shards.index["shard"] == number), []
    for place, record in enumerate(members):
        try:
            shards[int(record)]
        except UserError:
            changed.append(place)
    return f" in record {list_some(changed, NUM_NAMED)}" if changed else ""


@dataclass(frozen=True, kw_only=True, eq=False)  # compared by identity: it may hold long lists
class PlannedShard(ABC):
    """A shard to be written in `work`: its file in data/ and, when it is finished, its rows of the index."""

    work: Path
    part: str
    number: int

    @abstractmethod
    def describe_source(self) -> Any:
        """Return what the shard is made from, as a JSON value."""

    @property
    def path(self) -> Path:
        return shard_path(self.work / "data", self.part, self.number)

    @property
    def rows(self) -> Path:
        """The file of its rows of the index."""
        digest = hashlib.blake2b(json.dumps(self.describe_source()).encode(), digest_size=16).hexdigest()
        return self.work / "rows" / f"{self.part}-{self.number:05}-{digest}.npy"

    def is_finished(self) -> bool:
        return self.rows.is_file() and self.path.is_file()

    def save_rows(self, rows: np.ndarray) -> None:
        """Save the rows, which finishes the shard."""
        with write_whole(self.rows) as draft:
            np.save(draft, rows, allow_pickle=False)


Planned = TypeVar("Planned", bound=PlannedShard)


def list_finished(work: Path) -> list[Path]:
    """List the rows of the finished shards in the folder of a preparation that was stopped."""
    rows = sorted(work.glob("rows/*-*-*.npy"))
    return [path for path in rows if (work / "data" / f"{path.stem.rpartition('-')[0]}{SHARD}").is_file()]


def read_settings(work: Path) -> dict[str, Any]:
    """Read the settings that a preparation was begun with; none where they are not recorded."""
    try:
        return dict(json.loads((work / SETTINGS).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def refuse_other_settings(work: Path, settings: dict[str, Any]) -> None:
    """Raise UserError where shards are finished that were begun with other settings."""
    num_finished, begun_with = len(list_finished(work)), read_settings(work)
    for key, value in settings.items():
        if num_finished and (other := begun_with.get(key, value)) != value:
            what = f"{num_finished} shards are finished with {key} {other}, the configuration says {value}"
            hint = f"go on with --set {key}={spell(other)}, or remove this folder"
            raise UserError(what, where=str(work), hint=hint)


def clear_unfinished(work: Path, planned: Sequence[Planned], settings: dict[str, Any]) -> list[Planned]:
    """Remove everything but finished shards from the folders of `work`; returns the shards to write.

    Raises UserError where shards are finished that were begun with other settings.
    """
    refuse_other_settings(work, settings)
    for name in ("data", "rows"):
        (work / name).mkdir(parents=True, exist_ok=True)
    write_text(work / SETTINGS, json.dumps(settings))
    if others := set(list_finished(work)) - {shard.rows for shard in planned}:
        print(f"removing {len(others)} finished shards of another source or other settings", flush=True)
    finished = [shard for shard in planned if shard.is_finished()]
    kept = {path for shard in finished for path in (shard.path, shard.rows)}
    for path in [*work.glob("data/*"), *work.glob("rows/*")]:
        if path.is_dir():  # the draft of a killed writer
            shutil.rmtree(path)
        elif path not in kept:
            path.unlink()
    if finished:
        print(f"{len(finished)} of {len(planned)} shards are finished already", flush=True)
    return [shard for shard in planned if shard.path not in kept]


def write_index(work: Path, planned: Sequence[PlannedShard], part: str) -> np.ndarray:
    rows = [np.load(shard.rows, allow_pickle=False) for shard in planned if shard.part == part]
    index: np.ndarray = np.concatenate(rows)
    np.save(index_path(work / "data", part), index, allow_pickle=False)
    return index
