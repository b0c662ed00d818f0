"""T: order and time of the records, the pace of a run, and who shared its machine."""

import statistics
from collections.abc import Iterator, Sequence

from common.evidence.disturbance import disturbed_blocks
from common.evidence.log import Log
from common.evidence.records import YEAR_2000_MS, YEAR_2100_MS, Event, finite, printable
from common.evidence.rules.rule import (
    Found,
    add,
    chain,
    delay_run,
    edit,
    move,
    rule,
    scale,
    shift_from,
    shift_record,
)

RUN_RESULTS = "rules: Run Results"
OWN_MACHINE = "house: a machine of its own"
INIT_LIMIT_MS = {"open": 240 * 60000, "closed": 30 * 60000}
ON_DATA = ("dataset_fingerprint", "block_start", "block_stop", "epoch_start", "epoch_stop", "eval_start")
OWN_GAP_MS, FOREIGN_GAP_MS = 50, 1000  # between init_stop and run_start; own writer: up to 1
MAX_GAP_MS = 10 * 60000  # between init_stop and run_start; published logs: up to 57 s
UNEVEN = 3.0  # times the median pace; published runs that change the image size stay below 2
STEADY = 2.0  # times the slowest block; committed sets without the methods below stay at 1.24
CHANGED = 4.5  # where a method changes the work: from half the width on, images have four times the pixels
CHANGE_THE_WORK = (
    "layer_freezing",
    "progressive_crops",
    "progressive_resizing",
    "selective_backprop",
    "seq_length_warmup",
)


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


def span_of(log: Log) -> tuple[int, int]:
    """Read the lines of run_start and run_stop; those around the records where one is missing."""
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
    first, last = span_of(log)
    start, stop = log.first("run_start"), log.last("run_stop")
    events = [event for event in log.records if first <= event.line <= last]
    low = start.time_ms if start else 0
    high = stop.time_ms if stop and stop.time_ms >= low else YEAR_2100_MS  # else: T201
    ends = {event.key: high for event in events if event.key == "eval_accuracy"}
    return events, [e for e in events if not low <= e.time_ms <= ends.get(e.key, e.time_ms)]


@rule("T202", "error", RUN_RESULTS, breaks=shift_record("dataset_fingerprint", -2000))
def the_run_is_timed(log: Log) -> Iterator[Found]:
    """Nothing in the run is stamped before run_start, and no accuracy after run_stop."""
    return (Found(event.line, event.key) for event in (() if log.is_in_order else events_of_run(log)[1]))


@rule("T213", "strict", RUN_RESULTS, breaks=shift_record("block_stop", -2000))
def time_advances(log: Log) -> Iterator[Found]:
    """Time never goes back between run_start and run_stop."""
    if log.is_in_order:
        return iter(())
    events, outside = events_of_run(log)
    return find_steps_back([event for event in events if event not in outside] if outside else events)


@rule("T214", "strict", "logging: time_ms", breaks=edit("opt_name", time_ms=YEAR_2100_MS + 1))
def time_is_ours(log: Log) -> Iterator[Found]:
    """time_ms lies in the years 2000 to 2099."""
    if min(log.times) >= YEAR_2000_MS and max(log.times) < YEAR_2100_MS:
        return iter(())
    events = (event for event in log.records if not YEAR_2000_MS <= event.time_ms < YEAR_2100_MS)
    return (Found(event.line, f"{event.key} at {event.time_ms}") for event in events)


@rule("T203", "warning", RUN_RESULTS, breaks=shift_record("seed", -2000))
def time_advances_outside(log: Log) -> Iterator[Found]:
    """Time never goes back outside the run."""
    if log.is_in_order:
        return
    start, stop = span_of(log)
    yield from find_steps_back([event for event in log.records if event.line < start])
    yield from find_steps_back([event for event in log.records if event.line > stop])


@rule("T204", "error", RUN_RESULTS, breaks=shift_from("init_stop", 0, 5 * 3600_000))
def init_is_short(log: Log) -> Iterator[Found]:
    """Initialization takes at most 240 minutes (open) or 30 (closed)."""
    start, stop = log.first("init_start"), log.last("init_stop")
    limit = INIT_LIMIT_MS.get(log.text("submission_division"), INIT_LIMIT_MS["open"])
    if start and stop and stop.time_ms - start.time_ms >= limit:
        yield Found(stop.line, f"{(stop.time_ms - start.time_ms) / 60000:.1f} min")


@rule("T205", "strict", RUN_RESULTS, breaks=shift_record("init_stop", -100))
def run_follows_init(log: Log) -> Iterator[Found]:
    """run_start follows init_stop in 50 ms (foreign logs: a second); the time between belongs to neither."""
    stop, start = log.first("init_stop"), log.first("run_start")
    limit = OWN_GAP_MS if log.is_ours else FOREIGN_GAP_MS
    if stop and start and limit < start.time_ms - stop.time_ms <= MAX_GAP_MS:
        yield Found(start.line, f"{(start.time_ms - stop.time_ms) / 1000:.3g} s")


@rule("T217", "error", RUN_RESULTS, breaks=shift_from("run_start", 0, MAX_GAP_MS + 1000))
def the_run_follows_init_soon(log: Log) -> Iterator[Found]:
    """run_start follows init_stop within ten minutes."""
    stop, start = log.first("init_stop"), log.first("run_start")
    if stop and start and start.time_ms - stop.time_ms > MAX_GAP_MS:
        yield Found(start.line, f"{(start.time_ms - stop.time_ms) / 60000:.0f} minutes")


