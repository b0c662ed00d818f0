"""S: settings, software and pace that the runs of a set share. X: sets that take turns on one system."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from common.evidence.disturbance import rates_of, slow_runs
from common.evidence.log import NUM_RUNS, Log, RunSet
from common.evidence.recipes import Difference, differing_logs
from common.evidence.records import TOKEN, counted, finite, printable
from common.evidence.rules.quality import TOTALS
from common.evidence.rules.rule import (
    PLAN,
    Found,
    Lines,
    Mutation,
    add,
    chain,
    delay_run,
    edit,
    edit_all,
    first_record,
    miss_target,
    retime,
    rule,
    scale,
    state,
    time_of,
)
from common.evidence.score import counting_window, run_of, sort_by_launch
from common.evidence.system import instructions_of

RUN_SETS = "rules: Benchmark Results"
HYPERPARAMETERS = "rules: Hyperparameters"
SYSTEM = "rules: System and framework must be consistent"
EVALUATED = "eval_accuracy"
CONSTANT = {"global_batch_size", "gradient_accumulation_steps", "eval_samples"}
CONSTANT |= {"quality_target", "dataset_fingerprint", "num_ranks"}
MAX_TOTAL = 1_000_000
ROUNDED = 100_000  # accuracies with five decimals cannot tell
MAX_SIEVES, MAX_TRIED = 40, 100  # values that sieve a million totals; totals left to try with all values
MIN_ACCURACIES = 10  # fewer would fit some total by chance
FLOAT32_ROUNDING = 7.5e-8  # relative; accuracies are logged from float32
OUTLIER = {False: 1.3, True: 2.0}  # times the set's median pace; a proxy runs on anybody's busy machine

# Changes to the logs of a good set.

SetMutation = Callable[[list[Lines]], list[Lines]]


def change_last(mutation: Mutation, num_logs: int = 1) -> SetMutation:
    return lambda logs: logs[:-num_logs] + [mutation(lines) for lines in logs[-num_logs:]]


def overlap_runs(logs: list[Lines]) -> list[Lines]:
    first, last = (time_of(next(line for line in lines if TOKEN in line)) for lines in (logs[0], logs[-1]))
    return change_last(lambda lines: retime(lines, lambda ms: ms + first - last + 1000))(logs)


def change_budget(logs: list[Lines]) -> list[Lines]:
    """Let every log state a configuration, and the last one another budget."""
    return [state(**PLAN, benchmark="x", budget=1 + (log is logs[-1]))(log) for log in logs]


# Run sets.


def find_differing(logs: Sequence[Log], describe: Callable[[Log], dict[str, list[str]]]) -> Iterator[Found]:
    """Yield the logs whose description differs from that of the first, with the differences."""
    first = describe(logs[0])
    for log in logs[1:]:
        facts = describe(log)
        keys = [key for key in {**first, **facts} if facts.get(key) != first.get(key)]
        if keys:
            text = "; ".join(
                f"{k} {list_extra(facts, first, k)}, not {list_extra(first, facts, k)}" for k in keys
            )
            yield Found(0, f"{text} as in {logs[0].path}", log)


def list_extra(values: dict[str, list[str]], others: dict[str, list[str]], key: str) -> str:
    """List the values of a key that the others do not have, as text."""
    return ", ".join(value for value in values.get(key, []) if value not in others.get(key, [])) or "none"


def find_other_recipes(logs: Sequence[Log], counts: Callable[[Difference], bool]) -> Iterator[Found]:
    """Yield the logs whose recipe differs from the first log's, with the first key that counts."""
    for first, log, (key, before, after) in differing_logs(logs, counts):
        yield Found(0, f"{key} {after}, not {before} as in {first.path}", log)


def find_overlapping(logs: Sequence[Log]) -> Iterator[Found]:
    """Yield the logs that start before an earlier one has ended."""
    alone = [log for log in logs if log.minutes and not log.is_resumed]  # it starts as the interrupted one
    timed = sorted(((log.events("run_start")[0].time_ms, log) for log in alone), key=itemgetter(0))
    for (start, log), (next_start, other) in zip(timed, timed[1:], strict=False):
        if next_start < start + (log.minutes or 0) * 60000:
            yield Found(0, f"starts before {log.path} ends", other)


