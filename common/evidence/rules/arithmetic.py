"""K, T, Q: figures of one log that follow from each other, so that nobody can change one of them alone."""

import math
from bisect import bisect
from collections.abc import Iterator
from typing import Any

from common import yaml_file
from common.errors import UserError
from common.evidence.compare.factors import evaluation_minutes
from common.evidence.disturbance import disturbed_blocks
from common.evidence.log import MAX_DRIFT_MS, Log
from common.evidence.recipes import configuration_of, count_steps, evaluation_steps, flat
from common.evidence.records import Event, finite, is_rounded, printable
from common.evidence.rules.keys import SETTINGS
from common.evidence.rules.rule import (
    PLAN,
    Found,
    chain,
    delay_run,
    edit,
    edit_all,
    remove,
    rule,
    scale,
    state,
)

HEAD = "house: the log states what ran"
CLOCKS = "house: monotonic clock"
QUALITY = "rules: Quality measure"
SLACK_S, SLACK = 0.05, 0.001  # between two figures for one duration; own logs: up to 4.5 ms
FASTEST_EVALUATION = 6.0  # times the rate of training; published and own sets: up to 3.9
ENDED_WITH = ("samples", "duration_ms", "clock_drift_ms")  # in a run_stop without a reason
STATED = {  # record: the key of the configuration in the head of the log
    "quality_target": "target",
    "stop_at_target": "stop_at_target",
    "benchmark_size": "size",
    "configuration_name": "configuration",
    "submission_division": "submission.division",
    "global_batch_size": "global_batch_size",
    "gradient_compression": "gradient_compression",
    "opt_name": "optimizer.name",
    "opt_base_learning_rate": "optimizer.learning_rate",
    "opt_weight_decay": "optimizer.weight_decay",
    "train_samples": "data.num_train_samples",
    "eval_samples": "data.num_evaluation_samples",
}
NAMED_IN_OPTIMIZER = ("muon",)  # methods: with `optimizer.name: adamw` the record says muon_adamw
ALSO_NEEDED = ("device", "num_accelerators", "num_ranks", "num_threads", "dataset_fingerprint")


def stated_settings(log: Log) -> dict[str, Any]:
    return configuration_of(log.settings) or {} if log.is_ours else {}


# The head and its records.


@rule("K123", "strict", HEAD, breaks=state(**PLAN, target=0.8))
def records_repeat_the_head(log: Log) -> Iterator[Found]:
    """Target, size, batch, optimizer, methods, data and threads in the records are those of the head."""
    settings = stated_settings(log)
    methods = methods_on(settings)
    stated = flat(settings)
    if methods and "optimizer.name" in stated:
        prefixes = [name for name in NAMED_IN_OPTIMIZER if name in methods]
        stated["optimizer.name"] = "_".join([*prefixes, str(stated["optimizer.name"])])
    for key, name in STATED.items():
        event = log.first(key)
        if event and name in stated and not are_equal(event.value, stated[name]):
            yield Found(event.line, f"{key}: {contrast(event.value, stated[name])}")
    if methods is not None:
        yield from find_other_methods(log, methods)
    threads = log.first("num_threads")
    if threads and log.threads is not None and (finite(threads.value) or 0) > log.threads:
        yield Found(threads.line, f"num_threads: {contrast(threads.value, log.threads)}")


