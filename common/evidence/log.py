"""Read result logs: bytes in, a frozen `Log` out, and the run sets that they form."""

import gc
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

from common.evidence.paths import STUDY, absolute, find_sets, label
from common.evidence.records import (
    LOOKALIKE,
    TOKEN,
    Event,
    Problem,
    finite,
    parse_records,
    printable,
    read_bytes,
)
from common.evidence.sealed.chain import Chain, is_chained, read_chain
from common.repository import systems_beside

TARGETS = {"resnet": 0.759, "bert": 0.72}  # training_rules, benchmark table
QUALITIES = {"resnet": "top-1 accuracy", "bert": "masked-LM accuracy"}
NUM_RUNS = {"resnet": 5, "bert": 10}  # of an official run set (training_rules, Benchmark Results)
IMAGENET_SAMPLES = 1281167  # one epoch of resnet; foreign logs count epochs only
MAX_BYTES = 16 * 2**20  # published logs: up to 2.1 MB
MAX_LINES = 100_000  # published logs: up to 30,944
MAX_EVALUATIONS = 10_000  # published logs: up to 28; rules and checkers compare each with many
MAX_PROBLEMS = 100  # of one file
MAX_OF_A_KEY = 100
MAX_DRIFT_MS = 1000  # that a wall clock may be set by in a run: NTP steps by 128 or more
RARELY = 10**6  # allocations between two garbage collections; records have no cycles
FEW_BYTES = 32 * 2**20  # that one process reads; starting others takes longer
CURVE = ("eval_accuracy", "train_loss", "eval_start", "eval_stop", "throughput", "machine_load")
Read = TypeVar("Read")
ABORTED = ("aborted", "abort")  # the words of run_stop for a run that missed its target; logs have both