@rule("S401", "error", RUN_SETS, breaks=change_last(edit("configuration_name", value="another")))
def set_has_one_configuration(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share benchmark, system, platform, configuration and size."""

    def identity(log: Log) -> dict[str, list[str]]:
        return {
            "benchmark": [log.benchmark],
            "system": [log.system],
            "platform": [log.text("submission_platform")],
            "configuration": [log.configuration],
            "size": ["mini" if log.is_proxy else "full"],
        }

    return find_differing(logs, identity)


@rule("S404", "strict", "house: one run at a time", breaks=overlap_runs)
def runs_do_not_overlap(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set follow each other."""
    return find_overlapping(logs)


@rule("S405", "error", HYPERPARAMETERS, breaks=change_last(edit("dataset_fingerprint", value="1")))
def work_is_constant(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share batch size, target and data set."""
    return find_differing(logs, lambda log: settings_of(log, CONSTANT))


@rule("S411", "strict", HYPERPARAMETERS, breaks=change_last(edit("opt_name", value="adam")))
def hyperparameters_are_constant(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share optimizer, schedule, methods and training set."""

    def describe(log: Log) -> dict[str, list[str]]:
        keys = [key for key in log.by_key if key.startswith("opt_")]
        return settings_of(log, [*keys, "method", "train_samples"])

    return find_differing(logs, describe)


def settings_of(log: Log, keys: Iterable[str]) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for event in log.events(*keys):
        settings.setdefault(event.key, []).append(printable(event.value, 60))
    return {key: sorted({*values}) for key, values in settings.items()}


@rule("S414", "strict", HYPERPARAMETERS, breaks=change_budget)
def recipe_is_one(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share configuration, ranks, device and threads."""
    return find_other_recipes(logs, lambda difference: not difference.is_software)


def other_device(logs: list[Lines]) -> list[Lines]:
    """Let every log state a device, and the last one another."""
    return [add("seed", key="device", value=f"GPU {log is logs[-1]}")(log) for log in logs]


@rule("S416", "strict", SYSTEM, breaks=other_device)
def machine_is_one(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share device, accelerators and evaluation's total; on a CPU processor and threads."""

    def machine(log: Log) -> dict[str, list[str]]:
        facts = settings_of(log, ("device", "num_accelerators", "distributed_backend"))
        threads = max(finite(log.value("num_threads")) or 0.0, log.threads or 0)
        if log.value("num_accelerators") != 0:
            return facts
        processor = f"{log.text('processor')} {instructions_of(log)}"
        return facts | {"processor": [processor], "threads": [f"{threads:g}"]}

    def totals(log: Log) -> dict[str, list[str]]:
        return {
            "total": sorted({printable(event.metadata.get("total"), 60) for event in log.events(EVALUATED)})
        }

    yield from find_differing(logs, machine)
    if evaluated := [log for log in logs if log.events(EVALUATED)]:
        yield from find_differing(evaluated, totals)


def is_of_study(log: Log) -> bool:
    """True if no score counts a run, as one of a search that stops at the target and may miss it."""
    return log.is_study or log.lies_in_study


@rule("S406", "warning", RUN_SETS, breaks=lambda logs: logs[:-1])
def set_is_complete(logs: Sequence[Log]) -> Iterator[Found]:
    """A set has 5 runs (resnet) or 10 (bert)."""
    expected = NUM_RUNS.get(logs[0].benchmark)
    if expected and not is_of_study(logs[0]) and len(logs) != expected:
        yield Found(0, f"{counted(len(logs), 'run')} instead of {expected}", logs[0])


@rule("S407", "strict", SYSTEM, breaks=change_last(lambda lines: ["# commit: another", *lines]))
def software_is_the_same(logs: Sequence[Log]) -> Iterator[Found]:
    """The runs of a set share code and versions; a study may go on with other code, and says so."""
    timed = [log for log in logs if not log.is_study]
    return find_other_recipes(timed, lambda difference: difference.is_software)


@rule(
    "S408", "error", RUN_SETS, breaks=change_last(chain(miss_target, edit("run_stop", status="aborted")), 2)
)
def at_most_one_run_failed(logs: Sequence[Log]) -> Iterator[Found]:
    """At most one run that counts misses its target, and not the only one; else the set has no score."""
    timed = sort_by_launch([log for log in logs if not is_of_study(log)])
    window = counting_window([run_of(log).minutes for log in timed], NUM_RUNS.get(logs[0].benchmark, 0))
    counting = [timed[index] for index in window]
    failed = [log for log in counting if not log.is_converged]
    if len(failed) > 1 or (failed and failed == counting):
        yield Found(0, f"{len(failed)} of {counted(len(counting), 'run')} missed the target", failed[-1])


@rule(
    "S409",
    "strict",
    "rules: Quality measure",
    breaks=lambda logs: [edit_all("eval_accuracy", lambda r: {"value": r["value"] + 5e-7})(s) for s in logs],
)
def accuracies_are_of_the_whole_set(logs: Sequence[Log]) -> Iterator[Found]:
    """The accuracies are fractions of the official total: 50,000 images, 428,235 masked tokens."""
    official = TOTALS.get(logs[0].benchmark)
    values = [point.accuracy for log in logs for point in log.curve]
    if official is None or any(log.is_proxy for log in logs) or len(values) < MIN_ACCURACIES:
        return
    distinct = np.unique(values)
    if not any(fits(distinct, total).all() for total in (official, ROUNDED)):
        total = smallest_total(distinct) or f"no total up to {MAX_TOTAL}"
        yield Found(0, f"they are fractions of {total}, not {official}", logs[0])


def fits(values: Any, totals: Any) -> Any:
    """True where a value is a fraction of a total, within the rounding of float32; one may be an array."""
    parts = totals * values
    return abs(parts - np.rint(parts)) < 0.005 + parts * FLOAT32_ROUNDING


def smallest_total(values: np.ndarray) -> int | None:
    """Find the smallest total that all values are fractions of; a sieve of some leaves few to try."""
    totals = np.arange(100, MAX_TOTAL)
    for value in np.random.default_rng(0).permutation(values)[:MAX_SIEVES]:
        totals = totals[fits(value, totals)]
    return next((int(total) for total in totals[:MAX_TRIED] if fits(values, total).all()), None)


def hurry(lines: Lines) -> Lines:
    """Halve the time of a run, with every figure to match."""
    start = first_record(lines, "run_start")["time_ms"]
    faster = retime(lines, lambda ms: min(ms, (ms + start) // 2))
    throughput = edit_all("throughput", lambda r: {"value": r["value"] * 2})
    duration = edit_all("run_stop", lambda r: {"duration_ms": r["metadata"]["duration_ms"] // 2})
    return chain(throughput, duration)(faster)


@rule("S410", "warning", "house: one system, one pace", breaks=change_last(hurry))
def paces_agree(logs: Sequence[Log]) -> Iterator[Found]:
    """No run trains much faster or slower per sample than the others of its set."""
    paces = [
        (log, log.curve[-1].samples / log.minutes)
        for log in logs
        if log.minutes and log.curve and log.curve[-1].samples
    ]
    if len(paces) < 3:
        return
    usual = statistics.median(pace for _, pace in paces)
    for log, pace in paces:
        limit = OUTLIER[log.is_proxy]
        if not usual / limit < pace < usual * limit:
            yield Found(0, f"{pace / usual:.2f} times the samples per minute of the others", log)


@rule(
    "S415",
    "warning",
    "house: the machine is ours",
    # a block of 44 s
    breaks=change_last(chain(delay_run("epoch_stop", 1, 35_200), scale("throughput", 1 / 1.8, at=1))),
)
def steps_keep_pace(logs: Sequence[Log]) -> Iterator[Found]:
    """The steps of no run jump, drift or are slow against those of its siblings."""
    slow = slow_runs([rates_of(log) for log in logs])
    return (Found(0, text, logs[index]) for index, text in slow.items())


# Between run sets.


def overlap_sets(sets: list[list[Lines]]) -> list[list[Lines]]:
    """Move the last log of the last set to the time of the last log of the first."""
    return [*sets[:-1], [*sets[-1][:-1], overlap_runs([sets[0][-1], sets[-1][-1]])[-1]]]


@rule("X502", "strict", "house: one run at a time", breaks=overlap_sets)
def sets_do_not_overlap(sets: Sequence[RunSet]) -> Iterator[Found]:
    """The runs of two sets on one system follow each other."""
    systems: dict[tuple[str, str], list[RunSet]] = {}
    for run_set in sets:
        systems.setdefault((run_set.hardware, run_set.lead.text("submission_org")), []).append(run_set)
    for shared in systems.values():
        alone = [finding.log for run_set in shared for finding in find_overlapping(run_set.readable)]
        within = {log.path for log in alone if log}
        for finding in find_overlapping([log for run_set in shared for log in run_set.readable]):
            if finding.log and finding.log.path not in within:
                yield finding
