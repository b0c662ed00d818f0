"""P: lines that could not be read. K: keys that a log must state, how often, and with which value."""

import math
from collections.abc import Iterator

from common.evidence.log import IMAGENET_SAMPLES, TARGETS, Log
from common.evidence.records import Event, finite, printable
from common.evidence.rules.rule import (
    Found,
    Mutation,
    add,
    chain,
    edit,
    miss_target,
    remove,
    replace_record,
    rule,
)

FOLDERS = "submission rules: directories"
DATA_STATE = "rules: Data State at Start of Run"
EXACTLY_ONE = "logging: EXACTLY_ONE"
RUN_SETS = "rules: Benchmark Results"
OFFICIAL = {  # key: the size of the set by benchmark, and the shares of it that a run may state
    "train_samples": ({"resnet": IMAGENET_SAMPLES}, -math.inf, 1.01),  # samplers round up, by up to 8 images
    "eval_samples": ({"resnet": 50000, "bert": 10000}, 0.1, math.inf),  # published logs: from 0.128
}
SUBMISSION = {  # the values that a key may have; None: any but nothing
    "submission_benchmark": tuple(TARGETS),
    "submission_division": ("open", "closed"),
    "submission_status": ("cloud", "onprem", "preview", "research"),
    "submission_org": None,
    "submission_platform": None,
}
SETTINGS = ("global_batch_size", "train_samples", "eval_samples")
ONCE = (*SUBMISSION, *SETTINGS, "seed", "cache_clear")
INTERVALS = {"block": "first_epoch_num", "epoch": "epoch_num", "eval": "epoch_num"}


# Parsing: log.py has found these problems already.


def add_parser(id: str, kind: str, section: str, message: str, *, breaks: Mutation) -> None:
    def check(log: Log) -> Iterator[Found]:
        return (Found(problem.line, problem.text) for problem in log.problems if problem.kind == kind)

    check.__doc__ = message
    rule(id, "error", section, breaks=breaks)(check)


add_parser("P001", "file", "logging: file", "A result is a regular text file", breaks=lambda s: ["\0", *s])
add_parser(
    *("P002", "record", "logging: record", "A record is one JSON object, with every field"),
    breaks=replace_record("gradient_accumulation_steps", lambda line: [line[:-9]]),
)
add_parser(
    *("P003", "time", "logging: time_ms", "time_ms is an integer of milliseconds since 1970"),
    breaks=edit("gradient_accumulation_steps", time_ms="soon"),
)
add_parser(
    *("P004", "duplicate", "RFC 8259: Objects", "No key stands twice in a JSON object"),
    breaks=replace_record("opt_name", lambda line: [line.replace('"value"', '"value": 1, "value"')]),
)
add_parser(
    *("P005", "token", "logging: record", "A line holds one record, after ':::MLLOG ' as spelled here"),
    breaks=replace_record("opt_name", lambda line: [line + line]),
)


# Keys: what must be stated, how often, with which value.


@rule("K101", "error", EXACTLY_ONE, breaks=add("run_start"))
def run_has_one_span(log: Log) -> Iterator[Found]:
    """run_start, run_stop and init_stop stand exactly once."""
    for key in ("run_start", "run_stop", "init_stop"):
        events = log.events(key)
        if len(events) != 1 and not (key == "run_stop" and breaks_off(log)):  # K121
            yield Found(events[-1].line if events else 0, f"{key} stands {len(events)} times")


def breaks_off(log: Log) -> bool:
    """True if a run was evaluated, missed its target and ends without run_stop."""
    return log.is_honest_miss and not log.events("run_stop") and bool(log.curve)


@rule("K121", "warning", RUN_SETS, breaks=chain(remove("run_stop"), miss_target))
def the_run_ends(log: Log) -> Iterator[Found]:
    """A run that breaks off below its target counts as one that missed it."""
    if breaks_off(log):
        yield Found(0, "no run_stop")


@rule("K102", "error", "logging: submission_*", breaks=edit("submission_division", value="Open"))
def submission_is_stated(log: Log) -> Iterator[Found]:
    """submission_benchmark and _division are stated; they and _status have a known value."""
    for key, known in SUBMISSION.items():
        event, text = log.first(key), log.text(key)
        if known and text not in known and (text or key != "submission_status"):
            yield Found(event.line if event else 0, f"{key} is {text or 'missing'}")


