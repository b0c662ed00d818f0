"""Unpack an untrusted .tar.gz: regular files only, below one folder, within limits; the rest is refused.

Limits hold before anything is read: a header says how long a name or a file is.
"""

import errno
import gzip
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from common.errors import UserError
from common.evidence.log import MAX_BYTES, MAX_PROBLEMS
from common.evidence.records import printable
from common.files import FULL

MAX_MEMBERS = 100_000
MAX_TOTAL_BYTES = 2 * 2**30  # of all members, those too that stay packed
MAX_NAME_BYTES = 64 * 2**10  # of a long name or of other extra headers
MAX_END_BYTES = 2**20  # after the last member; tar fills its last block of 10 KiB
GZIP = b"\x1f\x8b"
DISK_FAULTS = (*FULL, errno.EIO)  # of the temporary folder, not of the archive
WANTED = (".txt", ".json", ".jsonl")  # logs, seals and descriptions; code stays packed


class Member(tarfile.TarInfo):
    """A header whose extra headers are short: tarfile reads them whole into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and not self.isdir() and self.size > MAX_NAME_BYTES:
            raise ValueError(f"a header of more than {MAX_NAME_BYTES // 2**10} KiB")
        return cast(tarfile.TarInfo, super()._proc_member(archive))  # type: ignore[misc]


@contextmanager
def unpack_archive(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a temporary folder with the logs and descriptions of an archive, and the refused members.

    Raises: UserError for a file that is no archive, or a damaged one, and for a full disk.
    """
    with tempfile.TemporaryDirectory() as name:
        try:
            with _opened(path) as stream:
                refused = _unpack(stream, Path(name))
        except RecursionError:
            raise UserError("not a readable archive: headers without end", where=str(path)) from None
        except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
            raise UserError(f"not a readable archive: {printable(str(error))}", where=str(path)) from error
        if (num_more := len(refused) - MAX_PROBLEMS) > 0:
            refused[MAX_PROBLEMS:] = [f"{num_more} more members are refused"]
        yield Path(name), refused


def _opened(path: Path) -> IO[bytes]:
    """Open a tar, through gzip if it is packed; other packings are not read."""
    with path.open("rb") as stream:
        is_packed = stream.read(len(GZIP)) == GZIP
    return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")


def _unpack(stream: IO[bytes], folder: Path) -> list[str]:
    """Write the wanted members; return a line for each that is refused, and for the end of the reading."""
    refused: list[str] = []
    seen: set[PurePosixPath] = set()
    num_members = 0
    with tarfile.open(fileobj=stream, mode="r:", tarinfo=Member) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would hold every header
            num_members += 1
            if num_members > MAX_MEMBERS:
                return [*refused, f"more than {MAX_MEMBERS} members"]
            if member.offset_data + member.size > MAX_TOTAL_BYTES:
                return [*refused, f"more than {MAX_TOTAL_BYTES // 2**30} GiB"]
            name = PurePosixPath(member.name)
            why = _refusal(member, name, seen)
            seen.add(name)
            if not why and member.isfile() and name.suffix in WANTED:
                why = _write(archive, member, folder / name)
            if why:
                refused.append(f"{printable(member.name, 100)} {why}")
    if len(stream.read(MAX_END_BYTES + 1)) > MAX_END_BYTES:  # to the end, where gzip has its checksum
        raise ValueError("bytes follow the last member")
    return refused


def _refusal(member: tarfile.TarInfo, name: PurePosixPath, seen: Container[PurePosixPath]) -> str:
    """Return why a member is not unpacked, or ''.

    This refuses more than tarfile's filter `data`, which keeps links inside the folder and members that stand
    twice, and strips the first slash of an absolute name.
    """
    if not member.isfile() and not member.isdir():
        return "is a link or a device"
    if name.is_absolute() or ".." in name.parts or "\0" in member.name:
        return "lies outside the archive"
    if member.isfile() and name.suffix in WANTED and member.size > MAX_BYTES:
        return f"is larger than {MAX_BYTES // 2**20} MiB"
    return "stands twice" if member.isfile() and name in seen else ""


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> str:
    """Write a member's bytes, and nothing else of it; return why not. Raises UserError for a full disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with cast(IO[bytes], archive.extractfile(member)) as source, path.open("xb") as target:
            shutil.copyfileobj(source, target)
    except OSError as error:
        if error.errno in DISK_FAULTS:
            what, where = f"cannot unpack ({error.strerror})", tempfile.gettempdir()
            raise UserError(what, where=where, hint="TMPDIR names another folder") from error
        return f"cannot be written ({error.strerror})"
    return ""
