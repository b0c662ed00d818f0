"""The audit rules: one function each, its docstring the message, with the change of a good log that it finds.

Families: P parsing, K keys, T time, Q quality; S, the rules of a run set, is in audit.py. Severity `error`
where none of 315 published runs breaks the rule, `warning` where some do, `strict`: error on logs of this
suite, warning on others. A section is one of MLCommons' training_rules.adoc (`rules`) or of its
submission_rules.adoc; `logging` is the official checker (rulesets 2.0.0, 2.1.0); `house` is our own promise.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from common.evidence.log import TARGETS, TOKEN, Event, Log, finite, printable

Lines = list[str]
Mutation = Callable[[Lines], Lines]
TRAIN_SAMPLES = {"resnet": 1281167}
EVAL_SAMPLES = {"resnet": 50000, "bert": 10000}
INIT_LIMIT_MS = {"open": 240 * 60000, "closed": 30 * 60000}
SUBMISSION = {  # the values that a key may have; None: any but nothing
    "submission_benchmark": tuple(TARGETS),
    "submission_division": ("open", "closed"),
    "submission_status": ("cloud", "onprem", "preview", "research"),
    "submission_org": None,
    "submission_platform": None,
}
SETTINGS = ("seed", "global_batch_size", "train_samples", "eval_samples")
ON_DATA = ("dataset_fingerprint", "block_start", "block_stop", "epoch_start", "epoch_stop", "eval_start")


class Found(NamedTuple):
    """What a rule saw: the line (0: the whole file), a detail, and in a set the log it concerns."""

    line: int
    text: str
    log: Log | None = None


@dataclass(frozen=True)
class Rule:
    """A check of a Log, or of the readable logs of a set, and a change of good logs that it finds."""

    id: str
    severity: str
    section: str
    check: Callable[[Any], Iterator[Found]]
    breaks: Callable[[Any], Any]
    also: tuple[str, ...]  # the rules that find the change as well

    @property
    def message(self) -> str:
        return (self.check.__doc__ or "").rstrip(".")


RULES: list[Rule] = []
Check = TypeVar("Check", bound=Callable[[Any], Iterator[Found]])


def rule(
    id: str, severity: str, section: str, *, breaks: Callable[[Any], Any], also: tuple[str, ...] = ()
) -> Callable[[Check], Check]:
    """Register a rule; its docstring is the message."""

    def register(check: Check) -> Check:
        RULES.append(Rule(id, severity, section, check, breaks, also))
        return check

    return register


# Changes to a good log. `at` counts the records of a key.


def replaced(key: str, change: Callable[[str], Lines], at: int = 0) -> Mutation:
    def mutate(lines: Lines) -> Lines:
        index = [i for i, line in enumerate(lines) if f'"key": "{key}"' in line][at]
        return lines[:index] + change(lines[index]) + lines[index + 1 :]

    return mutate


def rewritten(line: str, **fields: object) -> str:
    record: dict[str, Any] = json.loads(line.partition(TOKEN)[2])
    for name, value in fields.items():
        (record if name in record else record["metadata"])[name] = value
    return TOKEN + json.dumps(record)


def edited(key: str, at: int = 0, **fields: object) -> Mutation:
    return replaced(key, lambda line: [rewritten(line, **fields)], at)


def later(key: str, ms: int) -> Mutation:
    return replaced(key, lambda line: [rewritten(line, time_ms=time_of(line) + ms)])


def time_of(line: str) -> int:
    return int(json.loads(line.partition(TOKEN)[2])["time_ms"])


def without(key: str) -> Mutation:
    return replaced(key, lambda line: [])


def moved(key: str, *, before: str) -> Mutation:
    def mutate(lines: Lines) -> Lines:
        line = next(line for line in lines if f'"key": "{key}"' in line)
        return replaced(before, lambda other: [line, other])([x for x in lines if x is not line])

    return mutate


# Parsing: log.py has found these problems already.


def parsing(id: str, kind: str, section: str, message: str, *, breaks: Mutation) -> None:
    def check(log: Log) -> Iterator[Found]:
        return (Found(problem.line, problem.text) for problem in log.problems if problem.kind == kind)

    check.__doc__ = message
    rule(id, "error", section, breaks=breaks)(check)


parsing("P001", "file", "logging: file", "A result is a regular text file", breaks=lambda s: ["\0", *s])
parsing(
    *("P002", "record", "logging: record", "A record is one JSON object, with every field"),
    breaks=replaced("opt_name", lambda line: [line[:-9]]),
)
parsing(
    *("P003", "time", "logging: time_ms", "time_ms is an integer of milliseconds, in the years 2000 to 2099"),
    breaks=edited("opt_name", time_ms="soon"),
)
parsing(
    *("P004", "duplicate", "RFC 8259: Objects", "No key stands twice in a JSON object"),
    breaks=replaced("opt_name", lambda line: [line.replace('"value"', '"value": 1, "value"')]),
)
parsing(
    *("P005", "token", "logging: record", "A line holds one record, after ':::MLLOG ' as spelled here"),
    breaks=replaced("opt_name", lambda line: [line + line]),
)


# Keys: what must be stated, how often, with which value.


@rule("K101", "error", "logging: EXACTLY_ONE", breaks=replaced("run_start", lambda line: [line, line]))
def run_has_one_span(log: Log) -> Iterator[Found]:
    """run_start, run_stop and init_stop stand exactly once."""
    for key in ("run_start", "run_stop", "init_stop"):
        events = log.events(key)
        if len(events) != 1:
            yield Found(events[-1].line if events else 0, f"{key} stands {len(events)} times")


@rule("K102", "error", "logging: submission_*", breaks=edited("submission_division", value="Open"))
def submission_is_stated(log: Log) -> Iterator[Found]:
    """submission_benchmark, _division, _status, _org and _platform are stated, with a known value."""
    for key, known in SUBMISSION.items():
        event, text = log.first(key), log.text(key)
        if not text or (known and text not in known):
            yield Found(event.line if event else 0, f"{key} is {text or 'missing'}")


@rule("K103", "error", "logging: EXACTLY_ONE", breaks=without("seed"))
def settings_are_stated(log: Log) -> Iterator[Found]:
    """seed, global_batch_size, train_samples and eval_samples are stated as numbers."""
    for key in SETTINGS:
        if finite(log.value(key)) is None:
            event = log.first(key)
            yield Found(event.line if event else 0, f"{key} is {printable(log.value(key), 40)}")


@rule(
    "K104",
    "error",
    "submission rules: directories",
    breaks=edited("submission_benchmark", value="bert"),
    also=("K108",),
)
def benchmark_is_the_folders(log: Log) -> Iterator[Found]:
    """The benchmark in the log is the one of its folder."""
    event = log.first("submission_benchmark")
    if event and log.folders[1] not in ("", event.value):
        yield Found(event.line, f"{printable(event.value, 40)} in {log.folders[1]}")


@rule(
    "K105", "strict", "submission rules: directories", breaks=edited("submission_platform", value="another")
)
def platform_is_the_folders(log: Log) -> Iterator[Found]:
    """submission_platform is the system's folder."""
    event = log.first("submission_platform")
    if event and log.folders[0] not in ("", event.value):
        yield Found(event.line, f"{printable(event.value, 64)} in {log.folders[0]}")


