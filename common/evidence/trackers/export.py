"""Read the logs of runs, once or while they grow, and keep a tracker's store up to date."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from common.errors import UserError
from common.evidence.log import Log, read_log
from common.evidence.paths import find_sets
from common.evidence.records import counted
from common.evidence.text import duration
from common.evidence.trackers.store import Store
from common.evidence.trackers.tracked_run import RUNNING, TrackedRun, read_run

POLL_S = 2.0
QUIET_S = 20.0  # after the last run has ended: the next one of a set has its log within a few seconds
BROKEN_OFF_S = 86_400  # a log without run_stop that did not grow for a day is of a run that broke off


class Exporter:
    """Export of the runs below some paths to a store: once, and again whenever a log has grown.

    An incomplete last line is read when the rest of it is in the file.
    """

    def __init__(self, paths: Sequence[Path], store: Store, report: Callable[[str], None]) -> None:
        self.paths, self.store, self.report = paths, store, report
        self.stamps: dict[Path, tuple[int, int]] = {}  # the size and time of a file when it was read
        self.unended: set[Path] = set()
        self.runs: dict[str, TrackedRun] = {}
        self.logs: dict[str, str] = {}  # key of a run -> path of its log
        self.left_out: dict[str, str] = {}  # the path of a log -> why

    def export(self) -> bool:
        """Export new records; returns whether there were any. The first time, UserError without a run."""
        changed = self.read_changed()
        if changed:
            with self.store.hold():
                for log in changed:
                    self.export_log(log)
                self.store.flush()
        return bool(changed)

    def read_changed(self) -> list[Log]:
        """Return the logs that are new or have grown."""
        try:
            files = [file for folder in find_sets(self.paths).values() for file in folder]
        except UserError:
            if not self.stamps:
                raise
            files = []  # they were removed meanwhile
        changed = []
        for file in files:
            stamp = read_stamp(file)
            if stamp != self.stamps.get(file):
                self.stamps[file] = stamp  # taken before reading: lines written meanwhile are read next time
                log = read_log(file)
                (self.unended.discard if log.first("run_stop") else self.unended.add)(file)
                changed.append(log)
        self.unended &= set(files)
        return changed

    def export_log(self, log: Log) -> None:
        run = read_run(log)
        if run is None:
            problem = str(log.problems[0]) if log.problems else "its clock has not started"
            self.left_out[log.path] = problem
            return
        self.left_out.pop(log.path, None)
        if self.logs.setdefault(run.key, log.path) != log.path:
            self.left_out[log.path] = f"the same run as {self.logs[run.key]}"
            return
        self.store.update(run)
        self.runs[run.key] = run

    def has_runs_under_way(self) -> bool:
        """True if a log without run_stop has grown since yesterday."""
        oldest_ns = time.time_ns() - BROKEN_OFF_S * 10**9
        return any(self.stamps[file][1] > oldest_ns for file in self.unended)

    def follow(self) -> None:
        """Export again and again until every run has ended, and no log has changed for `QUIET_S`."""
        statuses = {key: run.status for key, run in self.runs.items() if run.status != RUNNING}
        changed_s = time.monotonic()
        while True:
            for key, run in self.runs.items():
                if statuses.get(key) != run.status:
                    self.report(describe(run))
                statuses[key] = run.status
            if self.has_runs_under_way():
                changed_s = time.monotonic()
            elif time.monotonic() - changed_s >= QUIET_S:
                return
            time.sleep(POLL_S)
            if self.export():
                changed_s = time.monotonic()


def read_stamp(file: Path) -> tuple[int, int]:
    """Look up the size and the time of change in ns; zeros for a file that is gone."""
    try:
        status = os.lstat(file)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def describe(run: TrackedRun) -> str:
    minutes = run.outcome.get("minutes_to_target")
    end = f", {duration(minutes, ' minutes')} to the target" if minutes else ""
    return f"{run.name}: {run.status}{end}"


def export_runs(paths: Sequence[Path], store: Store, *, follows: bool, report: Callable[[str], None]) -> int:
    """Export the runs below the paths, with `follows` while they are written; returns their number."""
    exporter = Exporter(paths, store, report)
    with closing(store):
        exporter.export()
        if follows:
            exporter.follow()
    for path, why in exporter.left_out.items():
        report(f"{path}: left out: {why}")
    sets = {run.set_name for run in exporter.runs.values()}
    report(f"{counted(len(exporter.runs), 'run')} of {counted(len(sets), 'set')} -> {store}")
    return len(exporter.runs)