@rule("T206", "error", RUN_RESULTS, breaks=move("eval_accuracy", before="run_start"))
def evaluation_is_timed(log: Log) -> Iterator[Found]:
    """No eval_accuracy stands outside the run."""
    start, stop = span_of(log)
    return (Found(e.line, "") for e in log.events("eval_accuracy") if not start < e.line < stop)


@rule("T207", "strict", RUN_RESULTS, breaks=add("run_stop", key="a"))
def run_stop_is_last(log: Log) -> Iterator[Found]:
    """run_stop is the last record."""
    stop = log.last("run_stop")
    if stop and stop.line < log.records[-1].line:
        yield Found(log.records[-1].line, f"{printable(log.records[-1].key, 40)} follows")


@rule("T209", "error", RUN_RESULTS, breaks=move("dataset_fingerprint", before="run_start"))
def data_is_touched_in_the_run(log: Log) -> Iterator[Found]:
    """The data set is touched only between run_start and run_stop."""
    start, stop = span_of(log)
    return (Found(e.line, e.key) for e in log.events(*ON_DATA) if not start < e.line < stop)


@rule("T210", "strict", RUN_RESULTS, breaks=delay_run("run_stop", 0, 2000))
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
        first, last = before.number("epoch_num"), after.number("epoch_num")
        if first is not None and last is not None and last > first and after.time_ms > before.time_ms:
            paces.append((after, (after.time_ms - before.time_ms) / (last - first)))
    if len(paces) < 3:
        return
    usual = statistics.median(pace for _, pace in paces)
    for event, pace in paces:
        if not usual / UNEVEN < pace < usual * UNEVEN:
            yield Found(event.line, f"{pace / usual:.1f} times the usual time")


@rule("T212", "warning", RUN_RESULTS, breaks=shift_from("init_stop", 0, -19_500))
def the_model_is_built_in_init(log: Log) -> Iterator[Found]:
    """Initialization of a full run takes a second: the model is built between init_start and init_stop."""
    start, stop = log.first("init_start"), log.last("init_stop")
    if start and stop and not log.is_proxy and 0 <= stop.time_ms - start.time_ms < 1000:
        yield Found(stop.line, f"{stop.time_ms - start.time_ms} ms")


@rule("T215", "strict", RUN_RESULTS, breaks=add("epoch_stop", at=2, key="resumed", value=7))
def the_run_is_one_piece(log: Log) -> Iterator[Found]:
    """A run is one piece; one that was resumed from a checkpoint counts for no score."""
    return (Found(e.line, f"before step {printable(e.value, 40)}") for e in log.events("resumed"))


@rule("T216", "strict", RUN_RESULTS, breaks=add("quality_target", key="stop_at_target", value=False))
def the_run_is_to_stop_at_the_target(log: Log) -> Iterator[Found]:
    """A run stops at its target; one that trains on lies in the folder of a study and counts for no score."""
    setting = log.first("stop_at_target")
    if setting and log.is_study and not log.lies_in_study:
        yield Found(setting.line, "stop_at_target is false")


# The pace of a run, and who shared its machine.


@rule(
    "T231",
    "warning",
    OWN_MACHINE,
    breaks=chain(delay_run("epoch_stop", 1, 50_000), scale("throughput", 40 / 90, at=1)),  # 90 s, not 40
)
def the_pace_stays(log: Log) -> Iterator[Found]:
    """No block trains twice as fast as another; 4.5 times where a method changes the work of a step."""
    rates = [(event, finite(event.value)) for event in log.events("throughput")]
    known = [(rate, event) for event, rate in rates if rate is not None and rate > 0]
    if not known or log.is_resumed:  # the interruption lies in a block
        return
    methods = {event.value for event in log.events("method") if isinstance(event.value, str)}
    limit = STEADY if methods.isdisjoint(CHANGE_THE_WORK) else CHANGED
    (slow, event), (fast, other) = (choose(known, key=lambda pair: pair[0]) for choose in (min, max))
    if fast > limit * slow:
        text = f"{slow:.4g} samples/s here, {fast:.4g} in line {other.line}: {fast / slow:.1f} times as fast"
        yield Found(event.line, text)


@rule(
    "T232",
    "warning",
    OWN_MACHINE,
    breaks=add("train_loss", at=1, key="machine_load", value=1.0, cores=2, steal=0, threads=2),
)
def the_machine_is_ours(log: Log) -> Iterator[Found]:
    """Nobody else computes on the processors and GPUs of a run, and nothing slows them down."""
    return (Found(event.line, text) for event, text in disturbed_blocks(log))


@rule(
    "T233", "warning", OWN_MACHINE, breaks=add("train_loss", at=1, key="threads_lowered", value=1, before=2)
)
def the_number_of_threads_stays(log: Log) -> Iterator[Found]:
    """A run keeps the threads that its head states; one that gave way to other programs is no measure."""
    first, asked = log.first("num_threads"), log.threads or 0
    number = finite(first.value) if first else None
    if first and number is not None and number < asked:
        yield Found(first.line, f"threads: {number:g}, of {asked} that the head of the log states")
    for event in log.events("threads_lowered"):
        yield Found(event.line, f"threads: {printable(event.value, 40)} from here on")
