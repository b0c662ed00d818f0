"""Files that are there whole or not at all, whatever ends their writer."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def draft_folder(path: Path) -> Path:
    """Return the hidden folder, on the same disk, in which a file is written before it takes its place.

    A folder: libraries write drafts of their own beside the file that they are given.
    """
    return path.with_name(f".{path.name}.draft")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Let the block write a draft, which then takes the place of `path`; the disk has it when this returns.

    An error leaves what `path` held. So does a kill, and what it leaves beside it is removed by the next
    writing of `path`, or by `remove_draft`.
    """
    remove_draft(path)
    draft = draft_folder(path) / path.name
    draft.parent.mkdir()
    try:
        yield draft
        synchronize(draft)
        os.replace(draft, path)
        synchronize(path.parent)
    finally:
        remove_draft(path)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text, and the folders above it where they are missing."""
    make_folder(path.parent)
    with written_whole(path) as draft:
        draft.write_text(text, encoding="utf-8")


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing; the disk has their names when this returns."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        synchronize(folder.parent)


def remove_draft(path: Path) -> None:
    """Remove what an ended writer of `path` has left."""
    if draft_folder(path).exists():
        shutil.rmtree(draft_folder(path))


def synchronize(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
