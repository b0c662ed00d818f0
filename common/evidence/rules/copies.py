"""S, X: runs that stand twice. F: runs that were left out of a set."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from common.evidence.compare.factors import crossing
from common.evidence.log import NUM_RUNS, Log, RunSet
from common.evidence.paths import result_name
from common.evidence.recipes import all_differences, recipe_of
from common.evidence.records import TOKEN, finite, is_rounded
from common.evidence.rules.rule import (
    Found,
    Lines,
    Mutation,
    chain,
    edit,
    edit_all,
    has_key,
    record_of,
    retime,
    rule,
    time_of,
)
from common.evidence.rules.sets import SetMutation, change_last, is_of_study

RUN_SETS = "rules: Benchmark Results"
MIN_TIMES = 4  # fewer may agree by chance
ALL_TIMES = ("block_start", "block_stop", "eval_start", "eval_accuracy", "run_stop")
MIN_COUNTS, MIN_TOTAL = 3, 1000  # evaluations, and predictions of each, that do not agree by chance
SAME_MS = 1  # two published runs of a set differ by 8 or more at some evaluation
TOO_CLOSE = 1e-7  # share ** runs: a threshold fitted to published sets (from 1.3e-6), no probability
FIRST_TRIAL = r"-trial0(\+|$)"  # ends the system id of a search's first trial: the recipe as it is


class SetAndStudies(NamedTuple):
    """A run set, and the logs of the studies in its results folder."""

    run_set: RunSet
    studied: Sequence[Log]


# Changes to good logs.


def borrow(key: str, *names: str, of: Lines) -> Mutation:
    """Give the records of a key the values, and these parts of the metadata, that another log has there."""
    records = [record_of(line) for line in of if has_key(line, key)]
    fields = iter([{"value": r["value"]} | {name: r["metadata"][name] for name in names} for r in records])
    return edit_all(key, lambda record: next(fields))


def borrow_trace(sets: list[list[Lines]]) -> list[list[Lines]]:
    """Give the last log of the last set the losses and accuracies of a log of the first."""
    one = sets[0][-1]
    accuracies = borrow("eval_accuracy", "correct", "total", of=one)
    change = chain(borrow("train_loss", of=one), accuracies, edit("seed", value=7))
    return [*sets[:-1], change_last(change)(sets[-1])]


def repeat_times(logs: list[Lines]) -> list[Lines]:
    """Give the last run the times and rates of the first, a day later."""
    times = iter([time_of(line) + 86_400_000 for line in logs[0] if TOKEN in line])
    give_times = partial(retime, change=lambda ms: next(times))
    durations = borrow("run_stop", "duration_ms", of=logs[0])
    return change_last(chain(give_times, borrow("throughput", of=logs[0]), durations))(logs)


def share_losses(*places: int) -> SetMutation:
    """Give the first and the last run equal losses, with all digits of float32."""
    share = chain(*(edit("train_loss", at=at, value=4.712345123291016) for at in places))
    return lambda logs: [share(logs[0]), *logs[1:-1], share(logs[-1])]


def share_counts(logs: list[Lines]) -> list[Lines]:
    """Give the last run the accuracies of the first, with losses of its own."""
    return change_last(borrow("eval_accuracy", "correct", "total", of=logs[0]))(logs)


def reach_exactly(logs: list[Lines]) -> list[Lines]:
    """Let every run pass its target by one sample of the last evaluation."""
    last = edit("eval_accuracy", at=-1, value=37951 / 50000, correct=37951)
    return [last(log) for log in logs]


# Runs that stand twice.


def trace(log: Log) -> object:
    """Return losses and accuracies, which no two trainings share; None if few, which may agree by chance."""
    values = [event.value for event in log.events("train_loss", "eval_accuracy")]
    return values if len(values) > 3 else None


def differ(log: Log, other: Log) -> bool:
    """Return False for a pair that rule S402 (`logs_differ`) reports."""
    return trace(log) is None or trace(log) != trace(other)


def find_repeated(logs: Sequence[Log], describe: Callable[[Log], object]) -> Iterator[tuple[Log, Log]]:
    """Yield (earlier log, log) for each log with the description of an earlier one; None is none."""
    seen: dict[str, Log] = {}
    for log in logs:
        if (value := describe(log)) is not None:
            earlier = seen.setdefault(repr(value), log)
            if earlier is not log:
                yield earlier, log


def report_pairs(pairs: Iterable[tuple[Log, Log]]) -> Iterator[Found]:
    return (Found(0, f"as in {earlier.path}", log) for earlier, log in pairs)


@rule("S402", "error", RUN_SETS, breaks=lambda logs: borrow_trace([logs[:1], logs])[-1])
def logs_differ(logs: Sequence[Log]) -> Iterator[Found]:
    """No run stands in a set twice: equal losses and accuracies."""
    return report_pairs(find_repeated(logs, trace))


@rule("S403", "error", "rules: Random numbers", breaks=change_last(edit("seed", value=1000)))
def seeds_differ(logs: Sequence[Log]) -> Iterator[Found]:
    """Every run has its own seed."""
    return report_pairs(find_repeated(logs, lambda log: None if log.is_resumed else log.value("seed")))


def intervals_ms(log: Log) -> list[int]:
    """List the times of evaluations in ms from run_start, if few also those of blocks; [] if still few."""
    start, events = log.first("run_start"), log.events("eval_accuracy", "run_stop")
    events = events if len(events) >= MIN_TIMES else log.events(*ALL_TIMES)
    if start is None or log.is_resumed or len(events) < MIN_TIMES:
        return []
    return [event.time_ms - start.time_ms for event in events]


@rule("S412", "error", RUN_SETS, breaks=repeat_times)
def times_differ(logs: Sequence[Log]) -> Iterator[Found]:
    """No two runs of a set take the same times, to a millisecond, up to each evaluation."""
    timed = [(times[-1], number, times) for number, log in enumerate(logs) if (times := intervals_ms(log))]
    timed.sort()
    repeated: dict[int, int] = {}
    for index, (last, number, times) in enumerate(timed):
        for later, other, others in timed[index + 1 :]:
            if later > last + SAME_MS:
                break
            pairs = zip(times, others, strict=False)
            if len(times) == len(others) and all(abs(one - two) <= SAME_MS for one, two in pairs):
                repeated.setdefault(max(number, other), min(number, other))
    return report_pairs((logs[first], logs[later]) for later, first in repeated.items())


def exact_losses(log: Log) -> dict[float, float]:
    """Read the losses in full precision, by the samples or the epoch of their record."""
    losses: dict[float, float] = {}
    for event in log.events("train_loss"):
        loss, place = finite(event.value), event.metadata.get("samples", event.metadata.get("epoch_num"))
        if loss is not None and not is_rounded(loss) and isinstance(place, int | float):
            losses[place] = loss
    return losses


def find_shared_losses(logs: Sequence[Log]) -> Iterator[tuple[Log, Log, int]]:
    """Yield pairs of runs with different seeds that have equal losses at equal places, and how many.

    One equal loss may be chance: near 3 the steps of float32 are 2.4e-7, so that two losses with a standard
    deviation of 0.02 agree in about 3 of a million pairs.
    """
    seen: dict[tuple[str, float, float], int] = {}
    shared: Counter[tuple[int, int]] = Counter()
    for number, log in enumerate(logs):
        for place, loss in ({} if log.is_resumed else exact_losses(log)).items():
            first = seen.setdefault((log.benchmark, place, loss), number)
            if first != number and not have_one_seed(logs[first], log):
                shared[first, number] += 1
    return ((logs[a], logs[b], count) for (a, b), count in shared.items())


def have_one_seed(log: Log, other: Log) -> bool:
    seeds = {repr(one.value("seed")) for one in (log, other)}
    return len(seeds) == 1 and seeds != {"None"}


@rule("S417", "error", RUN_SETS, breaks=share_losses(1, 2))
def losses_differ(logs: Sequence[Log]) -> Iterator[Found]:
    """No two runs of different seeds have two equal losses at the same places."""
    for earlier, log, count in find_shared_losses(logs):
        if count > 1 and differ(earlier, log):
            yield Found(0, f"{count} losses equal those of {earlier.path}", log)


@rule("S421", "warning", RUN_SETS, breaks=share_losses(1))
def each_loss_differs(logs: Sequence[Log]) -> Iterator[Found]:
    """No two runs of different seeds have one equal loss at the same place."""
    for earlier, log, count in find_shared_losses(logs):
        if count == 1:
            yield Found(0, f"1 loss equals that of {earlier.path}", log)


def list_correct(log: Log) -> object:
    """List the correct predictions of each evaluation; None if these are few or small."""
    events = log.events("eval_accuracy")
    parts = [(event.number("samples"), event.number("correct")) for event in events]
    is_enough = len(events) >= MIN_COUNTS and all((e.number("total") or 0) >= MIN_TOTAL for e in events)
    return parts if is_enough and not log.is_resumed else None


@rule("S422", "error", RUN_SETS, breaks=share_counts)
def counts_differ(logs: Sequence[Log]) -> Iterator[Found]:
    """No two runs of different seeds count equal correct predictions in all of 3 or more evaluations."""
    repeated = find_repeated(logs, list_correct)
    return report_pairs(pair for pair in repeated if not have_one_seed(*pair) and differ(*pair))


@rule("X501", "strict", RUN_SETS, breaks=borrow_trace)
def no_run_is_in_two_sets(sets: Sequence[RunSet]) -> Iterator[Found]:
    """No run stands in two sets: equal losses and accuracies, with another seed or at the same time."""
    numbers = {id(log): number for number, run_set in enumerate(sets) for log in run_set.readable}
    logs = [log for run_set in sets for log in run_set.readable if not log.is_study]
    copies = [pair for pair in find_repeated(logs, trace) if not is_rerun(*pair)]
    copies += [(earlier, log) for earlier, log, count in find_shared_losses(logs) if count > 1]
    first: dict[int, tuple[Log, Log]] = {}
    for earlier, log in copies:
        first.setdefault(id(log), (earlier, log))
    return report_pairs((a, b) for a, b in first.values() if numbers[id(a)] != numbers[id(b)])


def is_rerun(log: Log, other: Log) -> bool:
    """True if two logs are of one seed at two times: such runs may agree to the bit."""
    starts = {one.events("run_start")[0].time_ms for one in (log, other) if one.events("run_start")}
    return have_one_seed(log, other) and len(starts) == 2


# Runs that are missing.


@rule("S418", "strict", RUN_SETS, breaks=lambda logs: [*logs[:2], [], *logs[2:]])
def numbers_have_no_gap(logs: Sequence[Log]) -> Iterator[Found]:
    """The results of this suite, and of any set that has runs enough, are numbered without a gap."""
    numbers = numbers_of(logs)
    missing = sorted(set(range(min(numbers, default=0), max(numbers, default=0))) - numbers)
    is_whole = len(logs) >= enough_runs(logs) or logs[0].is_ours
    if missing and is_whole and not is_of_study(logs[0]):
        yield Found(0, f"no result_{', '.join(map(str, missing[:10]))}", logs[0])


@rule("S420", "warning", RUN_SETS, breaks=lambda logs: [[], *logs])
def numbers_begin_at_zero(logs: Sequence[Log]) -> Iterator[Found]:
    """The results of this suite are numbered from 0."""
    first = min(numbers_of(logs), default=0)
    if first and logs[0].is_ours and not is_of_study(logs[0]):
        yield Found(0, f"the first is result_{first}", logs[0])


def numbers_of(logs: Sequence[Log]) -> set[int]:
    names = (re.fullmatch(r"result_([0-9]{1,6})\.txt", result_name(log.path)) for log in logs)
    return {int(name[1]) for name in names if name}


def enough_runs(logs: Sequence[Log]) -> int:
    return NUM_RUNS.get(logs[0].benchmark, 1)


def overshoot_share(log: Log) -> float | None:
    """Compute the share of the last evaluation interval that came after the target was crossed."""
    passed = crossing(log.curve, log.target)
    return 1 - passed.share if passed and passed.before else None


@rule("S419", "warning", "rules: Quality measure", breaks=reach_exactly)
def targets_are_passed_by_chance(logs: Sequence[Log]) -> Iterator[Found]:
    """The last evaluations of a set do not all stand just behind the crossing of the target."""
    shares = [overshoot_share(log) for log in logs if log.is_converged]
    known = [share for share in shares if share is not None]
    if len(known) < enough_runs(logs) or is_of_study(logs[0]):
        return
    if max(known) ** len(known) < TOO_CLOSE:
        text = f"every run stopped within {max(known):.1%} of an evaluation interval behind the target"
        yield Found(0, f"{text}: check whether evaluations were chosen", logs[0])


def hide_miss(beside: SetAndStudies) -> SetAndStudies:
    """Let a study hold a run of the recipe of the set that missed its target."""
    head = ("# --- configuration", "#   benchmark: x", "# ---")
    lead = replace(beside.run_set.lead, preamble=head)
    run_set = replace(beside.run_set, logs=(lead, *beside.run_set.logs[1:]))
    return SetAndStudies(run_set, [replace(lead, records=lead.records[:-1])])


@rule("F801", "warning", RUN_SETS, breaks=hide_miss)
def no_miss_lies_in_a_study(beside: SetAndStudies) -> Iterator[Found]:
    """No run of a set's own recipe that missed the target lies in a study beside it, but as its trial 0."""
    lead = beside.run_set.lead
    recipe = recipe_of(lead)
    for log in beside.studied if "benchmark" in recipe else ():
        is_run = not log.is_study and log.first("run_start") is not None
        is_missed = is_run and not log.is_converged and not re.search(FIRST_TRIAL, log.system)
        if is_missed and log.value("device") == lead.value("device"):
            differences = all_differences(recipe, recipe_of(log))
            if all(difference.is_software for difference in differences):
                text = f"{log.path} missed the target with the settings of this set"
                yield Found(0, f"{text}; if it was a run of the set, move it back", lead)
