"""Forgeries of real run sets, drawn by a seeded generator: 15 kinds of dishonesty that arithmetic can find.

Each function takes a generator and the logs of a set, and returns the set that a cheater would submit for a
better score. The last kind can leave no trace; its docstring says when.
"""

from typing import NamedTuple

from common.evidence.records import TOKEN
from common.evidence.rules.rule import (
    chain,
    edit,
    edit_all,
    first_record,
    has_key,
    place_of,
    record_of,
    remove,
    retime,
    rewrite,
    time_of,
)


class Forged(NamedTuple):
    """The lines of each log of a set by its number, and of the logs that lie in a study beside it."""

    logs: dict
    studied: tuple = ()
    leaves_no_trace: bool = False


def changed(rng, logs, change, chosen=None):
    """Let a forger change one of the chosen logs of a set; every one of them in half of the cases."""
    chosen = list(range(len(logs))) if chosen is None else chosen
    assert chosen
    numbers = set(chosen) if rng.random() < 0.5 else {rng.choice(chosen)}
    return Forged({n: change(lines) if n in numbers else lines for n, lines in enumerate(logs)})


def events(lines, key):
    return [record_of(line) for line in lines if has_key(line, key)]


def lasts(lines, change):
    """Let run_stop state another duration by the monotonic clock, where the log has one."""

    def last(record):
        metadata = record["metadata"]
        return {"duration_ms": change(metadata["duration_ms"])} if "duration_ms" in metadata else {}

    return edit_all("run_stop", last)(lines)


def scale_times(lines, factor):
    """Scale all times of a run, not its monotonic clock."""
    start = first_record(lines, "run_start")["time_ms"]
    return retime(lines, lambda ms: ms if ms <= start else start + round((ms - start) * factor))


def faster(lines, factor):
    return edit_all("throughput", lambda r: {"value": r["value"] / factor})(lines)


def cut(lines, at, by):
    """Cut milliseconds out of a run."""
    lines = retime(lines, lambda ms: max(at, ms - by) if ms > at else ms)
    return lasts(lines, lambda ms: ms - by)


def recompute_rates(lines):
    """Let every block state the throughput that its times give."""
    started, before, result = 0, 0, []
    for line in lines:
        if has_key(line, "block_start"):
            started = time_of(line)
        if has_key(line, "throughput"):
            samples = record_of(line)["metadata"]["samples"]
            line = rewrite(line, value=1000 * (samples - before) / (time_of(line) - started))
            before = samples
        result.append(line)
    return result


def other_digits(rng, lines, keep=()):
    """Change accuracies and losses a little, so that no trace of two runs is equal; `keep` numbers losses."""
    result, losses, last = [], -1, place_of(lines, "eval_accuracy", -1)
    for index, line in enumerate(lines):
        record = record_of(line) if TOKEN in line else {}
        if record.get("key") == "train_loss":
            losses += 1
            line = line if losses in keep else rewrite(line, value=record["value"] * rng.uniform(0.97, 1.03))
        if record.get("key") == "eval_accuracy":
            total = record["metadata"].get("total", 50_000)
            correct = round(record["value"] * total) + rng.randint(1, 3) * (1 if index == last else -1)
            more = {"correct": correct} if "correct" in record["metadata"] else {}
            line = rewrite(line, value=correct / total, **more)
        result.append(line)
    return result


def moved_behind(lines, other):
    """Let a run start when another one did."""
    offset = first_record(other, "run_start")["time_ms"] - first_record(lines, "run_start")["time_ms"]
    return retime(lines, lambda ms: ms + offset)


def other_seed(rng, lines):
    return edit("seed", value=rng.randrange(2**31))(lines)


# Time.


def times_are_shortened(rng, logs):
    """A piece of a block is cut out, or all of a run takes less time; both clocks agree."""

    def change(lines):
        if rng.random() < 0.5:
            factor = rng.uniform(0.6, 0.95)
            return lasts(scale_times(lines, factor), lambda ms: round(ms * factor))
        block = rng.randrange(len(events(lines, "block_start")))
        start, stop = (events(lines, key)[block]["time_ms"] for key in ("block_start", "block_stop"))
        return cut(lines, start + 1, round((stop - start) * rng.uniform(0.15, 0.6)))

    return changed(rng, logs, change)


def throughput_is_raised(rng, logs):
    """Blocks state more samples a second than they trained."""
    return changed(rng, logs, lambda lines: faster(lines, rng.uniform(0.75, 0.97)))


def the_start_moves_out(rng, logs):
    """The first part of the run is moved before run_start; all rates follow."""

    def change(lines):
        by = rng.randint(60, 900)
        return recompute_rates(cut(lines, first_record(lines, "run_start")["time_ms"], by))

    def gap(lines):
        stop, by = place_of(lines, "init_stop"), rng.randint(60, 900)
        return retime(lines[: stop + 1], lambda ms: ms - by) + lines[stop + 1 :]

    return changed(rng, logs, lambda lines: gap(change(lines)))


