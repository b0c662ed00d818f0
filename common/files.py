"""Files that exist whole or not at all, whatever ends the process that writes them."""

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from common.errors import UserError

MAX_LOST_FOLDERS = 100  # that others remove before one file is created; more: it can never be created
FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or what one person may use of it
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems without locks


def draft_folder(path: Path) -> Path:
    """Return the hidden folder, on the same disk, in which a file is written before it is moved into place.

    It is a folder because libraries write drafts of their own beside the file that they are given.
    """
    return path.with_name(f".{path.name}.draft")


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """Let the block write a draft, which then replaces `path`; it is on the disk when this returns.

    After an error or a kill `path` is unchanged. The draft of a killed process is removed by the next call
    for `path`, or by `remove_draft`.
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


def let_folder_readers_read(path: Path) -> None:
    """Let those read a file who may enter its folder: safetensors gives its owner alone access."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text, and the folders above it where they are missing."""
    make_folder(path.parent)
    with write_whole(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_once(path: Path, make_text: Callable[[], str], doing: str) -> None:
    """Write a file of text unless it exists; of several processes at once, one writes it.

    The others wait, and print what it is `doing`.
    """
    if not path.exists():
        with locked(path.with_name(f".{path.name}.lock"), doing):
            if not path.exists():
                write_text(path, make_text())


def save_text(path: Path, text: str) -> None:
    """Write a file as `write_text` does, one process after another; UserError where it cannot be written."""
    lock = path.with_name(f".{path.name}.lock")
    with explain_os_error("cannot write", path), locked(lock, "writes this file"):
        write_text(path, text)


def to_json(values: object) -> str:
    return json.dumps(values, indent=1) + "\n"


def save_json(path: Path, values: object) -> None:
    """Write a file of JSON as `save_text` does."""
    save_text(path, to_json(values))


def save_with_picture(path: Path, figures: Any, picture: str) -> Iterator[Path]:
    """Write a dataclass as `path`.json and its picture as `path`.svg, each whole; yields their paths."""
    text = to_json(dataclasses.asdict(figures))
    for suffix, content in ((".json", text), (".svg", picture)):
        file = path.with_name(path.name + suffix)
        save_text(file, content)
        yield file


@contextmanager
def explain_os_error(what: str, where: Path | str, *, hint: str = "") -> Iterator[None]:
    """Raise UserError for an OSError in the block: `where`, `what`, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} ({error.strerror or error})", where=str(where), hint=hint) from error


@contextmanager
def undo_on_failure(undo: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Call `undo` where the block fails or is interrupted; if that fails too, the first error stays."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            undo(*arguments)
        raise


def existing_folder(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_folder(file: Path, where: str) -> None:
    """Raise UserError where a file that is written at the end of a measurement has no folder, or is one."""
    if not file.absolute().parent.is_dir():
        raise UserError("no such folder", where=f"{where} {file}")
    if file.is_dir():
        raise UserError("is a folder", where=f"{where} {file}", hint="name a file in it")


def make_folder(path: Path) -> list[Path]:
    """Make a folder, and those above it that are missing; the disk has their names when this returns.

    Returns the folders that were missing, the innermost first.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        synchronize(folder.parent)
    return missing


def check_writable(folder: Path) -> None:
    """Make a folder and a file in it that has no name; OSError, before time is spent, where that fails."""
    make_folder(folder)
    tempfile.TemporaryFile(dir=folder).close()


def remove_draft(path: Path) -> None:
    if draft_folder(path).exists():
        shutil.rmtree(draft_folder(path))


def synchronize(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_whole(path: Path, data: bytes, *, is_synchronized: bool = False) -> None:
    """Append bytes to a file, all or none; with `is_synchronized` the disk has them then. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "ab", buffering=0) as file:
        num_bytes_before = os.fstat(descriptor).st_size
        with undo_on_failure(os.ftruncate, descriptor, num_bytes_before):
            write_all(file, data)
            if is_synchronized:
                os.fsync(descriptor)


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write to an unbuffered file; raises the error of a disk that is full, or of a quota or limit."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, doing: str) -> Iterator[bool]:
    """Hold the lock that a file stands for; yields whether another process held it first.

    `doing` says in a line what that process does. The file is removed with the lock, and so are the folders
    above it that were missing, if the block leaves them empty. A file system without locks gets a warning,
    and the block runs without one.
    """
    has_waited, missing, num_lost = False, [], 0
    while True:
        missing += make_folder(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            num_lost += 1
            if num_lost < MAX_LOST_FOLDERS:
                continue  # the process that held a lock there has removed the empty folder
            raise
        try:
            has_waited = acquire(descriptor, path, "" if has_waited else doing) or has_waited
            if not is_file_of(descriptor, path):
                continue  # the process that held it has removed it
            try:
                yield has_waited
            finally:
                if is_file_of(descriptor, path):
                    path.unlink()
                    with suppress(OSError):  # not empty
                        for folder in missing:
                            folder.rmdir()
            return
        finally:
            os.close(descriptor)


def acquire(descriptor: int, path: Path, doing: str) -> bool:
    """Lock an open file and write this process's id into it; returns whether another process held the lock.

    An empty `doing` prints nothing while it waits.
    """
    has_waited = False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace") or "another one"
            if doing:
                print(f"waiting for process {holder}, which {doing}", flush=True)
            has_waited = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        what = f"no locks on this file system ({error.strerror}); see that no other process {doing}"
        print(f"warning: {path.parent}: {what}", file=sys.stderr)
    with suppress(OSError):  # a full disk holds the lock without the id, which only a message needs
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return has_waited


def hold_lock(path: Path) -> IO[bytes]:
    """Lock an existing file until the returned one is closed; does nothing where locks are unsupported."""
    file = path.open("r+b")
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder of temporary files for the block; removes those that killed processes have left."""
    for lock in Path(tempfile.gettempdir()).glob("ttt-*/.running"):
        if not is_locked(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="ttt-", ignore_cleanup_errors=True) as name:
        draft = Path(name, "locked")
        draft.touch()
        with hold_lock(draft):
            draft.rename(draft.with_name(".running"))  # no other start ever sees it without its lock
            yield Path(name)


def is_locked(path: Path) -> bool:
    """True if another process holds the lock of a file, or nobody can lock it."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def create_next(directory: Path, pattern: str, number: int = 0) -> Path:
    """Create the first file of `pattern`, such as result_{}.txt from `number`, that does not exist."""
    while True:
        path = directory / pattern.format(number)
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
        else:
            return path
