"""T: the pace of a run, and who shared its machine."""

from collections.abc import Iterator

from common.evidence.disturbance import disturbed_blocks
from common.evidence.log import Log
from common.evidence.records import finite, printable
from common.evidence.rules.rule import Found, chain, delay_run, record_of, replace_record, rewrite, rule

STEADY = 2.0  # times the slowest block; committed sets without the methods below stay at 1.24
CHANGED = 4.5  # where a method changes the work: from half the width on, images have four times the pixels
CHANGE_THE_WORK = (
    "layer_freezing",
    "progressive_crops",
    "progressive_resizing",
    "selective_backprop",
    "seq_length_warmup",
)


def slow_down(line: str) -> list[str]:
    """Let a block take 90 seconds in place of 40."""
    return [rewrite(line, value=record_of(line)["value"] * 40 / 90)]


@rule(
    "T231",
    "warning",
    "house: a machine of its own",
    breaks=chain(delay_run("epoch_stop", 1, 50_000), replace_record("throughput", slow_down, at=1)),
)
def the_pace_stays(log: Log) -> Iterator[Found]:
    """No block trains twice as fast as another; 4.5 times where a method changes the work of a step."""
    rates = [(event, finite(event.value)) for event in log.events("throughput")]
    known = [(rate, event) for event, rate in rates if rate is not None and rate > 0]
    if not known:
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
    "house: a machine of its own",
    breaks=replace_record(
        "train_loss",
        lambda line: [line, rewrite(line, key="machine_load", value=1.0, cores=2, steal=0, threads=2)],
        at=1,
    ),
)
def the_machine_is_ours(log: Log) -> Iterator[Found]:
    """Nobody else computes on the processors and GPUs of a run, and nothing slows them down."""
    return (Found(event.line, text) for event, text in disturbed_blocks(log))


@rule(
    "T233",
    "warning",
    "house: a machine of its own",
    breaks=replace_record(
        "train_loss", lambda line: [line, rewrite(line, key="threads_lowered", value=1, before=2)], at=1
    ),
)
def the_number_of_threads_stays(log: Log) -> Iterator[Found]:
    """A run keeps the threads that its head states; one that gave way to other programs is no measure."""
    first, stated = log.first("num_threads"), log.header("threads")
    number = finite(first.value) if first else None
    asked = int(stated) if stated.isdecimal() and log.value("num_accelerators") == 0 else 0
    if first and number is not None and number < asked:
        yield Found(first.line, f"{number:g}, of {asked} that the head of the log states")
    for event in log.events("threads_lowered"):
        yield Found(event.line, f"{printable(event.value, 40)} from here on")