class Point(NamedTuple):
    """One evaluation: minutes since run_start, samples consumed (None if not logged), accuracy in [0, 1)."""

    minutes: float
    samples: float | None
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Log:
    """One result file. `path` is a label; `folders` = (system, benchmark) where the file lies in results/."""

    path: str
    file: Path | None = field(default=None, repr=False)  # None for bytes that were not read from one
    folders: tuple[str, str] = ("", "")
    records: tuple[Event, ...] = ()
    problems: tuple[Problem, ...] = ()
    preamble: tuple[str, ...] = field(default=(), repr=False)  # the comment lines before the first record
    chain: Chain | None = None  # None if no record carries a hash of the bytes before it

    @cached_property
    def by_key(self) -> Mapping[str, Sequence[Event]]:
        """The records of each key, in file order."""
        events: dict[str, list[Event]] = {}
        for event in self.records:
            events.setdefault(event.key, []).append(event)
        return events

    @cached_property
    def times(self) -> list[int]:
        """`time_ms` of each record, in file order."""
        return [event.time_ms for event in self.records]

    @cached_property
    def is_in_order(self) -> bool:
        """True if no record is stamped earlier than the record above it."""
        return all(map(operator.le, self.times, islice(self.times, 1, None)))

    def events(self, *keys: str) -> Sequence[Event]:
        """Return the records of these keys, in file order."""
        if len(keys) == 1:
            return self.by_key.get(keys[0], ())
        return sorted((e for key in keys for e in self.by_key.get(key, ())), key=lambda event: event.line)

    def first(self, key: str) -> Event | None:
        return next(iter(self.by_key.get(key, ())), None)

    def last(self, key: str) -> Event | None:
        return next(reversed(self.by_key.get(key, ())), None)

    def brief(self) -> "Log":
        """Return the log with at most `MAX_OF_A_KEY` records of a key that neither scores nor sets read."""
        some = [e for key in self.by_key for e in self.by_key[key][: None if key in CURVE else MAX_OF_A_KEY]]
        return replace(self, records=tuple(sorted(some, key=lambda event: event.line)))

    def value(self, key: str) -> object:
        """Return the value of the first record of `key`; None without one."""
        event = self.first(key)
        return event.value if event else None

    def text(self, key: str) -> str:
        """Return the value of `key`, safe to show; '' without one."""
        value = self.value(key)
        return "" if value is None else printable(value, 64)

    @property
    def status(self) -> object:
        """The status in run_stop; None without one."""
        stop = self.last("run_stop")
        return stop.metadata.get("status") if stop else None

    def stopped(self, name: str) -> float | None:
        """Return a number that run_stop states; None without one."""
        stop = self.last("run_stop")
        return stop.number(name) if stop else None

    @property
    def is_readable(self) -> bool:
        return bool(self.records)

    @cached_property
    def is_ours(self) -> bool:
        """True if the log states anything that this suite alone writes; it is held to stricter rules."""
        is_recorded = self.first("configuration_name") or self.first("benchmark_size")
        return is_recorded is not None or bool(self.header("configuration"))

    @property
    def is_closed(self) -> bool:
        """True if the run says that it keeps the rules of the closed division."""
        return self.value("submission_division") == "closed"

    @property
    def is_study(self) -> bool:
        """True if the run trains to the end of its budget, past the target, and so has no score."""
        return self.value("stop_at_target") is False

    @property
    def lies_in_study(self) -> bool:
        """True if the file is results/study/<study>/<system>/<benchmark>/result_N.txt."""
        return self.file is not None and self.file.parts[-5:-4] == (STUDY,)

    @property
    def is_resumed(self) -> bool:
        """True if the run was interrupted and went on from a checkpoint."""
        return self.first("resumed") is not None

    @cached_property
    def benchmark(self) -> str:
        """`resnet`, `bert`, or '' for anything else: by the folder, else by the log."""
        name = self.folders[1] or self.value("submission_benchmark")
        return name if isinstance(name, str) and name in TARGETS else ""

    @cached_property
    def is_proxy(self) -> bool:
        """True if the size is mini, or unknown; a log that states no size is a full one (foreign logs)."""
        return self.value("benchmark_size") not in (None, "full")

    @property
    def system(self) -> str:
        return self.folders[0] or self.text("submission_platform")

    @property
    def configuration(self) -> str:
        """The configuration's name; in foreign logs the part of the system id behind the last hyphen."""
        return self.text("configuration_name") or self.system.rpartition("-")[2]

    @cached_property
    def target(self) -> float:
        """The quality that ends the run. A full-size log cannot lower it; infinite if there is none."""
        logged, official = finite(self.value("quality_target")), TARGETS.get(self.benchmark)
        if self.is_proxy:
            return math.inf if logged is None else logged
        return max((t for t in (logged, official) if t is not None), default=math.inf)

    @cached_property
    def minutes(self) -> float | None:
        """run_start to run_stop; None unless there is exactly one of each, in this order."""
        starts, stops = self.events("run_start"), self.events("run_stop")
        if len(starts) != 1 or len(stops) != 1 or stops[0].time_ms <= starts[0].time_ms:
            return None
        return (stops[0].time_ms - starts[0].time_ms) / 60000

    @property
    def duration_s(self) -> float:
        """The seconds of the run by the monotonic clock, where the log has them; 0 without an end."""
        logged = self.stopped("duration_ms")
        return 60 * (self.minutes or 0) if logged is None else logged / 1000

    @cached_property
    def curve(self) -> tuple[Point, ...]:
        """Every evaluation with a usable accuracy, in file order."""
        start = self.first("run_start")
        if start is None:
            return ()
        return tuple(
            Point((event.time_ms - start.time_ms) / 60000, self.samples(event), accuracy)
            for event in self.events("eval_accuracy")
            if (accuracy := finite(event.value)) is not None and 0 <= accuracy < 1
        )

    @property
    def reached(self) -> Point | None:
        """The first evaluation at or above the target."""
        return next((point for point in self.curve if point.accuracy >= self.target), None)

    @property
    def is_converged(self) -> bool:
        """True if the run may be scored: status success, and the last accuracy reaches the target."""
        return self.status == "success" and bool(self.curve) and self.curve[-1].accuracy >= self.target

    @property
    def came_to_its_end(self) -> bool:
        """True if the run stopped by itself, as a success does; else run_stop has the reason of its end."""
        stop = self.last("run_stop")
        return stop is not None and (self.status == "success" or "reason" not in stop.metadata)

    @property
    def claims_no_success(self) -> bool:
        """True if the run was aborted, or has no run_stop."""
        return self.last("run_stop") is None or self.status in ABORTED

    @property
    def is_honest_miss(self) -> bool:
        """True if the run missed its target and claims no success."""
        return self.claims_no_success and len(self.events("run_start")) == 1 and self.reached is None

    def samples(self, event: Event) -> float | None:
        """Return the samples consumed: as logged, else from epoch_num (resnet: epochs, bert: samples)."""
        samples, epoch = event.number("samples"), event.number("epoch_num")
        if samples is not None or epoch is None:
            return samples
        return epoch * IMAGENET_SAMPLES if self.benchmark == "resnet" else epoch

    def header(self, name: str) -> str:
        """Return the preamble's `# name: value`; '' without one."""
        prefix = f"# {name}: "
        return next((line.removeprefix(prefix) for line in self.preamble if line.startswith(prefix)), "")

    @property
    def threads(self) -> int | None:
        """The threads of the CPU that the head states, where no GPU computes; None without a number.

        A run lowers the number beside other programs (rule T233).
        """
        asked = self.header("threads")
        is_number = re.fullmatch(r"[0-9]{1,6}", asked) and self.value("num_accelerators") == 0
        return int(asked) if is_number else None

    @property
    def settings(self) -> tuple[str, ...]:
        """The merged configuration, one YAML line each, from the preamble."""
        lines = dropwhile(lambda line: not line.startswith("# --- configuration"), self.preamble)
        block = takewhile(lambda line: not line.startswith("# ---"), islice(lines, 1, None))
        return tuple(line.removeprefix("#").removeprefix("   ") for line in block)


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """The runs of one configuration on one system: the logs of one folder, at least one.

    `systems` is the folder of system descriptions that the user named.
    """

    folder: str
    logs: tuple[Log, ...]
    systems: Path | None = None

    @property
    def readable(self) -> tuple[Log, ...]:
        return tuple(log for log in self.logs if log.is_readable)

    @property
    def lead(self) -> Log:
        """The log that names the set; rule S401 reports the logs that disagree."""
        return (self.readable or self.logs)[0]

    @property
    def is_proxy(self) -> bool:
        return any(log.is_proxy for log in self.logs)

    @property
    def hardware(self) -> str:
        """The system id without its configuration and the changes (`+key=value`) to that."""
        return re.sub(rf"-{re.escape(self.lead.configuration)}(\+.*)?$", "", self.lead.system)

    @property
    def systems_folder(self) -> Path | None:
        """The folder of system descriptions: as named or beside the results; None in no system's folder."""
        file = self.lead.file
        if not self.lead.folders[0]:
            return None
        if self.systems or file is None:
            return self.systems
        return systems_beside(file.parents[2])


