"""Drops the page cache before a run, so that data come from storage, as MLPerf's rules ask."""

import os
from contextlib import suppress
from pathlib import Path

from common.files import explain_os_error

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
NUM_LOOKED_AT = 200  # files, about
CHANCE = 0.1  # of them may stay: the kernel drops no page that it is handling; seen: 4 of 200
MOUNTS = Path("/proc/self/mountinfo")


def drop(directory: Path, *, whole: bool) -> tuple[bool, str]:
    """Drop the pages of the files below `directory`, or with `whole` those of the whole machine.

    Returns whether nothing of them is seen to be left in memory, and how that was done or why not. A machine
    is a person's, or shared: all of its cache is dropped only when asked for. Raises UserError where that was
    asked for and is not allowed.
    """
    os.sync()
    if whole:
        hint = "be root, or leave it out: then the pages of the data set alone are dropped"
        with explain_os_error("not allowed here", "--drop-caches", hint=hint):
            DROP_CACHES.write_text("3")
    if in_memory(directory):
        return False, f"{directory.name} lies in a file system in memory"
    if whole:
        return True, "vm.drop_caches=3, the whole machine's, as asked"
    if not hasattr(os, "posix_fadvise"):
        return False, "no posix_fadvise on this system"
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    how = f"posix_fadvise(DONTNEED) of the {len(files)} files of the data set"
    looked_at = files[:: len(files) // NUM_LOOKED_AT + 1]
    num_kept = sum(map(is_kept, looked_at))
    if num_kept <= CHANCE * len(looked_at):
        return True, how
    return False, f"{num_kept} of {len(looked_at)} files looked at stay in memory, after {how}"


def in_memory(directory: Path) -> bool:
    """True for a folder of a tmpfs, of which nothing can be dropped."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    return any(mount[2] == number and mount[mount.index("-") + 1] == "tmpfs" for mount in mounts)


def is_kept(path: Path) -> bool:
    """True if the byte in the middle of a file is read without waiting for storage.

    False, too, where the file system cannot tell, as that of a network. A look reads one page into memory.
    """
    if not (num_bytes := path.stat().st_size):
        return False
    with path.open("rb") as file, suppress(OSError):  # BlockingIOError: not in memory
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else it reads ahead
        return bool(os.preadv(file.fileno(), [bytearray(1)], num_bytes // 2, os.RWF_NOWAIT))
    return False
