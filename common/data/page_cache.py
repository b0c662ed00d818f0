"""Drops the page cache before a run, so that data come from storage, as MLPerf's rules ask."""

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

from common.files import explain_os_error
from common.processes import LIBC

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
NUM_CHECKED = 200  # files, about
MAX_CACHED_SHARE = 0.1  # the kernel drops no page that it is handling; seen: 4 of 200
MOUNTS = Path("/proc/self/mountinfo")


def drop(directory: Path, *, whole: bool) -> tuple[bool, str]:
    """Drop the pages of the files below `directory`, or with `whole` those of the whole machine.

    Returns whether (nearly) none of them is left in memory, and how they were dropped or why not. The cache
    of the whole machine is dropped on request only, because other people and programs use it; UserError where
    that is not allowed.
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
    checked = files[:: len(files) // NUM_CHECKED + 1]
    num_cached = sum(map(is_cached, checked))
    if num_cached <= MAX_CACHED_SHARE * len(checked):
        return True, how
    return False, f"{num_cached} of {len(checked)} files looked at stay in memory, after {how}"


def in_memory(directory: Path) -> bool:
    """True for a folder of a tmpfs, whose pages cannot be dropped."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    return any(mount[2] == number and mount[mount.index("-") + 1] == "tmpfs" for mount in mounts)


def is_cached(path: Path) -> bool:
    """True if the page in the middle of a file is in memory.

    mincore(2) tells without reading. It says yes of every file that the caller neither has written nor may
    write, so a read that must not wait decides then: on a fast disk it may say yes wrongly, because it starts
    a read. False where the file system cannot tell, such as one of a network.
    """
    if not (num_bytes := path.stat().st_size):
        return False
    middle = num_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    with path.open("rb") as file, suppress(OSError):  # BlockingIOError: not in memory
        if not is_resident(file.fileno(), middle):
            return False
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else it reads ahead
        return bool(os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT))
    return False


def is_resident(file: int, offset: int) -> bool:
    """Ask mincore(2) whether the page at `offset` of an open file is in memory."""
    answer = ctypes.c_ubyte()
    with mmap.mmap(file, 1, flags=mmap.MAP_PRIVATE, offset=offset) as page:  # writable: ctypes asks for that
        byte = ctypes.c_char.from_buffer(page)
        address = ctypes.c_void_p(ctypes.addressof(byte))
        failed = LIBC.mincore(address, ctypes.c_size_t(1), ctypes.byref(answer)) if LIBC else -1
        del byte  # else the page cannot be closed
    return not failed and bool(answer.value & 1)
