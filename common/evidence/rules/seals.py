"""C: the chain of a log, and a sealed set beside its seal and the list of its runs."""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice, pairwise

from common.evidence.log import Log
from common.evidence.paths import result_name
from common.evidence.recipes import all_differences, recipe_of
from common.evidence.records import counted, printable
from common.evidence.rules.rule import Found, edit, rule
from common.evidence.rules.sealed_files import (
    choose_derived_seeds,
    cut_last_hash,
    edit_last_log,
    edit_line,
    edit_list,
    edit_seal,
    end_early,
    extend,
    forget_last,
    insert_note,
    lay_before_the_seal,
    more_runs,
    rechained,
    restart_last,
    results_of,
    state_in_head,
    swap_logs,
    unseal,
)
from common.evidence.sealed.runs import Run, Sealing, Turns, recipe_of_seal
from common.evidence.sealed.seal import RUNS, SEAL, Derived, Extended, derive_seeds

CHAIN = "house: chained logs"
SEALED = "house: sealed run sets"
MAX_BREAKS = 3  # of one log
SLACK_S = 2.0  # between a line of the list and a record of the log
MAX_SEEDS = 100_000  # that are computed anew
ZERO = "0" * 64

# The chain of each log.


def find_breaks(logs: list[Log]) -> Iterator[Found]:
    """Yield the first records whose hash does not fit the bytes before them."""
    what = "the record before this one, or a line between them, was changed, added or removed"
    for log in logs:
        breaks = log.chain.breaks if log.chain else ()
        more = f"; {len(breaks) - MAX_BREAKS} more in this log" if len(breaks) > MAX_BREAKS else ""
        for line in breaks[:MAX_BREAKS]:
            yield Found(line, f"{what}{more}", log)


@rule("C901", "error", CHAIN, breaks=edit_last_log(insert_note, fits_list=False))
def sealed_logs_are_unbroken(sealing: Sealing) -> Iterator[Found]:
    """Each record of a sealed log carries the hash of what stands before it."""
    logs = [log for log in sealing.run_set.logs if log.header("seal")]
    yield from find_breaks(logs)
    for log in logs:
        if log.is_readable and log.chain is None:
            yield Found(log.records[0].line, "no record carries one", log)


@rule("C902", "warning", CHAIN, breaks=lambda files: edit_last_log(insert_note)(unseal(files)))
def chained_logs_are_unbroken(sealing: Sealing) -> Iterator[Found]:
    """Each record of a chained log without a seal carries the hash of what stands before it."""
    return find_breaks([log for log in sealing.run_set.logs if not log.header("seal")])


@rule("C903", "error", CHAIN, breaks=lambda files: edit_last_log(cut_last_hash)(unseal(files)))
def records_are_chained(sealing: Sealing) -> Iterator[Found]:
    """If one record of a log carries a hash, every record carries one."""
    for log in sealing.run_set.logs:
        for line in islice(log.chain.unchained if log.chain else (), MAX_BREAKS):
            yield Found(line, "this one carries none", log)


# The seal and the list.


@rule("C904", "error", SEALED, breaks=lambda s: s | {RUNS: edit_line(1, reason="another")(s[RUNS])})
def seal_and_list_are_whole(sealing: Sealing) -> Iterator[Found]:
    """runset.json and runs.jsonl can be read, and no line of the list was changed, added or removed."""
    for file, line, text in sealing.sealed.faults if sealing.sealed else ():
        yield Found(line, text, path=sealing.place(file))


@rule("C905", "error", SEALED, breaks=edit_last_log(rechained(lambda lines: state_in_head(lines, seal=ZERO))))
def logs_name_their_seal(sealing: Sealing) -> Iterator[Found]:
    """A log of a sealed set names the runset.json that lies beside it."""
    for log in sealing.run_set.logs:
        if log.is_resumed:  # its head is that of the interrupted run
            continue
        if seal := log.header("seal"):
            if sealing.sealed is None:
                yield Found(0, f"no {SEAL} lies beside it; copy {SEAL} and {RUNS} with the logs", log)
            elif seal != sealing.sealed.digest:
                yield Found(0, f"it names another seal than this {SEAL}", log)
        elif (run := sealing.run_of(log)) and log.is_readable:
            yield Found(0, f"it names none, and {RUNS}:{run.line} says that it was started", log)


