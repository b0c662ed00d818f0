"""Unpack an untrusted .tar.gz: regular files only, below one folder, within limits; the rest is a Problem."""

import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from common.errors import UserError
from common.evidence.log import MAX_BYTES
from common.evidence.records import Problem, printable

SUFFIXES = (".tar.gz", ".tgz", ".tar")
MAX_MEMBERS = 100_000
MAX_TOTAL_BYTES = 2 * 2**30
WANTED = (".txt", ".json")  # logs and descriptions; code stays packed


def is_archive(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and path.is_file()


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[Path, list[Problem]]]:
    """Give a folder, for the time being, with the logs and descriptions of an archive, and what was refused.

    Raises: UserError for a file that is no archive.
    """
    with tempfile.TemporaryDirectory() as name:
        try:
            with tarfile.open(path, "r:*") as archive:
                problems = _unpack(archive, Path(name))
        except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
            raise UserError(f"not a readable archive: {printable(str(error))}", where=str(path)) from error
        yield Path(name), problems


def _unpack(archive: tarfile.TarFile, folder: Path) -> list[Problem]:
    problems: list[Problem] = []
    seen: set[PurePosixPath] = set()
    total = 0
    for number, member in enumerate(archive):
        if number >= MAX_MEMBERS:
            problems.append(_problem(f"more than {MAX_MEMBERS} members"))
            break
        why, name = _refusal(member), PurePosixPath(member.name)
        if not why and member.isfile() and name in seen:
            why = "stands twice"
        seen.add(name)
        if not why and member.isfile() and name.suffix in WANTED:
            total += member.size
            if total > MAX_TOTAL_BYTES:
                problems.append(_problem(f"more than {MAX_TOTAL_BYTES // 2**30} GiB"))
                break
            why = _write(archive, member, folder / name)
        if why:
            problems.append(_problem(f"{printable(member.name, 100)} {why}"))
    return problems


def _refusal(member: tarfile.TarInfo) -> str:
    name = PurePosixPath(member.name)
    if not member.isfile() and not member.isdir():
        return "is a link or a device"
    if name.is_absolute() or ".." in name.parts or "\0" in member.name:
        return "lies outside the archive"
    if member.isfile() and name.suffix in WANTED and member.size > MAX_BYTES:
        return f"is larger than {MAX_BYTES // 2**20} MiB"
    return ""


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> str:
    """Write a member's bytes, and nothing else of it; return why not."""
    source = archive.extractfile(member)
    if source is None:
        return "has no content"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with source, path.open("xb") as target:
            shutil.copyfileobj(source, target)
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return ""


def _problem(text: str) -> Problem:
    return Problem("archive", 0, text)
