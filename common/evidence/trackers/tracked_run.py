"""A run as a tracker shows it, from its log: measurements over samples and time, parameters, tags, outcome.

Nothing is measured here and no run imports this: a log is read after the run or beside it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.evidence import recipes
from common.evidence.log import Log
from common.evidence.records import YEAR_2100_MS, finite, printable
from common.evidence.score import run_of

Scalar = bool | int | float | str
METRICS = {  # key of a log -> metric
    "throughput": "samples_per_s",
    "train_loss": "loss",
    "eval_accuracy": "quality",
}
HEAD = ("command", "commit", "code", "versions", "threads", "untracked", "preflight")  # of a log -> tags
RUNNING = "running"  # the status of a run whose log has no run_stop
MAX_TEXT = 500  # characters of a value; MLflow takes 6,000
MAX_PARAMETERS = 500  # the largest configuration has about 60


class Measurement(NamedTuple):
    """A value of a metric after so many samples; `time_ms` since 1970, `seconds` since run_start."""

    metric: str
    value: float
    samples: int
    time_ms: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """One run. Its set, number and start time tell it from every other: an export twice is one run.

    `outcome` holds minutes_to_target and samples_to_target of a run that reached its target. Facts before the
    first measurement stay as they are while the log grows; measurements are added at the end.
    """

    system: str
    benchmark: str
    size: str
    number: str
    start_ms: int
    stop_ms: int | None
    status: str  # as run_stop states it, or running
    came_to_its_end: bool
    parameters: Mapping[str, Scalar]
    tags: Mapping[str, str]
    measurements: tuple[Measurement, ...]
    outcome: Mapping[str, float]
    settings: tuple[str, ...]  # the merged configuration, one line of YAML each

    @property
    def set_name(self) -> str:
        return f"{self.system}/{self.benchmark}"

    @property
    def name(self) -> str:
        return f"{self.set_name}/{self.number}"

    @property
    def start(self) -> str:
        """The start in UTC, in letters that a file's name may have: 20261123T101530.646Z."""
        moment = datetime.fromtimestamp(min(self.start_ms, YEAR_2100_MS) // 1000, UTC)
        return f"{moment:%Y%m%dT%H%M%S}.{self.start_ms % 1000:03}Z"

    @property
    def key(self) -> str:
        return f"{self.name}@{self.start}"

    @property
    def num_samples(self) -> int:
        return max((one.samples for one in self.measurements), default=0)

    @property
    def experiment(self) -> str:
        """The name under which runs are compared: one benchmark at one size."""
        return f"ttt-{self.benchmark}-{self.size}"


def read_run(log: Log) -> TrackedRun | None:
    """Return the run of a log; None before its clock has started."""
    start, stop = log.first("run_start"), log.last("run_stop")
    if start is None:
        return None
    number = Path(log.path).stem.removeprefix("result_")
    return TrackedRun(
        system=make_plain(log.system, also="+="),
        benchmark=make_plain(log.benchmark),
        size=make_plain(log.text("benchmark_size") or "full") + ("-proxy" if log.is_proxy else ""),
        number=make_plain(number),
        start_ms=start.time_ms,
        stop_ms=stop.time_ms if stop else None,
        status=printable(stop.metadata.get("status"), MAX_TEXT) if stop else RUNNING,
        came_to_its_end=log.came_to_its_end,
        parameters=dict(islice(read_parameters(log), MAX_PARAMETERS)),
        tags=read_tags(log),
        measurements=tuple(sorted(read_measurements(log, start.time_ms), key=lambda one: one.time_ms)),
        outcome=read_outcome(log),
        settings=log.settings,
    )


def make_plain(name: str, also: str = "") -> str:
    """Make a name safe as that of a folder, in a query and in an address; it may have the letters `also`."""
    return re.sub(rf"[^A-Za-z0-9._{also}-]", "_", name[:128]).lstrip(".") or "unknown"


def read_parameters(log: Log) -> Iterator[tuple[str, Scalar]]:
    """Yield the facts that a log states once before its clock starts, then the merged configuration."""
    start = log.first("run_start")
    for key, events in log.by_key.items():
        value = events[0].value
        if start and events[-1].line < start.line and len(events) == 1 and isinstance(value, Scalar):
            yield make_plain(key), make_scalar(value)
    for key, value in recipes.flat(recipes.configuration_of(log.settings) or {}).items():
        yield make_plain(key), make_scalar(value)


def make_scalar(value: object) -> Scalar:
    """Keep a number that every tracker takes; make anything else text."""
    is_number = isinstance(value, bool) or finite(value) is not None
    return value if is_number and isinstance(value, bool | int | float) else printable(value, MAX_TEXT)


def read_tags(log: Log) -> dict[str, str]:
    """Return the provenance of a run, and the words that must stand beside its figures."""
    marks = {
        "unverified": True,
        "proxy": log.is_proxy,
        "resumed": log.is_resumed,
        "study": log.is_study,
    }
    texts = {
        "label": ", ".join(mark for mark, applies in marks.items() if applies),
        "configuration": recipes.recipe_name(log),
        "methods": ", ".join(str(event.value) for event in log.events("method")),
        "dataset_fingerprint": log.text("dataset_fingerprint"),
        **{name: log.header(name) for name in HEAD},
    }
    return {name: printable(text, MAX_TEXT) for name, text in texts.items() if text}


def read_measurements(log: Log, start_ms: int) -> Iterator[Measurement]:
    """Yield loss, rate and quality, which is below 1, where the log says after how many samples."""
    for event in log.events(*METRICS):
        value, samples = finite(event.value), finite(log.samples(event))
        is_usable = event.key != "eval_accuracy" or (value is not None and 0 <= value < 1)
        if value is not None and samples is not None and is_usable:
            seconds = (event.time_ms - start_ms) / 1000
            yield Measurement(METRICS[event.key], value, round(samples), event.time_ms, seconds)


def read_outcome(log: Log) -> dict[str, float]:
    """Read minutes and samples to the target; a run of a study went on past it."""
    run = run_of(log)
    if log.is_study or not math.isfinite(run.minutes):
        return {}
    return {"minutes_to_target": run.minutes} | ({"samples_to_target": run.samples} if run.samples else {})