@rule("C906", "error", SEALED, breaks=restart_last)
def no_result_is_missing(sealing: Sealing) -> Iterator[Found]:
    """A run that ended with a log has its result."""
    for run in sealing.runs:
        if run.ended is None or not (run.has_log or run.ended.outcome == "lost"):
            continue
        name, last = run.started.result, sealing.last_by_name[run.started.result]
        text = f"line {run.end_line} says that it ended as '{run.ended.outcome}'"
        if name not in sealing.names:
            yield Found(run.line, f"no {name}; {text}", path=sealing.place(RUNS))
        elif last is not run:
            text = f"{text}, and line {last.line} starts another run of this name"
            yield Found(run.line, f"{name} was removed; {text}", path=sealing.place(RUNS))


@rule("C907", "error", SEALED, breaks=forget_last)
def every_result_was_started(sealing: Sealing) -> Iterator[Found]:
    """A line of the list starts each result of a sealed set that did not lie there before."""
    for log in sealing.run_set.logs if sealing.seal else ():
        if sealing.run_of(log) is None and not sealing.predates_seal(log):
            yield Found(0, f"no line of {RUNS} starts it", log)


@rule("C908", "error", SEALED, breaks=lambda files: swap_logs(files, *results_of(files)[-2:]))
def numbers_are_those_of_the_start(sealing: Sealing) -> Iterator[Found]:
    """A result has the number that it was started with, and names the line of its start."""
    for log, run in sealing.paired():
        if not log.is_resumed and log.header("started") != run.digest:
            yield Found(
                0, f"its '# started:' names no line of {RUNS}; line {run.line} starts this number", log
            )
        elif run.started.result != result_name(log.path):
            yield Found(0, f"it was started as {run.started.result} ({RUNS}:{run.line})", log)


@rule("C909", "error", SEALED, breaks=edit_last_log(lambda lines: [*lines, "# a note"], fits_list=False))
def logs_end_as_listed(sealing: Sealing) -> Iterator[Found]:
    """The end of a log is the one that the list has the hash of."""
    for log, run in sealing.paired():
        if run.ended is None or log.chain is None or log.chain.head == run.ended.head:
            continue
        line = log.records[-1].line if log.records else 0
        text = f"changed after the run had ended ({RUNS}:{run.end_line}), or something was appended"
        yield Found(line, text if run.has_log else f"{RUNS}:{run.end_line} says that no log was kept", log)


# Seeds.


@rule("C910", "error", SEALED, breaks=edit_last_log(rechained(edit("seed", value=7))))
def seeds_are_those_of_the_start(sealing: Sealing) -> Iterator[Found]:
    """A log states the seed that its run was started with."""
    for log, run in sealing.paired():
        if (event := log.first("seed")) and event.value != run.started.seed:
            text = f"{printable(event.value, 40)}, not {run.started.seed} as in {RUNS}:{run.line}"
            yield Found(event.line, text, log)


@rule("C911", "error", SEALED, breaks=edit_seal(lambda seal: {"seeds": seal["seeds"][::-1]}))
def runs_have_the_decided_seeds(sealing: Sealing) -> Iterator[Found]:
    """The runs were started with the seeds that were decided, in their order."""
    seal = sealing.seal
    if seal is None:
        return
    if seal.seeds is not None and len(seal.seeds) != seal.num_runs:
        yield Found(0, f"{len(seal.seeds)} seeds for {seal.num_runs} runs", path=sealing.place(SEAL))
    for run, text in find_other_seeds(sealing):
        yield Found(run.line, f"seed {run.started.seed} {text}", path=sealing.place(RUNS))
    for log, run in sealing.paired():
        if run.started.resumed and log.first("run_start") and not log.is_resumed:
            yield Found(0, f"{RUNS}:{run.line} says that it goes on from another run; the log does not", log)


