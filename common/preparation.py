"""What preparing a large data set needs: shards that survive a kill, room on the disk, progress.

A finished shard is a file and its rows of the index, whose file name holds a digest of what they were made
from: a source that has changed is noticed, and a preparation that was stopped goes on where it was.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from common.errors import UserError

PRINT_EVERY_S = 10.0
GIB = 2**30


class PlannedShard(Protocol):
    """A shard that is to be written: its file, and the file of its rows of the index."""

    @property
    def path(self) -> Path: ...  # noqa: D102

    @property
    def rows(self) -> Path: ...  # noqa: D102

    def is_finished(self) -> bool:
        """Return whether an earlier preparation wrote it from the same source."""


Planned = TypeVar("Planned", bound=PlannedShard)


def digest(described: Any) -> str:
    """Return 32 characters that depend on a JSON value."""
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()


def clear_unfinished(work: Path, planned: Sequence[Planned]) -> list[Planned]:
    """Remove from the folders in `work` all but finished shards; returns those that are to be written."""
    finished = [shard for shard in planned if shard.is_finished()]
    kept = {path for shard in finished for path in (shard.path, shard.rows)}
    for path in work.glob("*/*"):
        if path not in kept:
            path.unlink()
    if finished:
        print(f"{len(finished)} of {len(planned)} shards are finished already", flush=True)
    return [shard for shard in planned if shard.path not in kept]


def save_rows(path: Path, rows: np.ndarray) -> None:
    """Save the rows of a finished shard; the file appears whole or not at all."""
    draft = path.with_name(f"draft-{path.name}")
    np.save(draft, rows, allow_pickle=False)
    os.replace(draft, path)


def check_free_space(work: Path, num_bytes: int) -> None:
    """Raise UserError when the disk lacks room for what is still to be written."""
    free = shutil.disk_usage(work).free
    if free < num_bytes:
        raise UserError(
            f"needs {num_bytes / GIB:.2f} GiB, but the disk has {free / GIB:.2f} GiB free",
            where=str(work.parent),
            hint="choose another folder with --set data.directory=DIR",
        )


def check_md5(path: Path, expected: str, *, hint: str) -> None:
    """Raise UserError, which names both sums, unless a file has this MD5."""
    print(f"checking the MD5 of {path.name}, {path.stat().st_size / 1e9:.1f} GB", flush=True)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise UserError(f"MD5 {found}, expected {expected}", where=str(path), hint=hint)


class Progress:
    """Prints what is done, how fast, and the time left: redrawn on a terminal, else a line now and then."""

    def __init__(self, *, num_items: int, num_bytes: int, items: str) -> None:
        """Take how much there is to do; `num_bytes` tell the time left, `items` names what is counted."""
        self.total_items, self.total_bytes, self.items = num_items, num_bytes, items
        self.num_items = self.num_bytes = 0
        self.started = self.printed_at = time.monotonic()
        self.redraws = sys.stdout.isatty()

    def add(self, num_items: int, num_bytes: int) -> None:
        """Count what has been done."""
        self.num_items += num_items
        self.num_bytes += num_bytes
        now, is_last = time.monotonic(), self.num_items == self.total_items
        if is_last or now - self.printed_at >= (1 if self.redraws else PRINT_EVERY_S):
            self.printed_at = now
            seconds = max(now - self.started, 1e-9)
            left_s = (self.total_bytes - self.num_bytes) / max(self.num_bytes, 1) * seconds
            text = (
                f"{self.num_items:,} of {self.total_items:,} {self.items}, {self.num_items / seconds:,.0f} "
                f"{self.items}/s, {self.num_bytes / seconds / 1e6:,.0f} MB/s, {left_s / 60:,.1f} min left"
            )
            print(text.ljust(79), end="\r" if self.redraws and not is_last else "\n", flush=True)
