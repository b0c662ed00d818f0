"""Compare the log of a run with that of the same run made again, record by record.

On the same hardware with the same versions and threads each loss, accuracy and sample count is the same to
the last bit. Elsewhere rounding differs, and the two runs drift apart. They agree if no loss and no accuracy
differs by more than the benchmark's entry in `TOLERANCES`, up to the evaluation at which the first one ends.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from common.evidence.log import ABORTED, Log, RunSet
from common.evidence.recipes import software
from common.evidence.records import Event, finite, printable
from common.evidence.system import describe_set, fields_of, instructions_of

LOSS, ACCURACY, DATA, END = "train_loss", "eval_accuracy", "dataset_fingerprint", "run_stop"
PLACES = ("epoch_num", "samples")  # of a record, in its metadata
COUNTS = ("correct", "total", "status")  # also in the metadata, and compared
MACHINE = {"device": "device", "num_threads": "threads"}  # records that name the machine -> in words
WITH = ", with "  # stands between the model of a processor and its caches or instructions
NOT_COMPARED = (*MACHINE, "processor", "cache_clear", "form_used", "method", "optimizer_class")


class Tolerance(NamedTuple):
    """The most by which a replay on other hardware differs: relative for losses, in points for accuracies."""

    loss: float
    accuracy: float


# From the distances in results/replay. ResNet has none: on another processor its losses part by up to 14 %,
# its accuracies by up to 0.12, more than those of any two seeds of `optimized`.
TOLERANCES = {"bert": Tolerance(loss=0.02, accuracy=0.01)}


class Pair(NamedTuple):
    """A record of the log and the one in its place in the replay; None if there is none."""

    before: Event | None
    after: Event | None

    @property
    def key(self) -> str:
        event = self.before or self.after
        return event.key if event else ""

    @property
    def aligned(self) -> tuple[Event, Event] | None:
        """The two records, if they have the same key at the same sample."""
        before, after = self
        if before is None or after is None or place(before) != place(after):
            return None
        return before, after

    @property
    def is_equal(self) -> bool:
        return self.aligned is not None and content(self.aligned[0]) == content(self.aligned[1])

    @property
    def distance(self) -> float | None:
        """By how much two numbers differ: losses relative to the log's, accuracies absolutely."""
        if self.aligned is None or self.key not in (LOSS, ACCURACY):
            return None
        before, after = (finite(event.value) for event in self.aligned)
        if before is None or after is None:
            return None
        return abs(after - before) / (abs(before) if self.key == LOSS and before else 1.0)


class Replayed(NamedTuple):
    """A log beside its replay. `elsewhere` are the reasons why bits may differ; () if they may not."""

    log: Log
    again: Log
    pairs: tuple[Pair, ...]
    elsewhere: tuple[str, ...]

    @property
    def first(self) -> Pair | None:
        return next((pair for pair in self.pairs if not pair.is_equal), None)

    @property
    def first_beyond(self) -> Pair | None:
        """The first record at which the two part by more than the tolerance; None where they agree.

        If one run reaches its target at an earlier evaluation, later records of the other have no partner.
        """
        allowed = self.tolerance or Tolerance(loss=0.0, accuracy=0.0)
        limits = {LOSS: allowed.loss, ACCURACY: allowed.accuracy}
        for pair in self.pairs:
            if pair.is_equal:
                continue
            if pair.aligned is None:
                return None if END in {event.key for event in pair if event} else pair
            if pair.key != END and (pair.distance is None or pair.distance > limits[pair.key]):
                return pair
        return None

    @property
    def tolerance(self) -> Tolerance | None:
        """The tolerance of its benchmark; None where none was measured."""
        return TOLERANCES.get(self.log.benchmark)

    @property
    def decides(self) -> bool:
        """True if losses and accuracies can be compared: elsewhere by a tolerance, or as all are equal."""
        has_tolerance = bool(self.tolerance) or not self.elsewhere or self.first is None
        return bool(self.count(LOSS) and self.count(ACCURACY)) and has_tolerance

    @property
    def is_accepted(self) -> bool:
        return self.decides and (self.first_beyond if self.elsewhere else self.first) is None

    def count(self, key: str) -> int:
        return len(self.aligned(key))

    def aligned(self, key: str) -> list[tuple[Event, Event]]:
        """List the records of a key that both logs have."""
        return [pair.aligned for pair in self.pairs if pair.key == key and pair.aligned]

    def largest(self, key: str) -> float:
        """The largest distance between two records of a key."""
        return max((pair.distance or 0.0 for pair in self.pairs if pair.key == key), default=0.0)


