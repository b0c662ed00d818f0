"""T: order and time of the records."""

import statistics
from collections.abc import Iterator, Sequence

from common.evidence.log import Log
from common.evidence.records import YEAR_2000_MS, YEAR_2100_MS, Event, finite, printable
from common.evidence.rules.rule import (
    Found,
    delay_run,
    edit,
    move,
    replace_record,
    rewrite,
    rule,
    shift_from,
    shift_record,
)

INIT_LIMIT_MS = {"open": 240 * 60000, "closed": 30 * 60000}
ON_DATA = ("dataset_fingerprint", "block_start", "block_stop", "epoch_start", "epoch_stop", "eval_start")
MAX_GAP_MS = 10 * 60000  # between init_stop and run_start; published logs: up to 57 s
UNEVEN = 3.0  # times the median pace; published runs that change the image size stay below 2


@rule("T201", "error", "logging: order", breaks=move("run_start", before="init_stop"))
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
    """Return the lines of run_start and run_stop; those around the records where one is missing."""
    start, stop = log.first("run_start"), log.last("run_stop")
    return (start.line if start else 0), (stop.line if stop else log.records[-1].line + 1)


def find_steps_back(events: Sequence[Event]) -> Iterator[Found]:
    known = [event for event in events if YEAR_2000_MS <= event.time_ms < YEAR_2100_MS]  # others: T214
    for before, after in zip(known, known[1:], strict=False):
        if after.time_ms < before.time_ms:
            yield Found(after.line, f"{after.key} {before.time_ms - after.time_ms} ms before {before.key}")


def events_of_run(log: Log) -> tuple[list[Event], list[Event]]:
    """Return the records that stand in the run, and those of them that are stamped outside it.

    Where evaluation runs beside the training, blocks end after run_stop; accuracies do not.
    """
    first, last = span(log)
    start, stop = log.first("run_start"), log.last("run_stop")
    events = [event for event in log.records if first <= event.line <= last]
    low = start.time_ms if start else 0
    high = stop.time_ms if stop and stop.time_ms >= low else YEAR_2100_MS  # else: T201
    ends = {event.key: high for event in events if event.key == "eval_accuracy"}
    return events, [e for e in events if not low <= e.time_ms <= ends.get(e.key, e.time_ms)]


@rule("T202", "error", "rules: Run Results", breaks=shift_record("dataset_fingerprint", -2000))
def the_run_is_timed(log: Log) -> Iterator[Found]:
    """Nothing in the run is stamped before run_start, and no accuracy after run_stop."""
    return (Found(event.line, event.key) for event in events_of_run(log)[1])


@rule("T213", "strict", "rules: Run Results", breaks=shift_record("block_stop", -2000))
def time_advances(log: Log) -> Iterator[Found]:
    """Time never goes back between run_start and run_stop."""
    events, outside = events_of_run(log)
    return find_steps_back([event for event in events if event not in outside] if outside else events)


@rule("T214", "strict", "logging: time_ms", breaks=edit("opt_name", time_ms=YEAR_2100_MS + 1))
def time_is_ours(log: Log) -> Iterator[Found]:
    """time_ms lies in the years 2000 to 2099."""
    events = (event for event in log.records if not YEAR_2000_MS <= event.time_ms < YEAR_2100_MS)
    return (Found(event.line, f"{event.key} at {event.time_ms}") for event in events)


@rule("T203", "warning", "rules: Run Results", breaks=shift_record("seed", -2000))
def time_advances_outside(log: Log) -> Iterator[Found]:
    """Time never goes back outside the run."""
    start, stop = span(log)
    yield from find_steps_back([event for event in log.records if event.line < start])
    yield from find_steps_back([event for event in log.records if event.line > stop])


@rule("T204", "error", "rules: Run Results", breaks=shift_from("init_stop", 0, 5 * 3600_000))
def init_is_short(log: Log) -> Iterator[Found]:
    """Initialization takes at most 240 minutes (open) or 30 (closed)."""
    start, stop = log.first("init_start"), log.last("init_stop")
    limit = INIT_LIMIT_MS.get(log.text("submission_division"), INIT_LIMIT_MS["open"])
    if start and stop and stop.time_ms - start.time_ms >= limit:
        yield Found(stop.line, f"{(stop.time_ms - start.time_ms) / 60000:.1f} min")


@rule("T205", "strict", "rules: Run Results", breaks=shift_record("init_stop", -2000))
def run_follows_init(log: Log) -> Iterator[Found]:
    """run_start follows init_stop within a second; the time between them belongs to neither."""
    stop, start = log.first("init_stop"), log.first("run_start")
    if stop and start and 1000 < start.time_ms - stop.time_ms <= MAX_GAP_MS:
        yield Found(start.line, f"{(start.time_ms - stop.time_ms) / 1000:.1f} s")