@rule("K106", "error", "rules: Data State at Start of Run", breaks=without("cache_clear"))
def cache_clear_comes_first(log: Log) -> Iterator[Found]:
    """The caches are cleared before initialization."""
    clear, start = log.first("cache_clear"), log.first("init_start")
    if clear is None or (start and clear.line > start.line):
        yield Found(clear.line if clear else 0, "cache_clear comes later" if clear else "no cache_clear")


@rule("K107", "warning", "rules: Data State at Start of Run", breaks=edited("cache_clear", value=False))
def caches_were_cleared(log: Log) -> Iterator[Found]:
    """The caches were really cleared."""
    for event in log.events("cache_clear"):
        if event.value is False:
            yield Found(event.line, printable(event.metadata.get("how", "no reason given"), 80))


@rule("K108", "strict", "rules: Training and Test Sets", breaks=edited("eval_samples", value=6400))
def dataset_is_whole(log: Log) -> Iterator[Found]:
    """A full run trains on and evaluates the whole data set."""
    for key, sizes, slack in (("train_samples", TRAIN_SAMPLES, 64), ("eval_samples", EVAL_SAMPLES, 0)):
        event, size = log.first(key), sizes.get(log.benchmark)
        number = finite(event.value) if event else None
        slack = 0 if log.is_ours else slack  # some loaders round up to a multiple of the ranks
        if event and size and number is not None and not log.is_proxy and abs(number - size) > slack:
            yield Found(event.line, f"{key} {number:.0f} instead of {size}")