def the_clock_is_left(rng, logs):
    """All times are scaled, the rates too; the monotonic clock is forgotten."""
    factor = rng.uniform(0.6, 0.97)
    return changed(rng, logs, lambda lines: faster(scale_times(lines, factor), factor))


def the_clock_is_said_to_be_set(rng, logs):
    """All times are scaled, the rates too, and the clock is said to have been set back."""

    def change(lines):
        factor = rng.uniform(0.6, 0.97)
        lines = faster(scale_times(lines, factor), factor)
        start, stop = (first_record(lines, key) for key in ("run_start", "run_stop"))
        drift = stop["time_ms"] - start["time_ms"] - stop["metadata"]["duration_ms"]
        return edit("run_stop", clock_drift_ms=drift)(lines)

    return changed(rng, logs, change)


# Evaluations and samples.


def without_evaluation(rng, lines):
    """Take an evaluation below the target, and its time, out of a run, and join the blocks beside it."""
    number = rng.randrange(len(events(lines, "eval_accuracy")) - 1)
    start, stop = (place_of(lines, key, number) for key in ("eval_start", "eval_accuracy"))
    first, last = place_of(lines, "block_stop", number), place_of(lines, "block_start", number + 1)
    after = last + 1
    before = place_of(lines, "throughput", number)
    epoch_stop = max(i for i in range(before) if has_key(lines[i], "epoch_stop"))
    at, by = time_of(lines[start]), time_of(lines[last]) - time_of(lines[start])
    assert epoch_stop < before < first < start < stop < last and has_key(lines[after], "epoch_start")
    kept = lines[:epoch_stop] + lines[after + 1 :]
    return recompute_rates(cut(kept, at, by))


def an_evaluation_is_removed(rng, logs):
    """An evaluation that missed the target is removed with its time; the blocks beside it become one."""
    several = [n for n, lines in enumerate(logs) if len(events(lines, "eval_accuracy")) > 1]
    return changed(rng, logs, lambda lines: without_evaluation(rng, lines), several)


def samples_are_understated(rng, logs):
    """The target is said to be reached after fewer samples, in its evaluation alone or in every record."""

    def change(lines):
        factor, batch = rng.uniform(0.7, 0.95), first_record(lines, "global_batch_size")["value"]
        is_bert = first_record(lines, "submission_benchmark")["value"] == "bert"

        def fewer(record):
            samples = round(record["metadata"]["samples"] * factor / batch) * batch
            has_epoch = is_bert and record["key"] != "run_stop"
            return {"samples": samples} | ({"epoch_num": samples} if has_epoch else {})

        is_everywhere = rng.random() < 0.5
        keys = ("eval_accuracy", "run_stop", *("throughput", "train_loss") * is_everywhere)
        lines = chain(*(edit_all(key, fewer) for key in keys))(lines)
        return recompute_rates(lines) if is_everywhere else lines

    return changed(rng, logs, change)


def the_total_changes(rng, logs):
    """One run is evaluated on fewer samples or tokens."""
    factor = rng.uniform(0.3, 0.9)

    def smaller(record):
        total = round(record["metadata"]["total"] * factor)
        correct = min(round(record["value"] * total) + 1, total - 1)
        return {"value": correct / total, "correct": correct, "total": total}

    return changed(rng, logs, edit_all("eval_accuracy", smaller), rng.sample(range(len(logs)), 1))


def evaluations_are_shortened(rng, logs):
    """Each evaluation takes a small part of its time; both clocks agree."""

    def change(lines):
        factor = rng.uniform(0.9, 0.99)
        for number in range(len(events(lines, "eval_stop"))):
            start, stop = (events(lines, key)[number]["time_ms"] for key in ("eval_start", "eval_stop"))
            lines = cut(lines, start, round((stop - start) * factor))
        return lines

    timed = [n for n, lines in enumerate(logs) if events(lines, "eval_stop")]
    return changed(rng, logs, change, timed)


# Settings and machines.


def the_head_is_contradicted(rng, logs):
    """Records of every run state another target, batch, optimizer, method or data set than what ran."""

    def scale(key):
        factor = rng.choice([0.5, 0.9, 1.1, 2])
        return edit_all(key, lambda r: {"value": type(r["value"])(r["value"] * factor)})

    keys = ("global_batch_size", "opt_base_learning_rate", "opt_weight_decay", "train_samples")
    change = rng.choice(
        [
            edit_all("quality_target", lambda r: {"value": r["value"] - 0.01}),
            *(scale(key) for key in keys),
            edit_all("opt_name", lambda r: {"value": "adagrad"}),
            *([remove("method", at=-1)] if any(has_key(line, "method") for line in logs[0]) else []),
        ]
    )
    return Forged({n: change(lines) for n, lines in enumerate(logs)})