def find_other_seeds(sealing: Sealing) -> Iterator[tuple[Run, str]]:
    """Yield the runs whose seed was not the next one decided."""
    turns, seeds = Turns(sealing.decided), dict[str, int]()
    for run in sealing.runs:
        seed, resumed, may_have = run.started.seed, run.started.resumed, turns.take_of(run)
        if resumed and seeds.get(resumed, seed) != seed:
            yield run, f"is not that of {resumed}, from which it goes on"
        elif not may_have:
            expected = [str(seeds_left[-1]) for seeds_left in turns.before(run.line)]
            yield run, f"where {' or '.join(expected[:3]) or 'no more run'} was decided"
        seeds[run.started.result] = seed


@rule("C912", "error", SEALED, breaks=choose_derived_seeds)
def derived_seeds_follow_from_the_value(sealing: Sealing) -> Iterator[Found]:
    """The seeds of a public value are those that the seal and this value give, once."""
    seal, place = sealing.seal, sealing.place(RUNS)
    if seal is None or sealing.sealed is None:
        return
    if bool(seal.beacon) == (seal.seeds is not None):
        text = "it states seeds and a public value" if seal.beacon else "it states neither seeds nor a value"
        yield Found(0, text, path=sealing.place(SEAL))
    events = [(line, e) for line, e in sealing.sealed.events if isinstance(e, Derived | Extended)]
    value = next((event.value for _, event in events if isinstance(event, Derived)), "")
    total = min(sum(len(event.seeds) for _, event in events), MAX_SEEDS) if value and seal.beacon else 0
    expected, position, is_derived = derive_seeds(sealing.sealed.digest, value, total), 0, False
    for line, event in events:
        if isinstance(event, Derived):
            if is_derived or not seal.beacon:
                yield Found(line, "the seeds were decided before", path=place)
            is_derived = True
        if seal.beacon and event.seeds != expected[position : position + len(event.seeds)]:
            yield Found(line, f"this seal and {printable(value, 70) or 'no value'} give others", path=place)
        position += len(event.seeds)


# What ran.


@rule("C913", "error", SEALED, breaks=edit_seal(lambda seal: {"versions": "torch 1.0"}))
def logs_keep_to_the_seal(sealing: Sealing) -> Iterator[Found]:
    """A log states the configuration, code, versions, ranks, threads and data that were sealed."""
    seal = sealing.seal
    if seal is None:
        return
    recipe = recipe_of_seal(seal)
    for log, _ in sealing.paired():
        facts = {
            "benchmark": (seal.benchmark, log.benchmark or None),
            "system": (seal.system, log.value("submission_platform")),
            "configuration": (seal.configuration_name, log.value("configuration_name")),
            "size": (seal.size, log.value("benchmark_size")),
            "data set": (seal.data, log.value("dataset_fingerprint")),
        }
        for what, (sealed, logged) in facts.items():
            if sealed and logged is not None and sealed != logged:
                text = f"{what} {printable(logged, 60)}, not {printable(sealed, 60)} as in {SEAL}"
                yield Found(0, text, log)
        for key, before, after in islice(all_differences(recipe, recipe_of(log)), 1):
            yield Found(0, f"{key} {after}, not {before} as in {SEAL}", log)


def contradict(log: Log, run: Run) -> str:
    """Say why a log contradicts the listed end of its run; '' if it does not."""
    stop, outcome = log.last("run_stop"), run.ended.outcome if run.ended else ""
    if outcome in ("converged", "missed", "failed") and log.is_converged != (outcome == "converged"):
        return "reached its target" if log.is_converged else "did not reach its target"
    if outcome == "ended" and not log.is_study:
        return "stops at its target"
    if outcome == "missed" and stop and not log.came_to_its_end:
        return "was ended: its run_stop has a reason"
    return "has a log" if outcome == "refused" and log.first("run_start") else ""


