"""The address of a time-stamp authority, and the process (anchor.py) that asks it while a command runs."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import UserError
from common.evidence.sealed.anchors import ANCHORS
from common.evidence.sealed.seal import SEAL, Started, read_sealed
from common.processes import Exit, Processes
from common.repository import MODULE, WORKSPACE, install_hint
from common.run.sealing.anchor import write_failures

LIMIT_S = 10.0  # for a reply; at the end of a command in all, however many are missing
GRACE_S = 1.0  # of that, for the process to write down what is missing


def authority(url: str) -> str:
    """The `type` of the option: an http or https address without a login. Raises UserError."""
    hint = "give the address of a time-stamp authority, such as http://timestamp.digicert.com"
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError("is no http or https address", where="--anchor", hint=hint)
    if "@" in parts.netloc:
        raise UserError("no login may stand in the address", where="--anchor", hint=hint)
    if importlib.util.find_spec("rfc3161_client") is None:
        raise UserError("rfc3161-client is not installed", where="--anchor", hint=install_hint("anchor"))
    return url


class Anchoring:
    """The pipe to the process; what it cannot take is lost, and no run waits for it."""

    def __init__(self, processes: Processes | None = None) -> None:
        self.processes = processes
        self.files: dict[Path, None] = {}

    def stamp_seal(self, folder: Path) -> None:
        """Let the seal of a folder be stamped, unless it is, or is too late: a run was started."""
        sealed = read_sealed(folder) if self.processes else None
        has_started = sealed is None or any(isinstance(event, Started) for _, event in sealed.events)
        if not has_started and not has_reply(folder / ANCHORS, SEAL):
            self.stamp(folder / SEAL)

    def watch(self, log: Path) -> None:
        """Let a log that has no record yet be stamped while it is written."""
        self.files[log] = None
        self.order(watch=str(log), since=str(time.monotonic()))

    def stamp(self, file: Path) -> None:
        self.files[file] = None
        self.order(stamp=str(file))

    def order(self, **words: str) -> None:
        if self.processes:
            pipe = self.processes.processes[0].stdin
            assert pipe
            with suppress(OSError):  # it has died, or hangs
                os.write(pipe.fileno(), json.dumps(words).encode() + b"\n")

    def end(self, limit_s: float) -> None:
        """Wait for the last replies, and write down in the place of a process that has died or hangs."""
        assert self.processes
        try:
            self.order(end="")
            self.processes.wait(max(limit_s - GRACE_S, 0))
        finally:  # also where a signal ends the wait
            self.processes.end(grace_s=GRACE_S)
        if self.processes.wait(0) != Exit(0, 0):
            failure = "the process that asks the authority ended"
            print(f"  warning: {failure}; the runs went on without time-stamps", file=sys.stderr)
            write_failures(self.files, failure)


def has_reply(path: Path, of: str) -> bool:
    """True if a file of anchors holds a reply for a whole file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return False
    return any(b'"reply"' in line and f'"of":"{of}"'.encode() in line for line in lines)


@contextmanager
def anchoring(url: str | None, limit_s: float = LIMIT_S) -> Iterator[Anchoring]:
    """Stamp what the block names, nothing without an address; at its end wait for the last replies."""
    if not url:
        yield Anchoring()
        return
    arguments = [*MODULE, "common.run.sealing.anchor"]
    with Processes(arguments, [{}], cwd=WORKSPACE, stdin=subprocess.PIPE) as processes:
        pipe = processes.processes[0].stdin
        assert pipe
        with pipe:
            os.set_blocking(pipe.fileno(), False)
            anchors = Anchoring(processes)
            anchors.order(url=url, limit_s=str(limit_s))
            try:
                yield anchors
            finally:
                anchors.end(limit_s)