def the_machine_changes(rng, logs):
    """One run was made by a faster device, more accelerators or more threads."""
    change = rng.choice(
        [
            edit("device", value="NVIDIA H100 80GB HBM3"),
            edit("num_accelerators", value=rng.choice([4, 8, 16])),
            edit("num_threads", value=rng.choice([16, 64])),
        ]
    )
    return changed(rng, logs, change, rng.sample(range(len(logs)), 1))


# Runs.


def a_run_is_copied_with_another_seed(rng, logs):
    """The best run stands twice: other seed, times, accuracies, and losses but for one to three."""
    one, other = rng.sample([n for n, s in enumerate(logs) if events(s, "train_loss")], 2)
    factor = rng.uniform(0.95, 1.05)
    lines = lasts(faster(scale_times(logs[one], factor), factor), lambda ms: round(ms * factor))
    num_losses = len(events(lines, "train_loss"))
    keep = set(rng.sample(range(num_losses), min(num_losses, rng.randint(1, 3))))
    copy = other_seed(rng, moved_behind(other_digits(rng, lines, keep), logs[other]))
    return Forged(dict(enumerate(logs)) | {other: copy})


def a_run_is_copied_with_its_times(rng, logs):
    """The best run stands twice: other seed, accuracies and losses, and times a millisecond off."""
    one = rng.choice([n for n, lines in enumerate(logs) if len(events(lines, "eval_accuracy")) > 2])
    other = rng.choice([n for n in range(len(logs)) if n != one])
    late = rng.choice(events(logs[one], "eval_accuracy"))["time_ms"]
    lines = retime(logs[one], lambda ms: ms + (ms >= late))
    copy = other_seed(rng, moved_behind(other_digits(rng, lines), logs[other]))
    return Forged(dict(enumerate(logs)) | {other: copy})


def a_slow_run_is_called_aborted(rng, logs):
    """A run that reached the target late is called aborted, so that it counts as the one miss of a set."""
    return changed(rng, logs, edit("run_stop", status="aborted"), rng.sample(range(len(logs)), 1))


def a_miss_is_left_out(rng, logs):
    """A run that missed the target is removed, or moved to a study.

    Without the last number, and in other suites also without the first, no trace is left.
    """
    lines = rng.choice(logs)
    last = events(lines, "eval_accuracy")[-1]["metadata"]
    if rng.random() < 0.5 or "correct" not in last:
        gap, is_ours = rng.randrange(len(logs) + 1), bool(events(lines, "configuration_name"))
        others = {n + (n >= gap): lines for n, lines in enumerate(logs)}
        return Forged(others, leaves_no_trace=gap == len(logs) or (gap == 0 and not is_ours))
    correct, total = round(last["correct"] * 0.9), last["total"]
    below = edit("eval_accuracy", at=-1, value=correct / total, correct=correct)
    missed = chain(below, edit("run_stop", status="aborted"))(lines)
    return Forged(dict(enumerate(logs)), (other_seed(rng, missed),))


ERROR, WARNING = "error", "warning"
KINDS = {  # the rules that find it, at least one of these, and how severe that is
    times_are_shortened: {"Q310": ERROR},
    throughput_is_raised: {"Q310": ERROR},
    the_start_moves_out: {"T205": ERROR},
    the_clock_is_left: {"T218": ERROR},
    the_clock_is_said_to_be_set: {"T220": ERROR, "T221": WARNING},  # by up to a second
    an_evaluation_is_removed: {"Q315": ERROR},
    samples_are_understated: {"Q315": ERROR, "Q316": ERROR},
    the_total_changes: {"S416": ERROR},
    evaluations_are_shortened: {"T219": ERROR},
    the_head_is_contradicted: {"K123": ERROR},
    the_machine_changes: {"S416": ERROR, "K123": ERROR},
    a_run_is_copied_with_another_seed: {"S417": ERROR, "S421": WARNING},  # one loss that was kept
    a_run_is_copied_with_its_times: {"S412": ERROR},
    a_slow_run_is_called_aborted: {"Q313": ERROR},
    a_miss_is_left_out: {"S418": ERROR, "S420": WARNING, "F801": WARNING},
}
OF_ANYBODY = {  # kinds that the logs of other suites can be forged by
    evaluations_are_shortened: {"T219": WARNING},
    a_run_is_copied_with_its_times: {"S412": ERROR},
    a_slow_run_is_called_aborted: {"Q313": ERROR},
    a_miss_is_left_out: {"S418": WARNING},
}
