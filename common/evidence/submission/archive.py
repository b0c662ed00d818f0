"""Unpack an untrusted .tar.gz: regular files only, below one folder, within limits; the rest is a Problem.

Limits hold before anything is read: a header says how long a name or a file is.
"""

import gzip
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from common.errors import UserError
from common.evidence.log import MAX_BYTES, MAX_PROBLEMS
from common.evidence.records import Problem, printable

SUFFIXES = (".tar.gz", ".tgz", ".tar")
MAX_MEMBERS = 100_000
MAX_TOTAL_BYTES = 2 * 2**30  # of all members, those too that stay packed
MAX_NAME_BYTES = 64 * 2**10  # of a long name or of other extra headers
MAX_END_BYTES = 2**20  # after the last member; tar fills its last block of 10 KiB
GZIP = b"\x1f\x8b"
WANTED = (".txt", ".json")  # logs and descriptions; code stays packed


def is_archive(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and path.is_file()


class Member(tarfile.TarInfo):
    """A header whose extra headers are short: tarfile reads them whole into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and not self.isdir() and self.size > MAX_NAME_BYTES:
            raise ValueError(f"a header of more than {MAX_NAME_BYTES // 2**10} KiB")
        return cast(tarfile.TarInfo, super()._proc_member(archive))  # type: ignore[misc]


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[Path, list[Problem]]]:
    """Give a folder, for the time being, with the logs and descriptions of an archive, and what was refused.

    Raises: UserError for a file that is no archive, or a damaged one.
    """
    with tempfile.TemporaryDirectory() as name:
        try:
            with _opened(path) as stream:
                problems = _shortened(_unpack(stream, Path(name)))
        except RecursionError:
            raise UserError("not a readable archive: headers without end", where=str(path)) from None
        except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
            raise UserError(f"not a readable archive: {printable(str(error))}", where=str(path)) from error
        yield Path(name), problems


def _opened(path: Path) -> IO[bytes]:
    """Open a tar, through gzip if it is packed; other packings are not read."""
    with path.open("rb") as stream:
        is_packed = stream.read(len(GZIP)) == GZIP
    return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")


def _unpack(stream: IO[bytes], folder: Path) -> list[Problem]:
    problems: list[Problem] = []
    seen: set[PurePosixPath] = set()
    num_members = 0
    with tarfile.open(fileobj=stream, mode="r:", tarinfo=Member) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would hold every header
            num_members += 1
            if num_members > MAX_MEMBERS:
                return [*problems, _problem(f"more than {MAX_MEMBERS} members")]
            if member.offset_data + member.size > MAX_TOTAL_BYTES:
                return [*problems, _problem(f"more than {MAX_TOTAL_BYTES // 2**30} GiB")]
            why, name = _refusal(member), PurePosixPath(member.name)
            if not why and member.isfile() and name in seen:
                why = "stands twice"
            seen.add(name)
            if not why and member.isfile() and name.suffix in WANTED:
                why = _write(archive, member, folder / name)
            if why:
                problems.append(_problem(f"{printable(member.name, 100)} {why}"))
    if len(stream.read(MAX_END_BYTES + 1)) > MAX_END_BYTES:  # to the end, where gzip has its checksum
        raise ValueError("bytes follow the last member")
    return problems


def _shortened(problems: list[Problem]) -> list[Problem]:
    if (num_more := len(problems) - MAX_PROBLEMS) <= 0:
        return problems
    return [*problems[:MAX_PROBLEMS], _problem(f"{num_more} more members are refused")]


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