@rule("K109", "error", "house: mini is a proxy", breaks=edited("benchmark_size", value="mini"))
def size_is_labelled(log: Log) -> Iterator[Found]:
    """benchmark_size is full or mini, and the system's id says mini exactly when the size does."""
    size = log.first("benchmark_size")
    if size is None and log.is_ours:
        yield Found(0, "no benchmark_size")
    if size and (size.value not in ("full", "mini") or (size.value == "mini") != ("-mini-" in log.system)):
        yield Found(size.line, f"{printable(size.value, 40)} on {log.system}")


# Time.


@rule("T201", "error", "logging: order", breaks=moved("run_start", before="init_stop"))
def phases_are_in_order(log: Log) -> Iterator[Found]:
    """init_start, init_stop, run_start and run_stop follow each other."""
    events = [log.first(key) for key in ("init_start", "init_stop", "run_start", "run_stop")]
    known = [event for event in events if event]
    for before, after in zip(known, known[1:], strict=False):
        if after.line < before.line or after.time_ms < before.time_ms:
            yield Found(after.line, f"{after.key} before {before.key}")
    if not events[0]:
        yield Found(0, "no init_start")


def span(log: Log) -> tuple[int, int]:
    """Return the lines of run_start and run_stop; the ends of the file where one is missing."""
    start, stop = log.first("run_start"), log.last("run_stop")
    return (start.line if start else 0), (stop.line if stop else log.records[-1].line)


def goes_back(events: Sequence[Event]) -> Iterator[Found]:
    for before, after in zip(events, events[1:], strict=False):
        if after.time_ms < before.time_ms:
            yield Found(after.line, f"{after.key} {before.time_ms - after.time_ms} ms before {before.key}")


@rule("T202", "error", "rules: Run Results", breaks=later("block_stop", -2000))
def time_advances(log: Log) -> Iterator[Found]:
    """Time never goes back between run_start and run_stop."""
    start, stop = span(log)
    yield from goes_back([event for event in log.records if start <= event.line <= stop])


@rule("T203", "warning", "rules: Run Results", breaks=later("seed", -2000))
def time_advances_outside(log: Log) -> Iterator[Found]:
    """Time never goes back outside the run."""
    start, stop = span(log)
    yield from goes_back([event for event in log.records if event.line < start])
    yield from goes_back([event for event in log.records if event.line > stop])


@rule("T204", "error", "rules: Run Results", breaks=later("init_start", -5 * 3600_000), also=("T203",))
def init_is_short(log: Log) -> Iterator[Found]:
    """Initialization takes at most 240 minutes (open) or 30 (closed)."""
    start, stop = log.first("init_start"), log.last("init_stop")
    limit = INIT_LIMIT_MS.get(log.text("submission_division"), INIT_LIMIT_MS["open"])
    if start and stop and stop.time_ms - start.time_ms >= limit:
        yield Found(stop.line, f"{(stop.time_ms - start.time_ms) / 60000:.1f} min")


@rule("T205", "strict", "rules: Run Results", breaks=later("init_stop", -2000))
def run_follows_init(log: Log) -> Iterator[Found]:
    """run_start follows init_stop within a second; the time between them belongs to neither."""
    stop, start = log.first("init_stop"), log.first("run_start")
    if stop and start and start.time_ms - stop.time_ms > 1000:
        yield Found(start.line, f"{(start.time_ms - stop.time_ms) / 1000:.1f} s")


@rule("T206", "error", "rules: Run Results", breaks=moved("eval_accuracy", before="run_start"))
def evaluation_is_timed(log: Log) -> Iterator[Found]:
    """No eval_accuracy stands outside the run."""
    start, stop = span(log)
    return (Found(e.line, "") for e in log.events("eval_accuracy") if not start < e.line < stop)


@rule(
    "T207", "strict", "rules: Run Results", breaks=replaced("run_stop", lambda s: [s, rewritten(s, key="a")])
)
def run_stop_is_last(log: Log) -> Iterator[Found]:
    """run_stop is the last record."""
    stop = log.last("run_stop")
    if stop and stop.line < log.records[-1].line:
        yield Found(log.records[-1].line, f"{printable(log.records[-1].key, 40)} follows")