@rule("K115", "strict", "logging: submission_*", breaks=edit("submission_org", value=""))
def submitter_is_stated(log: Log) -> Iterator[Found]:
    """submission_org, _platform and _status are stated; some later rounds did not ask for them."""
    for key in ("submission_org", "submission_platform", "submission_status"):
        event = log.first(key)
        if event is None or event.value == "":
            yield Found(0, f"{key} is missing")


@rule("K117", "error", "logging: submission_*", breaks=edit("submission_org", value=7))
def submitter_is_text(log: Log) -> Iterator[Found]:
    """submission_org and _platform are text."""
    for event in log.events("submission_org", "submission_platform"):
        if not isinstance(event.value, str):
            yield Found(event.line, f"{event.key} is {printable(event.value, 40)}")


@rule("K103", "error", EXACTLY_ONE, breaks=remove("global_batch_size"))
def settings_are_stated(log: Log) -> Iterator[Found]:
    """global_batch_size, train_samples and eval_samples are stated as numbers above 0."""
    for key in SETTINGS:
        if (finite(log.value(key)) or 0) <= 0:
            event = log.first(key)
            yield Found(event.line if event else 0, f"{key} is {printable(log.value(key), 40)}")


@rule("K116", "strict", "rules: Random numbers", breaks=remove("seed"))
def seed_is_stated(log: Log) -> Iterator[Found]:
    """The seed is stated; the open division does not ask for it."""
    if not log.first("seed"):
        yield Found(0, "no seed")


@rule("K120", "error", "rules: Random numbers", breaks=edit("seed", value="1000"))
def seed_is_a_number(log: Log) -> Iterator[Found]:
    """A seed is a whole number."""
    for event in log.events("seed"):
        if (seed := finite(event.value)) is None or not seed.is_integer():
            yield Found(event.line, printable(event.value, 40))


@rule("K104", "error", FOLDERS, breaks=edit("submission_benchmark", value="bert"))
def benchmark_is_the_folders(log: Log) -> Iterator[Found]:
    """The benchmark in the log is the one of its folder."""
    event = log.first("submission_benchmark")
    if event and log.folders[1] not in ("", event.value):
        yield Found(event.line, f"{printable(event.value, 40)} in {log.folders[1]}")


@rule("K105", "strict", FOLDERS, breaks=edit("submission_platform", value="another"))
def platform_is_the_folders(log: Log) -> Iterator[Found]:
    """submission_platform is the system's folder."""
    event = log.first("submission_platform")
    if event and log.folders[0] not in ("", event.value):
        yield Found(event.line, f"{printable(event.value, 64)} in {log.folders[0]}")


@rule("K106", "strict", DATA_STATE, breaks=remove("cache_clear"))
def cache_clear_comes_first(log: Log) -> Iterator[Found]:
    """The caches are cleared before initialization."""
    clear, start = log.first("cache_clear"), log.first("init_start")
    if clear is None:
        yield Found(0, "no cache_clear")
    elif start and clear.line > start.line and not is_after(clear, log.first("run_start")):
        yield Found(clear.line, "cache_clear comes later")


def is_after(event: Event, other: Event | None) -> bool:
    return other is not None and event.line > other.line


@rule(
    "K118",
    "error",
    DATA_STATE,
    breaks=chain(remove("cache_clear"), add("dataset_fingerprint", key="cache_clear", value=True)),
)
def caches_are_cleared_before_the_run(log: Log) -> Iterator[Found]:
    """The caches are cleared before the run starts."""
    clear = log.first("cache_clear")
    if clear and is_after(clear, log.first("run_start")):
        yield Found(clear.line, "cache_clear follows run_start")


def find_uncleared(log: Log) -> Iterator[Found]:
    for event in log.events("cache_clear"):
        if event.value is False:
            yield Found(event.line, printable(event.metadata.get("how", "no reason given"), 80))


@rule("K107", "error", DATA_STATE, breaks=edit("cache_clear", value=False))
def caches_were_cleared(log: Log) -> Iterator[Found]:
    """A full run starts with caches that were really cleared."""
    return iter(()) if log.is_proxy else find_uncleared(log)


@rule("K122", "warning", DATA_STATE, breaks=edit("cache_clear", value=False), size="mini")
def caches_of_a_proxy_were_cleared(log: Log) -> Iterator[Found]:
    """The caches were really cleared; a run of size mini may do without."""
    return find_uncleared(log) if log.is_proxy else iter(())