@rule("C914", "error", SEALED, breaks=edit_list(edit_line(-1, outcome="missed")))
def outcomes_are_those_of_the_logs(sealing: Sealing) -> Iterator[Found]:
    """A run ended as its log says."""
    for log, run in sealing.paired():
        if run.ended and log.is_readable and not log.is_study and (why := contradict(log, run)):
            yield Found(0, f"it {why}, and {RUNS}:{run.end_line} says '{run.ended.outcome}'", log)


def parse_seconds(time: str) -> float | None:
    try:
        stamp = datetime.fromisoformat(time)
    except ValueError:
        return None
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


@rule("C915", "warning", SEALED, breaks=edit_list(end_early))
def logs_lie_between_start_and_end(sealing: Sealing) -> Iterator[Found]:
    """The records of a log lie between the start and the end of its run, unless the clock was set."""
    for log, run in sealing.paired():
        if not log.times:
            continue
        start, end = parse_seconds(run.started.time), parse_seconds(run.ended.time) if run.ended else None
        first, last = log.times[0] / 1000, log.times[-1] / 1000
        if start is not None and not log.is_resumed and first < start - SLACK_S:
            text = f"the first is {start - first:.0f} s before the start ({RUNS}:{run.line})"
            yield Found(log.records[0].line, text, log)
        if end is not None and last > end + SLACK_S:
            text = f"the last is {last - end:.0f} s after the end ({RUNS}:{run.end_line})"
            yield Found(log.records[-1].line, text, log)


# What a seal leaves open.


@rule("C916", "warning", SEALED, breaks=extend)
def runs_were_decided_before_results(sealing: Sealing) -> Iterator[Found]:
    """All runs of a sealed set were decided before the first result was known."""
    for line, seeds, num_known in sealing.extensions:
        text = f"{len(seeds)} more decided when {num_known} had ended"
        yield Found(line, text, path=sealing.place(RUNS))


@rule("C917", "warning", SEALED, breaks=lay_before_the_seal)
def all_results_are_sealed(sealing: Sealing) -> Iterator[Found]:
    """A sealed set holds no result that is older than its seal."""
    return (
        Found(0, f"{result_name(log.path)} lay here before {SEAL} was written", log)
        for log in sealing.unsealed
    )


@rule("C918", "warning", SEALED, breaks=edit_list(lambda lines: lines[:-1]))
def started_runs_end(sealing: Sealing) -> Iterator[Found]:
    """The launcher of each run has listed its end."""
    for run in sealing.unended:
        name = run.started.result
        text = "" if name in sealing.names else ", and this result is missing"
        text = f"no line ends {name}{text}: its launcher was killed, or the run still goes on"
        if run.ended:
            text = f"the launcher of {name} was killed before its clock had started, says a later command"
        yield Found(run.line, text, path=sealing.place(RUNS))


@rule(
    "C919", "warning", SEALED, breaks=edit_seal(lambda seal: {"seeds": [*seal["seeds"], 7]} | more_runs(seal))
)
def decided_runs_are_started(sealing: Sealing) -> Iterator[Found]:
    """All runs that were decided have been started."""
    if sealing.num_not_started:
        yield Found(0, f"{counted(sealing.num_not_started, 'run')} not started", path=sealing.place(RUNS))


@rule("C920", "warning", SEALED, breaks=edit_list(edit_line(-2, time="2000-01-01T00:00:00Z")))
def times_of_the_list_rise(sealing: Sealing) -> Iterator[Found]:
    """No line of the list states a time before that of the line above."""
    events = sealing.sealed.events if sealing.sealed else ()
    for (_, before), (line, event) in pairwise(events):
        earlier, time = parse_seconds(before.time), parse_seconds(event.time)
        if time is None or (earlier is not None and time < earlier - SLACK_S):
            yield Found(line, printable(event.time, 40), path=sealing.place(RUNS))
