"""Q: evaluations, their accuracy, and the target."""

import statistics
from collections.abc import Iterator
from typing import Any

from common.evidence.compare.masked_accuracy import OFFICIAL
from common.evidence.log import ABORTED, TARGETS, Log
from common.evidence.records import finite, printable
from common.evidence.rules.rule import Found, Lines, add, chain, edit, edit_all, miss_target, rule

QUALITY = "rules: Quality measure"
TOTALS = {"resnet": 50000, "bert": OFFICIAL}  # images; masked tokens of the official 10,000 samples


@rule("Q301", "error", "logging: eval_accuracy", breaks=edit("eval_accuracy", value=-0.1))
def accuracy_is_a_fraction(log: Log) -> Iterator[Found]:
    """eval_accuracy is a number from 0 to below 1."""
    events = log.events("eval_accuracy")
    was_ended = log.is_ours and log.is_honest_miss and not log.came_to_its_end  # by a fault, and says so
    if not events and not was_ended:
        yield Found(0, "no eval_accuracy")
    for event in events:
        accuracy = finite(event.value)
        if accuracy is None or not 0 <= accuracy < 1:
            yield Found(event.line, printable(event.value, 40))


@rule("Q302", "error", QUALITY, breaks=miss_target)
def success_means_the_target(log: Log) -> Iterator[Found]:
    """A success has its last accuracy at the target."""
    stop = log.last("run_stop")
    if stop and log.status == "success" and not log.is_converged:
        reached = f"{log.curve[-1].accuracy:.5f}" if log.curve else "nothing"
        yield Found(stop.line, f"reached {reached} of {log.target:g}")


@rule("Q312", "error", "rules: Run Results", breaks=edit("run_stop", status="done"))
def status_is_known(log: Log) -> Iterator[Found]:
    """status is success or aborted."""
    stop = log.last("run_stop")
    if stop and log.status not in ("success", *ABORTED):
        yield Found(stop.line, printable(log.status, 40))


@rule("Q313", "error", "rules: Run Results", breaks=edit("run_stop", status="aborted"))
def the_target_is_a_success(log: Log) -> Iterator[Found]:
    """A run that reaches its target is not aborted."""
    stop, reached = log.last("run_stop"), log.reached
    if stop and reached and not log.is_study and log.status in ABORTED:
        yield Found(stop.line, f"{reached.accuracy:.5f} of {log.target:g}")


@rule("Q303", "strict", "rules: Run Results", breaks=edit("eval_accuracy", value=0.8, correct=40000))
def first_success_ends_the_run(log: Log) -> Iterator[Found]:
    """Nothing is evaluated after the target is reached, but in a study."""
    if log.is_study:
        return  # T216
    passed = [event for event in log.events("eval_accuracy") if (finite(event.value) or 0) >= log.target]
    last = log.last("eval_accuracy")
    if passed and last and last.line > passed[0].line:
        yield Found(last.line, f"line {passed[0].line} had reached it")


@rule("Q304", "strict", "rules: Epoch numbering", breaks=edit("eval_accuracy", at=1, epoch_num=4))
def evaluations_advance(log: Log) -> Iterator[Found]:
    """Each eval_accuracy has an epoch_num above the one before."""
    return find_repeats(log, is_equal=True)


@rule("Q314", "error", "rules: Epoch numbering", breaks=edit("eval_accuracy", at=1, epoch_num=3))
def evaluations_never_go_back(log: Log) -> Iterator[Found]:
    """Each eval_accuracy has an epoch_num, a number not below the one before."""
    return find_repeats(log, is_equal=False)


def find_repeats(log: Log, *, is_equal: bool) -> Iterator[Found]:
    """Yield the evaluations whose epoch_num equals the highest one before, or is missing or below it."""
    before = -1.0  # the first may be of the untrained model, at 0
    for event in log.events("eval_accuracy"):
        epoch = event.number("epoch_num")
        if epoch == before if is_equal else epoch is None or epoch < before:
            yield Found(event.line, f"{printable(event.metadata.get('epoch_num'), 40)} after {before:g}")
        before = before if epoch is None else max(epoch, before)