def compare(log: Log, again: Log, processors: tuple[str, str]) -> Replayed:
    """Compare two logs; `processors` are the models that made them, '' for one that is not known.

    A log that a fault has ended is compared up to its last record.
    """
    before, after = (list(entry.events(DATA, LOSS, ACCURACY, END)) for entry in (log, again))
    if not log.came_to_its_end:
        before = [event for event in before if event.key != END]
        after = after[: len(before)]
    pairs = tuple(Pair(*events) for events in zip_longest(before, after))
    return Replayed(log, again, (*compare_facts(log, again), *pairs), tuple(reasons(log, again, processors)))


def compare_facts(log: Log, again: Log) -> list[Pair]:
    """Pair the facts that both logs state before the clock starts, where they differ: seed, rate, ..."""
    now = {event.key: event for event in facts(again)}
    pairs = [Pair(event, now[event.key]) for event in facts(log) if event.key in now]
    return [pair for pair in pairs if not pair.is_equal]


def facts(log: Log) -> Sequence[Event]:
    """Return the facts about the recipe; facts about the submission may differ, as in recipes.py."""
    head = takewhile(lambda event: event.key != "run_start", log.records)
    return [
        event for event in head if event.key not in NOT_COMPARED and not event.key.startswith("submission_")
    ]


def place(event: Event) -> tuple[object, ...]:
    return (event.key, *(event.metadata.get(name) for name in PLACES))


def content(event: Event) -> tuple[object, ...]:
    """Return the compared parts of a record; both words for a missed target count as one."""
    counts = [event.metadata.get(name) for name in COUNTS]
    return (type(event.value), event.value, *("aborted" if count in ABORTED else count for count in counts))


def reasons(log: Log, again: Log, processors: tuple[str, str]) -> list[str]:
    models = [processor.partition(WITH)[0] for processor in processors]
    pairs = {"processor": processors if models[0] == models[1] else (models[0], models[1])}
    pairs |= {name: (log.text(key), again.text(key)) for key, name in MACHINE.items()}
    texts = differing_versions(log.header("versions"), again.header("versions"))
    texts += describe_differences(pairs) + ["the log's processor is not stated"] * (not processors[0])
    lowered = {"there": log, "here": again}
    return texts + [
        f"threads lowered {where}" for where in lowered if lowered[where].first("threads_lowered")
    ]


def differing_versions(before: str, after: str) -> list[str]:
    """Name the packages whose versions differ in two lines of versions."""
    there, here = (software(line, "", "") for line in (before, after))
    names = {key.removeprefix("version "): (there.get(key), here.get(key)) for key in {**there, **here}}
    return describe_differences(names)


def describe_differences(pairs: Mapping[str, tuple[str | None, str | None]]) -> list[str]:
    return [
        f"{name} {there or 'not stated'} there, {here or 'not stated'} here"
        for name, (there, here) in pairs.items()
        if there != here
    ]


def stated_processor(log: Log) -> str:
    """Return the processor of a log: of its record, else of the description of its system; '' for neither."""
    if event := log.first("processor"):
        return WITH.join(filter(None, (printable(event.value), instructions_of(log))))
    return describe_processor(fields_of(describe_set(RunSet(folder="", logs=(log,)))))


def describe_processor(fields: Mapping[str, object]) -> str:
    """Return model and caches of a system description: a virtual machine states a family as its model."""
    values = [fields.get(f"host_processor_{name}") for name in ("model_name", "caches")]
    return WITH.join(printable(value) for value in values if isinstance(value, str))