@rule("K108", "strict", "rules: Training and Test Sets", breaks=edit("eval_samples", value=6400))
def dataset_is_whole(log: Log) -> Iterator[Found]:
    """A full run trains on and evaluates the whole data set."""
    return find_other_sizes(log, is_possible=True)


@rule("K119", "error", "rules: Training and Test Sets", breaks=edit("eval_samples", value=10))
def dataset_is_the_official_one(log: Log) -> Iterator[Found]:
    """A full run evaluates a tenth of the data set at least, and trains on no more than there is."""
    return find_other_sizes(log, is_possible=False)


def find_other_sizes(log: Log, *, is_possible: bool) -> Iterator[Found]:
    """Yield the unofficial sizes of a full run that may be true, or those that cannot."""
    for key, (sizes, least, most) in OFFICIAL.items():
        event, size = log.first(key), sizes.get(log.benchmark)
        number = finite(event.value) if event else None
        if not event or not size or number is None or number == size or log.is_proxy:
            continue
        if (least <= number / size <= most) == is_possible:
            yield Found(event.line, f"{key} {number:.0f} instead of {size}")


@rule("K109", "error", "house: mini is a proxy", breaks=edit("benchmark_size", value="mini"))
def size_is_labelled(log: Log) -> Iterator[Found]:
    """benchmark_size is full or mini, and the system's id says mini exactly when the size does."""
    size = log.first("benchmark_size")
    if size is None and log.is_ours:
        yield Found(0, "no benchmark_size")
    if size and (size.value not in ("full", "mini") or (size.value == "mini") != ("-mini-" in log.system)):
        yield Found(size.line, f"{printable(size.value, 40)} on {log.system}")


@rule("K110", "strict", "rules: Run Results", breaks=remove("block_stop"))
def intervals_are_closed(log: Log) -> Iterator[Found]:
    """Each block, epoch and evaluation that starts also stops, before the next of its kind starts."""
    for kind in INTERVALS:
        events = log.events(f"{kind}_start", f"{kind}_stop")
        if events and log.claims_no_success and events[-1].key == f"{kind}_start":
            events = events[:-1]  # it was cut off
        expected = [f"{kind}_start", f"{kind}_stop"] * (len(events) // 2 + 1)
        wrong = [event for event, key in zip(events, expected, strict=False) if event.key != key]
        if wrong or len(events) % 2:
            starts = sum(event.key == f"{kind}_start" for event in events)
            text = f"{starts} {kind}_start, {len(events) - starts} {kind}_stop"
            yield Found((wrong or events[-1:])[0].line, text)


@rule("K111", "strict", "rules: Epoch numbering", breaks=edit("block_start", first_epoch_num=0))
def epochs_count_from_one(log: Log) -> Iterator[Found]:
    """The first block and the first epoch have number 1."""
    for kind, name in INTERVALS.items():
        event = log.first(f"{kind}_start") if kind != "eval" else None
        if event and event.number(name) == 0:
            yield Found(event.line, f"{event.key} with {name} 0")


@rule("K112", "strict", "logging: event_type", breaks=edit("run_start", event_type="POINT_IN_TIME"))
def the_run_is_an_interval(log: Log) -> Iterator[Found]:
    """run_start is an INTERVAL_START and run_stop an INTERVAL_END."""
    for key, kind in (("run_start", "INTERVAL_START"), ("run_stop", "INTERVAL_END")):
        event = log.first(key)
        if event and event.event_type != kind:
            yield Found(event.line, f"{key} is {printable(event.event_type, 40)}")


@rule("K113", "strict", EXACTLY_ONE, breaks=add("submission_org"))
def settings_stand_once(log: Log) -> Iterator[Found]:
    """A setting of the whole run is stated once."""
    for key in ONCE:
        if len(events := log.events(key)) > 1:
            yield Found(events[1].line, f"{key} stands {len(events)} times")


@rule("K114", "strict", "rules: Submission", breaks=edit("submission_org", value="ORG_PLACEHOLDER"))
def templates_are_filled(log: Log) -> Iterator[Found]:
    """No placeholder of a template is left."""
    for key in SUBMISSION:
        if "placeholder" in log.text(key).lower():
            yield Found(log.events(key)[0].line, f"{key} is {log.text(key)}")