def load(paths: Sequence[Path], *, systems: Path | None = None, is_brief: bool = False) -> list[RunSet]:
    """Read every result_*.txt below `paths` (a file is taken whatever its name), one run set per folder.

    System descriptions are in `systems`, else beside the results of each set. With `is_brief` logs hold what
    scores and sets need (`Log.brief`), and many are read by several processes.

    Raises: UserError for a path that does not exist, or when there is no log at all.
    """
    folders = find_sets(paths)
    files = [file for group in folders.values() for file in group]
    logs = iter(read_all(files, read_brief) if is_brief else map(read_log, files))
    return [
        RunSet(folder=label(folder), logs=tuple(islice(logs, len(group))), systems=systems)
        for folder, group in folders.items()
    ]


def read_all(files: Sequence[Path], read: Callable[[Path], Read]) -> Iterator[Read]:
    """Read files in order; many are read by one process per processor, so `read` must be picklable."""
    if sum(min(os.lstat(file).st_size, MAX_BYTES) for file in files) < FEW_BYTES:
        yield from map(read, files)
        return
    with ProcessPoolExecutor(initializer=partial(gc.set_threshold, RARELY)) as pool:
        yield from pool.map(read, files, chunksize=4)


def read_brief(path: Path) -> Log:
    return read_log(path).brief()


def read_log(path: Path) -> Log:
    """Read one file; a link, a device or an unreadable file becomes a log with one problem."""
    name, file = label(path), absolute(path)
    system, benchmark = printable(file.parent.parent.name), file.parent.name
    folders = (system, benchmark) if benchmark in TARGETS else ("", "")
    try:
        data = read_bytes(path, MAX_BYTES)
    except ValueError as error:
        return Log(path=name, folders=folders, problems=(Problem("file", 0, str(error)),))
    return replace(parse_log(data, name, folders), file=file)


def parse_log(data: bytes, path: str, folders: tuple[str, str] = ("", "")) -> Log:
    """Parse the bytes of one file. Never raises."""
    records: list[Event] = []
    problems: list[Problem] = []
    preamble: list[str] = []
    num_evaluations = 0
    try:
        lines = split_lines(data)
    except ValueError as error:
        lines, problems = [], [Problem("file", 0, str(error))]
    parts = [line.rpartition(TOKEN) for line in lines]
    numbered = [(number, part[2]) for number, part in enumerate(parts, start=1) if part[1]]
    all_parsed = parse_records(numbered, problems)
    for number, (before, token, payload) in enumerate(parts, start=1):
        if token:
            parsed = next(all_parsed)
            if isinstance(parsed, Event):
                records.append(parsed)
                num_evaluations += parsed.key == "eval_accuracy"
            else:
                problems.append(parsed)
        elif payload.startswith("#") and not records:
            preamble.append(printable(payload, 500))
        outside = before if token else payload
        if outside and LOOKALIKE.search(outside):
            problems.append(Problem("token", number, "the official parser drops what stands here"))
        if num_evaluations > MAX_EVALUATIONS:
            records, problems = [], [Problem("file", 0, f"more than {MAX_EVALUATIONS:,} evaluations")]
            break
    if not records and not problems:
        problems.append(Problem("file", 0, f"no record (no line with '{TOKEN}')"))
    if len(problems) > MAX_PROBLEMS:
        rest = Problem("record", 0, f"{len(problems) - MAX_PROBLEMS} more lines could not be read")
        problems[MAX_PROBLEMS:] = [rest]
    return Log(
        path=path,
        folders=folders,
        records=tuple(records),
        problems=tuple(problems),
        preamble=tuple(preamble),
        chain=read_chain(data) if records and is_chained(data) else None,
    )


def split_lines(data: bytes) -> list[str]:
    """Split UTF-8 text into lines. Raises ValueError for anything else, and for too much."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES // 2**20} MiB")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if data.count(b"\n") > MAX_LINES:
        raise ValueError(f"more than {MAX_LINES:,} lines")
    if b"\0" in data:
        raise ValueError("binary or UTF-16, not UTF-8 text")
    return data.decode("utf-8-sig").split("\n")
