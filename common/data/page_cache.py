"""Drops the page cache before a run, so that data come from storage, as MLPerf's rules ask."""

import os
from pathlib import Path

from common.files import explain_os_error

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def drop(directory: Path, *, whole: bool) -> tuple[bool, str]:
    """Drop the pages of the files below `directory`, or with `whole` those of the whole machine.

    Returns whether that was done, and how or why not. A machine is a person's, or shared: all of its cache is
    dropped only when asked for. Raises UserError where that was asked for and is not allowed.
    """
    os.sync()
    if whole:
        hint = "be root, or leave it out: then the pages of the data set alone are dropped"
        with explain_os_error("not allowed here", "--drop-caches", hint=hint):
            DROP_CACHES.write_text("3")
        return True, "vm.drop_caches=3, the whole machine's, as asked"
    if not hasattr(os, "posix_fadvise"):
        return False, "no posix_fadvise on this system"
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True, f"posix_fadvise(DONTNEED) of the {len(files)} files of the data set"