def verdict_lines(replayed: Replayed) -> list[str]:
    """Describe in lines how a log and its replay compare, where they part, and how long both took."""
    log, num_losses, num_accuracies = replayed.log, replayed.count(LOSS), replayed.count(ACCURACY)
    counts = f"{num_losses} losses, {num_accuracies} accuracies"
    name = Path(log.path).name
    limits = replayed.tolerance
    if replayed.first is None and replayed.is_accepted:
        lines = [f"repeats {name} to the last bit: {counts}"]
    elif replayed.is_accepted and limits:
        lines = [
            f"agrees with {name} within the tolerance: {num_losses} losses within "
            f"{percent_of(replayed.largest(LOSS))} ({percent_of(limits.loss)} allowed), {num_accuracies} "
            f"accuracies within {replayed.largest(ACCURACY):.4f} ({limits.accuracy:g} allowed)"
        ]
    elif not replayed.decides:
        lines = [f"decides nothing of {name}: {counts} to compare"]
        if num_losses and num_accuracies:
            hint = "replay it on hardware like the log's"
            lines = [f"decides nothing of {name}: no tolerance for {log.benchmark} on other hardware; {hint}"]
    else:
        lines = [f"differs from {name}{': beyond the tolerance' if replayed.elsewhere else ''}"]
    if part := replayed.first if replayed.is_accepted else replayed.first_beyond or replayed.first:
        lines.append(f"  {describe_pair(replayed, part)}")
    if not log.came_to_its_end:
        lines.append("  compared up to the fault that ended the run")
    if replayed.elsewhere and replayed.first:
        lines.append(f"  the bits may differ: {'; '.join(replayed.elsewhere)}")
    minutes = [f"{entry.duration_s / 60:.2f}" for entry in (log, replayed.again)]
    return [*lines, f"  minutes, not compared: {minutes[0]} there, {minutes[1]} now"]


def describe_pair(replayed: Replayed, pair: Pair) -> str:
    """Name the records of a pair: file and line of the log, both values, their distance."""
    event = pair.before or replayed.log.records[-1]
    there, now = (describe_event(side, alone=pair.aligned is None) for side in pair)
    text = f"{replayed.log.path}:{event.line} {pair.key}{describe_place(pair)}: {there} there, {now} now"
    if pair.distance is None:
        return text
    return f"{text} ({percent_of(pair.distance) if pair.key == LOSS else f'{pair.distance:.4f}'} apart)"


def describe_event(event: Event | None, *, alone: bool) -> str:
    if event is None:
        return "nothing"
    value = event.metadata.get("status") if event.key == END else event.value
    return f"{event.key}{describe_place(Pair(event, event))}" if alone else printable(value, 80)


def describe_place(pair: Pair) -> str:
    samples = pair.aligned[0].metadata.get("samples") if pair.aligned else None
    return f" at {samples:,} samples" if isinstance(samples, int) else ""


def percent_of(share: float) -> str:
    return f"{100 * share:.2g} %"


def as_json(replayed: Replayed) -> dict[str, Any]:
    """Return the comparison for JSON; a loss or an accuracy is [samples, value there, value now]."""
    part, logs = replayed.first, (replayed.log, replayed.again)
    stops = [log.last(END) for log in logs]
    losses, accuracies = (
        [[there.metadata.get("samples"), there.value, now.value] for there, now in replayed.aligned(key)]
        for key in (LOSS, ACCURACY)
    )
    return {
        "result": replayed.log.path,
        "seed": replayed.log.value("seed"),
        "repeats": part is None and replayed.is_accepted,
        "accepted": replayed.is_accepted,
        "elsewhere": list(replayed.elsewhere),
        "parts_at": describe_pair(replayed, part) if part else None,
        "losses": losses,
        "accuracies": accuracies,
        "samples": [stop.metadata.get("samples") if stop else None for stop in stops],
        "minutes": [round(log.duration_s / 60, 4) for log in logs],
    }