@rule("Q305", "error", "house: exact evaluation", breaks=edit("eval_accuracy", correct=1))
def accuracy_is_the_quotient(log: Log) -> Iterator[Found]:
    """The accuracy is correct / total, with the same total each time."""
    totals = set()
    for event in log.events("eval_accuracy"):
        accuracy, correct, total = finite(event.value), event.number("correct"), event.number("total")
        if correct is None or total is None:
            if log.is_ours:
                yield Found(event.line, "no correct and total")
            continue
        if accuracy is None or not 0 <= accuracy < 1:
            continue  # Q301
        totals.add(total)
        if total <= 0 or abs(accuracy - correct / total) > 1e-6 or len(totals) > 1:
            yield Found(event.line, f"{accuracy:g} is not {correct:.0f} / {total:.0f}, or the total changed")


@rule("Q306", "strict", "rules: Benchmarks", breaks=edit("quality_target", value=0.5))
def target_is_the_official_one(log: Log) -> Iterator[Found]:
    """The target of a full run is at least the benchmark's."""
    event, official = log.first("quality_target"), TARGETS.get(log.benchmark)
    if event and official and not log.is_proxy and (finite(event.value) or 0) < official:
        yield Found(event.line, f"{printable(event.value, 40)} is below {official}")


def evaluate_again(lines: Lines) -> Lines:
    """Add an evaluation without an accuracy."""
    keys = {"eval_stop": "INTERVAL_END", "eval_start": "INTERVAL_START"}
    return chain(*(add("eval_accuracy", key=key, event_type=kind) for key, kind in keys.items()))(lines)


@rule("Q307", "strict", "rules: Run Results", breaks=evaluate_again)
def no_evaluation_is_hidden(log: Log) -> Iterator[Found]:
    """Each evaluation logs its accuracy."""
    stops, accuracies = log.events("eval_stop"), log.events("eval_accuracy")
    if stops and len(stops) != len(accuracies):
        yield Found(stops[-1].line, f"{len(stops)} eval_stop, {len(accuracies)} eval_accuracy")


@rule("Q308", "strict", QUALITY, breaks=edit("eval_accuracy", at=2, epoch_num=13))
def the_cadence_is_constant(log: Log) -> Iterator[Found]:
    """Evaluations are equally far apart, but for the first and for the last of a training that ends."""
    places = [event.number("epoch_num") for event in log.events("eval_accuracy")]
    if None in places or len(places) < 4:
        return
    steps = [b - a for a, b in zip(places, places[1:], strict=False) if a is not None and b is not None]
    usual = statistics.median(steps)
    if min(steps) <= 0:
        return  # Q304
    steps = steps[1:] if places[0] == 0 else steps  # the untrained model
    for index, step in enumerate(steps[:-1] if steps[-1] < usual else steps):
        if abs(step - usual) > usual / 10:
            event = log.events("eval_accuracy")[len(places) - len(steps) + index]
            yield Found(event.line, f"{step:g} after the one before, usually {usual:g}")


def count_to_40000(record: dict[str, Any]) -> dict[str, object]:
    """Turn an accuracy into one of 40,000 samples or tokens."""
    correct = round(record["value"] * 40000)
    return {"value": correct / 40000, "correct": correct, "total": 40000}


@rule("Q309", "error", QUALITY, breaks=edit_all("eval_accuracy", count_to_40000))
def everything_is_evaluated(log: Log) -> Iterator[Found]:
    """The total of an evaluation is every sample (resnet), or all 428,235 masked tokens (bert)."""
    expected: object = TOTALS.get(log.benchmark)
    if log.is_proxy:  # no key states the number of masked tokens in the small set
        expected = log.value("eval_samples") if log.benchmark == "resnet" else None
    if not log.is_ours or expected is None:
        return
    for event in log.events("eval_accuracy"):
        total = event.number("total")
        if total is not None and total != expected:
            yield Found(event.line, f"{total:.0f} instead of {printable(expected, 40)}")


@rule("Q311", "error", "house: loss is logged", breaks=edit("train_loss", value=float("nan")))
def the_loss_is_a_number(log: Log) -> Iterator[Found]:
    """train_loss is a finite number."""
    for event in log.events("train_loss"):
        if finite(event.value) is None:
            yield Found(event.line, printable(event.value, 40))