@rule("T208", "warning", "house: monotonic clock", breaks=edited("run_stop", duration_ms=1))
def clocks_agree(log: Log) -> Iterator[Found]:
    """The wall clock and the monotonic clock agree within a second."""
    stop = log.last("run_stop")
    duration = finite(stop.metadata.get("duration_ms")) if stop else None
    if stop and duration is not None and log.minutes and abs(log.minutes * 60000 - duration) > 1000:
        yield Found(stop.line, f"{log.minutes * 60:.1f} s and {duration / 1000:.1f} s")


@rule("T209", "strict", "rules: Run Results", breaks=moved("dataset_fingerprint", before="run_start"))
def data_is_touched_in_the_run(log: Log) -> Iterator[Found]:
    """The data set is touched only between run_start and run_stop."""
    start, stop = span(log)
    return (Found(e.line, e.key) for e in log.records if e.key in ON_DATA and not start < e.line < stop)


# Quality.


@rule("Q301", "error", "logging: eval_accuracy", breaks=edited("eval_accuracy", value=75.9), also=("Q303",))
def accuracy_is_a_fraction(log: Log) -> Iterator[Found]:
    """eval_accuracy is a number from 0 to below 1."""
    events = log.events("eval_accuracy")
    if not events:
        yield Found(0, "no eval_accuracy")
    for event in events:
        accuracy = finite(event.value)
        if accuracy is None or not 0 <= accuracy < 1:
            yield Found(event.line, printable(event.value, 40))


@rule("Q302", "error", "rules: Quality measure", breaks=edited("run_stop", status="done"))
def success_means_the_target(log: Log) -> Iterator[Found]:
    """status is aborted, or success with the last accuracy at the target."""
    stop = log.last("run_stop")
    status = stop.metadata.get("status") if stop else None
    if stop and status != "aborted" and not log.is_converged:
        reached = f"{log.curve[-1].accuracy:.5f}" if log.curve else "nothing"
        yield Found(stop.line, f"{printable(status, 40)}, reached {reached} of {log.target:g}")


@rule("Q303", "strict", "rules: Run Results", breaks=edited("eval_accuracy", value=0.8, correct=40000))
def first_success_ends_the_run(log: Log) -> Iterator[Found]:
    """Nothing is evaluated after the target is reached."""
    passed = [event for event in log.events("eval_accuracy") if (finite(event.value) or 0) >= log.target]
    last = log.last("eval_accuracy")
    if passed and last and last.line > passed[0].line:
        yield Found(last.line, f"line {passed[0].line} had reached it")


@rule("Q304", "strict", "rules: Epoch numbering", breaks=edited("eval_accuracy", at=1, epoch_num=0))
def evaluations_advance(log: Log) -> Iterator[Found]:
    """Each eval_accuracy has an epoch_num above the one before."""
    before = -1.0  # the first may be of the untrained model, at 0
    for event in log.events("eval_accuracy"):
        epoch = finite(event.metadata.get("epoch_num"))
        if epoch is None or epoch <= before:
            yield Found(event.line, f"{printable(event.metadata.get('epoch_num'), 40)} after {before:g}")
        before = before if epoch is None else epoch


@rule("Q305", "error", "house: exact evaluation", breaks=edited("eval_accuracy", correct=1))
def accuracy_is_the_quotient(log: Log) -> Iterator[Found]:
    """The accuracy is correct / total, with the same total each time."""
    totals = set()
    for event in log.events("eval_accuracy"):
        accuracy = finite(event.value)
        correct, total = (finite(event.metadata.get(name)) for name in ("correct", "total"))
        if correct is None or total is None:
            if log.is_ours:
                yield Found(event.line, "no correct and total")
            continue
        if accuracy is None or not 0 <= accuracy < 1:
            continue  # Q301
        totals.add(total)
        if total <= 0 or abs(accuracy - correct / total) > 1e-6 or len(totals) > 1:
            yield Found(event.line, f"{accuracy:g} is not {correct:.0f} / {total:.0f}, or the total changed")


@rule("Q306", "error", "rules: Benchmarks", breaks=edited("quality_target", value=0.5))
def target_is_the_official_one(log: Log) -> Iterator[Found]:
    """The target of a full run is at least the benchmark's."""
    event, official = log.first("quality_target"), TARGETS.get(log.benchmark)
    if event and official and not log.is_proxy and (finite(event.value) or 0) < official:
        yield Found(event.line, f"{printable(event.value, 40)} is below {official}")