@rule("T217", "error", "rules: Run Results", breaks=shift_from("run_start", 0, MAX_GAP_MS + 1000))
def the_run_follows_init_soon(log: Log) -> Iterator[Found]:
    """run_start follows init_stop within ten minutes."""
    stop, start = log.first("init_stop"), log.first("run_start")
    if stop and start and start.time_ms - stop.time_ms > MAX_GAP_MS:
        yield Found(start.line, f"{(start.time_ms - stop.time_ms) / 60000:.0f} minutes")


@rule("T206", "error", "rules: Run Results", breaks=move("eval_accuracy", before="run_start"))
def evaluation_is_timed(log: Log) -> Iterator[Found]:
    """No eval_accuracy stands outside the run."""
    start, stop = span(log)
    return (Found(e.line, "") for e in log.events("eval_accuracy") if not start < e.line < stop)


@rule(
    "T207",
    "strict",
    "rules: Run Results",
    breaks=replace_record("run_stop", lambda s: [s, rewrite(s, key="a")]),
)
def run_stop_is_last(log: Log) -> Iterator[Found]:
    """run_stop is the last record."""
    stop = log.last("run_stop")
    if stop and stop.line < log.records[-1].line:
        yield Found(log.records[-1].line, f"{printable(log.records[-1].key, 40)} follows")


@rule("T208", "warning", "house: monotonic clock", breaks=edit("run_stop", duration_ms=1))
def clocks_agree(log: Log) -> Iterator[Found]:
    """The wall clock and the monotonic clock agree within a second."""
    stop = log.last("run_stop")
    duration = finite(stop.metadata.get("duration_ms")) if stop else None
    if stop and duration is not None and log.minutes and abs(log.minutes * 60000 - duration) > 1000:
        yield Found(stop.line, f"{log.minutes * 60:.1f} s and {duration / 1000:.1f} s")


@rule("T209", "error", "rules: Run Results", breaks=move("dataset_fingerprint", before="run_start"))
def data_is_touched_in_the_run(log: Log) -> Iterator[Found]:
    """The data set is touched only between run_start and run_stop."""
    start, stop = span(log)
    return (Found(e.line, e.key) for e in log.records if e.key in ON_DATA and not start < e.line < stop)


@rule("T210", "strict", "rules: Run Results", breaks=delay_run("run_stop", 0, 2000))
def the_run_stops_at_the_target(log: Log) -> Iterator[Found]:
    """A successful run stops within a second of its last accuracy."""
    stop, last = log.last("run_stop"), log.last("eval_accuracy")
    if stop and last and log.is_converged and stop.time_ms - last.time_ms > 1000:
        yield Found(stop.line, f"{(stop.time_ms - last.time_ms) / 1000:.1f} s later")


@rule("T211", "warning", "house: no hidden gap", breaks=delay_run("eval_stop", 2, 200_000))
def the_pace_is_even(log: Log) -> Iterator[Found]:
    """Between evaluations no sample takes three times as long, or a third, of what it usually does."""
    evaluations = log.events("eval_accuracy")
    paces = []  # milliseconds per unit of epoch_num
    for before, after in zip(evaluations, evaluations[1:], strict=False):
        first, last = (finite(event.metadata.get("epoch_num")) for event in (before, after))
        if first is not None and last is not None and last > first and after.time_ms > before.time_ms:
            paces.append((after, (after.time_ms - before.time_ms) / (last - first)))
    if len(paces) < 3:
        return
    usual = statistics.median(pace for _, pace in paces)
    for event, pace in paces:
        if not usual / UNEVEN < pace < usual * UNEVEN:
            yield Found(event.line, f"{pace / usual:.1f} times the usual time")


@rule("T212", "warning", "rules: Run Results", breaks=shift_from("init_stop", 0, -19_500))
def the_model_is_built_in_init(log: Log) -> Iterator[Found]:
    """Initialization of a full run takes a second: the model is built between init_start and init_stop."""
    start, stop = log.first("init_start"), log.last("init_stop")
    if start and stop and not log.is_proxy and 0 <= stop.time_ms - start.time_ms < 1000:
        yield Found(stop.line, f"{stop.time_ms - start.time_ms} ms")


@rule(
    "T215",
    "strict",
    "rules: Run Results",
    breaks=replace_record("epoch_stop", lambda s: [rewrite(s, key="resumed", value=7), s], at=2),
)
def the_run_is_one_piece(log: Log) -> Iterator[Found]:
    """A run is one piece; one that was resumed from a checkpoint counts for no score."""
    return (Found(e.line, f"before step {printable(e.value, 40)}") for e in log.events("resumed"))


@rule(
    "T216",
    "strict",
    "rules: Run Results",
    breaks=replace_record("quality_target", lambda s: [s, rewrite(s, key="stop_at_target", value=False)]),
)
def the_run_is_to_stop_at_the_target(log: Log) -> Iterator[Found]:
    """A run stops at its target; one that trains on lies in the folder of a study and counts for no score."""
    setting = log.first("stop_at_target")
    if setting and log.is_study and not log.lies_in_study:
        yield Found(setting.line, "stop_at_target is false")
