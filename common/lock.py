"""A lock that one process holds at a time, and that ends with it, however it ends."""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path, doing: str) -> Iterator[bool]:
    """Hold the lock that a file stands for; yields whether another process held it, which was waited for.

    `doing` says in a line what that process does. The file goes with the lock. Where the file system has no
    locks, a line says so, and the block runs without one.
    """
    has_waited = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            has_waited = acquire(descriptor, path, "" if has_waited else doing) or has_waited
            if not is_file_of(descriptor, path):
                continue  # the process that held it has removed it
            try:
                yield has_waited
            finally:
                if is_file_of(descriptor, path):
                    path.unlink()
            return
        finally:
            os.close(descriptor)


def acquire(descriptor: int, path: Path, doing: str) -> bool:
    """Lock an open file and write this process's id into it; returns whether another held the lock.

    The line that says so is left out where `doing` is empty.
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
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return has_waited


def is_file_of(descriptor: int, path: Path) -> bool:
    """Return whether a path names the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