def methods_on(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Leave out the methods that are off in a configuration; None if it states no methods."""
    methods = settings.get("methods")
    if not isinstance(methods, dict):
        return None
    return {name: value for name, value in methods.items() if value is not False}


def contrast(recorded: object, stated: object) -> str:
    return f"the record says {printable(recorded, 40)}, the head {printable(stated, 40)}"


@rule("K124", "strict", HEAD, breaks=remove("train_loss", at=1))
def nothing_is_left_out(log: Log) -> Iterator[Found]:
    """Our own log has its head and what repeats it; its evaluations, blocks and run_stop are whole."""
    if not log.is_ours:
        return
    if not stated_settings(log):
        yield Found(0, why_unstated(log))
    if log.first("run_start"):
        needed_once = (*STATED.keys() - {*SETTINGS}, *ALSO_NEEDED)  # K103 asks for those
        yield from (Found(0, f"no {key}") for key in sorted(needed_once) if log.first(key) is None)
    stop, evaluated = log.last("run_stop"), log.events("eval_accuracy")
    if stop and log.came_to_its_end:
        missing = [name for name in ENDED_WITH if stop.number(name) is None]
        yield from (Found(stop.line, f"no {name} in run_stop") for name in missing)
    for event in (*evaluated, *log.events("train_loss")):
        if event.number("samples") is None:
            yield Found(event.line, f"no samples in {event.key}")
    num_blocks = max(len(log.events("block_stop")), sum(e.number("samples") != 0 for e in evaluated))
    needed = dict.fromkeys(("eval_start", "eval_stop"), len(evaluated))
    needed |= dict.fromkeys(("block_start", "throughput", "train_loss", "machine_load"), num_blocks)
    for key, number in needed.items():
        if (given := len(log.events(key))) < number:
            yield Found(0, f"{given} {key} where {number} are needed")


def why_unstated(log: Log) -> str:
    try:
        yaml_file.parse("\n".join(log.settings), "the configuration in its head")
    except UserError as error:
        return str(error)
    return "no configuration in its head"


@rule("K125", "strict", HEAD, breaks=edit_all("train_loss", lambda r: {"value": round(r["value"], 4)}))
def losses_have_all_digits(log: Log) -> Iterator[Found]:
    """Our own log states losses with the digits of float32 or more, by which copies are found."""
    losses = [(event, finite(event.value)) for event in log.events("train_loss") if log.is_ours]
    rounded = [event for event, loss in losses if loss is not None and is_rounded(loss)]
    if len(rounded) > max(1, len(losses) / 2):
        yield Found(rounded[0].line, f"{len(rounded)} of {len(losses)} are rounded")


def are_equal(value: object, other: object) -> bool:
    """True for equal values; numbers are compared as floats, and `fused_x` equals `x`."""
    number, expected = finite(value), finite(other)
    if number is not None and expected is not None:
        return math.isclose(number, expected, rel_tol=1e-9)
    if isinstance(value, str) and isinstance(other, str):
        return value.removeprefix("fused_") == other.removeprefix("fused_")
    return type(value) is type(other) and value == other


def find_other_methods(log: Log, methods: dict[str, Any]) -> Iterator[Found]:
    """Yield the methods that only the head or only the records name, and settings that differ."""
    recorded = {str(event.value): event for event in log.events("method")}
    for name in sorted(methods.keys() ^ recorded.keys()):
        where = "records" if name in methods else "head"
        line = recorded[name].line if name in recorded else 0
        yield Found(line, f"no method {printable(name, 40)} in its {where}")
    for name in methods.keys() & recorded.keys():
        asked, settings = methods[name], recorded[name].metadata.get("settings")
        if not isinstance(asked, dict) or not isinstance(settings, dict):
            continue
        for key in asked.keys() & settings.keys():
            if not are_equal(asked[key], settings[key]):
                yield Found(recorded[name].line, f"{name}.{key}: {contrast(settings[key], asked[key])}")


@rule("Q315", "strict", QUALITY, breaks=state(**PLAN | {"evaluate_every": "5ep"}))
def evaluations_follow_the_plan(log: Log) -> Iterator[Found]:
    """Evaluations stand where evaluate_every and evaluate_from of the head put them."""
    settings = flat(stated_settings(log))
    batch_size, planned = settings.get("global_batch_size"), planned_evaluations(settings)
    if planned is None or not isinstance(batch_size, int):
        if settings:  # else: K124
            yield Found(0, "its head does not say when it was to be evaluated")
        return
    for event in log.events("eval_accuracy"):
        samples, step = event.number("samples"), next(planned, None)
        if samples is None:
            return
        if step is None or samples != step * batch_size:
            following = "" if step is None else f", the next after {step * batch_size:,}"
            yield Found(event.line, f"no evaluation was planned after {samples:,.0f} samples{following}")
            return


def planned_evaluations(settings: dict[str, Any]) -> Iterator[int] | None:
    """Return the steps after which a run was to be evaluated; None where its head does not say so."""
    try:
        batch_size = settings["global_batch_size"]
        per_epoch = settings["data.num_train_samples"] // batch_size
        last, every, offset, earliest = (
            count_steps(settings.get(name, "0sp"), batch_size, per_epoch)
            for name in ("max_duration", "evaluate_every", "evaluate_offset", "evaluate_from")
        )
        budget = settings.get("budget", 1.0)
        return evaluation_steps(
            round(last * budget),
            every,
            offset=offset,
            earliest=round(earliest * budget),
            is_untrained=settings.get("evaluate_untrained") is True,
        )
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


# Samples and times.


@rule("Q316", "strict", HEAD, breaks=edit("run_stop", samples=1281167))
def samples_agree(log: Log) -> Iterator[Found]:
    """Losses, evaluations and run_stop state the samples trained so far, as epoch_num does for bert."""
    trained, keys = None, ("throughput", "train_loss", "eval_accuracy", "run_stop")
    for event in log.events(*keys) if log.is_ours else ():
        samples, epoch = event.number("samples"), event.number("epoch_num")
        if log.benchmark == "bert" and epoch is not None and epoch != samples:
            number = "no" if samples is None else f"{samples:,.0f}"
            yield Found(event.line, f"epoch_num {epoch:,.0f} after {number} samples")
        if samples is None:
            continue
        if event.key == "throughput":
            trained = samples
        elif trained is not None and samples != trained:
            yield Found(event.line, f"{event.key} after {samples:,.0f} samples, trained on {trained:,.0f}")


@rule("Q310", "error", "house: throughput is logged", breaks=scale("throughput", 1.005, at=1))
def throughput_is_what_was_trained(log: Log) -> Iterator[Found]:
    """A block's throughput times its time is its samples, to 50 ms and 0.1 %."""
    if not log.is_ours or log.is_resumed:
        return
    started, before = None, 0.0
    drift_s = (log.stopped("clock_drift_ms") or 0.0) / 1000  # the clock was set: T208, T220
    for event in log.events("block_start", "throughput"):
        if event.key == "block_start":
            started = event.time_ms
            continue
        rate, samples = finite(event.value), event.number("samples")
        if rate is None or rate <= 0 or samples is None or samples <= before or started is None:
            yield Found(event.line, f"{printable(event.value, 40)}, without a block or its samples")
            continue
        seconds, expected = (event.time_ms - started) / 1000, (samples - before) / rate
        slack = SLACK_S + SLACK * seconds
        if not min(drift_s, 0.0) - slack <= seconds - expected <= max(drift_s, 0.0) + slack:
            what = f"{rate:.1f}/s for {samples - before:.0f} samples"
            yield Found(event.line, f"{what} in {seconds:.3f} s, which take {expected:.3f} s")
        started, before = None, samples


def read_clocks(log: Log) -> tuple[Event, float, float] | None:
    """Read run_stop, and the milliseconds of the run by the wall clock and by the monotonic one."""
    stop, duration = log.last("run_stop"), log.stopped("duration_ms")
    if stop is None or duration is None or not log.minutes or log.is_resumed:
        return None
    return stop, log.minutes * 60000, duration


@rule("T208", "warning", CLOCKS, breaks=edit("run_stop", duration_ms=1, clock_drift_ms=210_029))
def the_clock_was_not_set_forward(log: Log) -> Iterator[Found]:
    """The wall clock was not set forward in a run by more than a second."""
    if both := read_clocks(log):
        stop, wall, duration = both
        if wall - duration > MAX_DRIFT_MS:
            yield Found(stop.line, f"the run takes {by_both_clocks(wall, duration)}")


def by_both_clocks(wall: float, duration: float) -> str:
    scored = f"{wall / 1000:.3f} s by the wall clock, which is scored"
    return f"{scored}, and {duration / 1000:.3f} s by the monotonic clock"


def find_step_back(log: Log, above_ms: float, up_to_ms: float = math.inf) -> Iterator[Found]:
    """Yield run_stop where the wall clock was set back by so much; it may be 0.1 % slow besides."""
    if both := read_clocks(log):
        stop, wall, duration = both
        if above_ms < duration - wall - SLACK * duration <= up_to_ms:
            text = f"the clock was set back by {(duration - wall) / 1000:.2f} s; make the run again: it takes"
            yield Found(stop.line, f"{text} {by_both_clocks(wall, duration)}")


@rule("T220", "strict", CLOCKS, breaks=edit("run_stop", duration_ms=212_000, clock_drift_ms=-1970))
def the_clock_was_not_set_back(log: Log) -> Iterator[Found]:
    """The wall clock was not set back in a run by more than a second and 0.1 %."""
    return find_step_back(log, MAX_DRIFT_MS)


@rule("T221", "warning", CLOCKS, breaks=edit("run_stop", duration_ms=211_000, clock_drift_ms=-970))
def the_clock_made_no_step_back(log: Log) -> Iterator[Found]:
    """The wall clock was not set back in a run by 50 ms to a second, as NTP does."""
    return find_step_back(log, 1000 * SLACK_S, MAX_DRIFT_MS)


@rule("T218", "strict", CLOCKS, breaks=edit("run_stop", clock_drift_ms=100))
def clocks_agree(log: Log) -> Iterator[Found]:
    """The wall clock is the monotonic clock and the stated drift, to 50 ms."""
    if both := read_clocks(log):
        stop, wall, duration = both
        drift = log.stopped("clock_drift_ms") or 0.0
        if abs(wall - duration - drift) > 1000 * SLACK_S:
            text = f"{by_both_clocks(wall, duration)}, with a stated drift of {drift / 1000:.3f} s"
            yield Found(stop.line, text)


@rule(
    "T219", "strict", QUALITY, breaks=chain(*(delay_run("eval_stop", number, -1990) for number in range(5)))
)
def evaluations_take_their_time(log: Log) -> Iterator[Found]:
    """Evaluation is at most six times as fast as training, of which it is a third."""
    if (finite(log.value("num_ranks")) or 1) > 1 and not log.value("num_accelerators"):
        return  # the exchange of gradients between processors takes longer than the step
    if was_slow_in_every_block(log):
        return
    starts, stops = log.events("eval_start"), log.events("eval_stop")
    number, samples = min(len(starts), len(stops)), finite(log.value("eval_samples"))
    if not samples or not number or not log.minutes or log.is_resumed or not log.came_to_its_end:
        return
    evaluated_s, rate = 60 * evaluation_minutes(log), training_rate(log, starts[-1])
    times = number * samples / (max(evaluated_s, 0.001) * rate) if rate else 0.0
    if times > FASTEST_EVALUATION:
        text = f"{number} of {samples:,.0f} samples in {evaluated_s:.2f} s, {times:.1f} times as fast"
        yield Found(stops[0].line, text)


def was_slow_in_every_block(log: Log) -> bool:
    """True if other programs slowed the training down in each of its blocks, as T232 and T233 tell."""
    ends = [event.line for event in log.events("throughput")]
    slow = {bisect(ends, block.event.line) - 1 for block in disturbed_blocks(log)}  # logged behind the rate
    slow |= {bisect(ends, event.line) for event in log.events("threads_lowered")}
    return bool(ends) and slow.issuperset(range(len(ends)))


def training_rate(log: Log, end: Event) -> float:
    """Compute samples/s of training: the fastest block of our own logs, else the mean up to `end`, or 0."""
    rates = [finite(event.value) or 0.0 for event in log.events("throughput")] if log.is_ours else []
    start, trained = log.first("run_start"), log.curve[-1].samples if log.curve else None
    if rates or start is None or not trained:
        return max(rates, default=0.0)
    until = (end.time_ms - start.time_ms) / 60000
    minutes = until - evaluation_minutes(log, until)
    return trained / (60 * minutes) if minutes > 0 else 0.0
