"""The only writer of :::MLLOG lines.

It refuses records in an order that MLPerf's rules forbid, and values that JSON cannot hold. Each record
carries the hash of the one before (common/evidence/sealed/chain.py).
"""

import hashlib
import logging
import math
import os
import re
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mlperf_logging.mllog.mllog import MLLogger

from common.errors import UserError
from common.evidence.sealed.chain import PREVIOUS, RECORD, last_block
from common.files import explain_os_error, is_file_of, synchronize
from common.repository import ROOT, hide_folders

TOKEN = ":::MLLOG"
RECORDS = {  # key -> (states it may be written in, state afterwards); None: the state stays
    "cache_clear": (("new",), "cleared"),
    "init_start": (("cleared",), "init"),
    "init_stop": (("init",), "initialized"),
    "run_start": (("initialized",), "run"),
    "block_start": (("run",), "block"),
    "epoch_start": (("block",), "epoch"),
    "epoch_stop": (("epoch",), "block"),
    "block_stop": (("block",), "run"),
    "eval_start": (("run",), "eval"),
    "eval_stop": (("eval",), "evaluated"),
    "eval_accuracy": (("evaluated",), "run"),
    "checkpoint": (("block", "epoch"), None),
    "checkpoint_failed": (("block", "epoch"), None),
    "resumed": (("block", "epoch"), None),
    "threads_lowered": (("block", "epoch"), None),
    "run_stop": (("run", "block", "epoch", "eval", "evaluated"), "stopped"),
}
FACT_STATES = ("init", "run", "block")  # any other key is a fact, allowed while these last
ONCE = ("seed", "train_samples", "eval_samples")


class Lines(logging.FileHandler):
    """A log file that raises its first error, and again for every later line; `logging` would only print it.

    MLPerf's logger catches the error and writes a line about it instead: that line raises the error again.
    `chain` is the SHA-256 of the file from its last record on, also of text from before this handler.
    """

    def __init__(self, path: Path) -> None:
        self.chain = hashlib.sha256(last_block(path.read_bytes()) if path.is_file() else b"")
        super().__init__(path, encoding="ascii")
        self.fault: UserError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. Raises UserError, also for the fault of an earlier line."""
        if self.fault:
            raise self.fault
        super().emit(record)
        line = f"{self.format(record)}{self.terminator}".encode("ascii")
        if RECORD in line:
            self.chain = hashlib.sha256(line)
        else:
            self.chain.update(line)

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise UserError for a disk that is full or gone."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            raise
        self.fault = UserError(f"cannot write the log ({error.strerror})", where=Path(self.baseFilename).name)
        raise self.fault from error


class LogOrderError(RuntimeError):
    """A record at a place, or with a value, that the rules do not allow: a bug in the caller."""


class RunLog:
    """The log of one run, appended to a result file that `launch` has reserved with its head.

    Every record is flushed before the call returns, and with run_stop the disk has all of them. Source:
    MLPerf Training rules 2.0.0 and 2.1.0.
    """

    def __init__(self, path: Path, *, state: str = "new") -> None:
        self.state, self.seen = state, set[str]()
        logger = logging.Logger(f"run {path}")  # not registered: nothing else can write to it or echo it
        self.handler = Lines(path)
        logger.addHandler(self.handler)
        self.logger = MLLogger(logger, root_dir=re.escape(str(ROOT)), default_stack_offset=3)

    def start(self, key: str, *, time_ms: int | None = None, **metadata: Any) -> None:
        """Open an interval, now or at `time_ms`."""
        self._write(partial(self.logger.start, time_ms=time_ms), key, None, metadata)

    def stop(self, key: str, *, time_ms: int | None = None, **metadata: Any) -> None:
        """Close an interval, now or at `time_ms`."""
        self._write(partial(self.logger.end, time_ms=time_ms), key, None, metadata)

    def event(self, key: str, value: Any, **metadata: Any) -> None:
        self._write(self.logger.event, key, value, metadata)

    def check_file(self) -> None:
        """Raise UserError where somebody removed or replaced the file: its lines would be lost."""
        path = Path(self.handler.baseFilename)
        if not is_file_of(self.handler.stream.fileno(), path):  # type: ignore[union-attr]
            raise UserError("was removed or replaced while it was written", where=path.name)

    def close(self) -> None:
        with suppress(OSError):  # a line that could not be written was an error when it was written
            self.handler.close()

    def _write(self, write: Any, key: str, value: Any, metadata: dict[str, Any]) -> None:
        allowed, following = RECORDS.get(key, (FACT_STATES, None))
        if self.state not in allowed:
            raise LogOrderError(
                f"'{key}' cannot follow in state '{self.state}'; allowed in {', '.join(allowed)}"
            )
        if key in ONCE and key in self.seen:
            raise LogOrderError(f"'{key}' was written already")
        for name, content in {"value": value, **metadata}.items():
            if not is_plain(content):
                raise LogOrderError(f"'{key}': {name} is {content!r}, not a finite plain Python value")
        self.seen.add(key)
        self.state = following or self.state
        write(
            key,
            make_public(value),
            metadata={name: make_public(content) for name, content in metadata.items()}
            | {PREVIOUS: self.handler.chain.hexdigest()},
        )
        if key == "run_stop":
            self._synchronize()

    def _synchronize(self) -> None:
        """Wait until a finished run is on the disk: a power cut must not take it."""
        path = Path(self.handler.baseFilename)
        if path.is_file():  # other ranks write to the null device
            with explain_os_error("the disk may not hold the log", path.name):
                synchronize(path)
                synchronize(path.parent)


def is_plain(value: Any) -> bool:
    """True if a value is written unchanged: the library drops what JSON lacks, and NaN is not JSON."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(content) for key, content in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def make_public(value: Any) -> Any:
    return hide_folders(value) if isinstance(value, str) else value


def abort(path: Path, **metadata: Any) -> bool:
    """Close the log of a run whose process is gone with `run_stop status=aborted`.

    Returns False, and writes nothing, when the clock had not been started or was stopped already.
    """
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]  # without the line that was cut when the process died
    text = whole.decode("ascii", errors="replace")
    keys = re.findall(rf'{TOKEN} .*?"key": "(run_start|run_stop)"', text)
    if keys != ["run_start"]:
        return False
    if whole != content:
        os.truncate(path, len(whole))
    log = RunLog(path, state="run")
    log.stop("run_stop", status="aborted", **metadata)
    log.close()
    return True
