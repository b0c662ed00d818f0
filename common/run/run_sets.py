"""Runs several sets in turn, counts how their runs ended, and continues an interrupted set."""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from common import repository
from common.arguments import whole_number
from common.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from common.evidence.log import Log, read_log
from common.evidence.recipes import all_differences
from common.files import explain_os_error, locked
from common.machine.preflight import preflight
from common.run import launch
from common.run.run_set import HUNG_AFTER_S, RESULT, UNWRITABLE, Ended, RunSet
from common.run.sealing import seal
from common.run.sealing.anchoring import anchoring, authority
from common.run.sealing.untimed import remove_untimed
from common.run.set_folder import of_values, recipe_of_result

MAX_HUNG_AFTER_S = 86400


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of run sets."""
    parser.add_argument(
        "--continue",
        dest="continues",
        action="store_true",
        help="make only the runs that are missing in the results folder, with new numbers and seeds",
    )
    add_fail_fast(parser)
    add_options_of_runs(parser)


def add_fail_fast(parser: argparse.ArgumentParser) -> None:
    text = "stop at the first run that fails, or that stops without reaching its target"
    parser.add_argument("--fail-fast", action="store_true", help=text)


def add_options_of_runs(parser: argparse.ArgumentParser) -> None:
    """Declare the options of run sets but --continue: a study always makes only the runs that are missing."""
    parser.add_argument(
        "--hung-after",
        type=whole_number(1, MAX_HUNG_AFTER_S),
        default=HUNG_AFTER_S,
        metavar="S",
        help="end a run when no rank makes progress for so long; before the first step: half an hour",
    )
    parser.add_argument(
        "--drop-caches",
        action="store_true",
        help="drop the page cache of the whole machine before a run (root), not only the data set's",
    )
    parser.add_argument(
        "--force", action="store_true", help="run in spite of a fault of this machine, and log it"
    )
    parser.add_argument(
        "--anchor",
        type=authority,
        metavar="URL",
        help="let this RFC 3161 authority stamp the seal, the start, evaluations and end of runs",
    )


@contextmanager
def lock_folders(directories: Iterable[Path]) -> Iterator[None]:
    """Lock the folders of run sets; waits for another process that holds a lock.

    Then removes the files that killed launchers left of runs without run_start. Raises UserError for a folder
    that cannot be written.
    """
    with ExitStack() as held:
        for directory in sorted(set(directories)):  # in one order, so that no two wait for each other
            with explain_os_error(UNWRITABLE, directory, hint="choose another folder with --results DIR"):
                held.enter_context(locked(directory / ".running", "makes the runs of this folder"))
            remove_untimed(directory)
        yield


def apply_options(run_set: RunSet, args: argparse.Namespace, seed: int | None = None) -> RunSet:
    """Apply the options to a set; `seed` is the first seed, if a person chose one.

    Raises UserError for a fault of this machine, unless `--force` is given.
    """
    run_set = replace(
        run_set,
        hung_after_s=args.hung_after,
        drops_caches=args.drop_caches,
        anchor=args.anchor,
        preflight=preflight(run_set.loaded.config, run_set.directory, is_forced=args.force),
    )
    if run_set.why_apart:
        print(f"{run_set.why_apart}; these runs go to {os.path.relpath(run_set.directory)}")
    if args.continues:
        run_set = find_missing_runs(run_set, seed)
        more = f", {run_set.num_more} more did not come to their end" if run_set.num_more else ""
        print(f"{run_set.title}: {run_set.num_done} of {run_set.num_runs} runs are there{more}")
    return run_set


def find_missing_runs(run_set: RunSet, seed: int | None = None) -> RunSet:
    """Reduce a set to the runs that its folder lacks, with unused seeds and numbers.

    A run counts when it came to its own end, converged or not, and was not resumed. The log of one that a
    fault ended is kept, and the run is made again. Raises UserError for results of another configuration.
    """
    logs = {path: read_log(path) for path in sorted(run_set.directory.glob("result_*.txt"))}
    for path, log in logs.items():
        check_same_recipe(run_set, path, log)
    counted = [log for log in logs.values() if not log.is_resumed]  # as `ttt score` counts
    num_ended = count_ended(logs.values())
    num_done = min(num_ended, run_set.num_runs)
    used = {value for log in logs.values() if isinstance(value := log.value("seed"), int)}
    num_missing = run_set.num_runs - num_done
    waiting, taken = seal.choose_seeds(run_set, num_missing, seed)
    seeds = *waiting, *launch.draw_seeds(num_missing - len(waiting), seed, used | {*taken})
    indices = [int(match[1]) for path in logs if (match := RESULT.fullmatch(path.name))]
    return replace(
        run_set,
        seeds=(0,) * num_done + seeds,
        num_done=num_done,
        num_more=len(counted) - num_ended,
        first_index=max(indices, default=-1) + 1,
    )


def is_complete(run_set: RunSet) -> bool:
    """True if no run is missing: a rank other than 0 then need not wait, since rank 0 starts none.

    Rank 0 may be ahead, but no run ends before all ranks take part, so all ranks count the same.
    """
    logs = map(read_log, run_set.directory.glob("result_*.txt"))
    return count_ended(logs) >= run_set.num_runs


def count_ended(logs: Iterable[Log]) -> int:
    return sum(log.came_to_its_end and not log.is_resumed for log in logs)


def check_same_recipe(run_set: RunSet, path: Path, log: Log) -> None:
    """Raise UserError that names the first difference between a result and the run to be made.

    The code is not compared: a set's folder holds results of one code only, and a study warns of others.
    """
    config = run_set.loaded.config
    there, what = recipe_of_result(log, config), ""
    if "benchmark" not in there:
        what = "states no configuration" if log.first("run_start") else ""  # a run that never started
    elif difference := next(all_differences(there, of_values(config) | {"ranks": run_set.world_size}), None):
        what = f"{difference.key} is {difference.before} there, {difference.after} now"
    if what:
        hint = "--continue adds runs of the same configuration only"
        hint = "--study NAME begins another study" if run_set.cell else hint
        raise UserError(what, where=repository.relative_path(path), hint=hint)


def run_all(
    run_sets: Sequence[RunSet], command: Sequence[str], *, fail_fast: bool, index: int | None = None
) -> int:
    """Make one run of each set in turn; returns the first exit code that was not 0.

    A time-stamp authority stamps them if one was named. A run that fails does not end its set, unless with
    `fail_fast`. An interruption ends all sets, and so does a mistake that every run would meet before its
    clock starts. The summary at the end counts the missing runs. Raises UserError before the first run where
    a set cannot be sealed.
    """
    codes: list[int] = []
    outcomes: dict[str, Counter[str]] = {run_set.title: Counter() for run_set in run_sets}

    def record(title: str, ended: Ended) -> None:
        codes.append(ended.code)
        outcomes[title][ended.outcome] += 1

    turns = list_turns(run_sets)
    with anchoring(run_sets[0].anchor) as anchors:
        for run_set in run_sets:
            seal.seal_set(run_set)
            anchors.stamp_seal(run_set.directory)
        try:
            for turn, (run_set, number) in enumerate(turns, 1):
                if len(run_sets) > 1:
                    print(f"{turn} of {len(turns)}: ", end="")
                count = partial(record, run_set.title)
                ended = launch.run_once(run_set, number, command, index, count, anchors)
                if ended.code == EXIT_INTERRUPTED:
                    return EXIT_INTERRUPTED
                if ended.outcome == "refused" or (fail_fast and ended.code != EXIT_OK):
                    break
        finally:
            for run_set in run_sets:
                if run_set.num_runs > 1:
                    print(summarize(run_set, outcomes[run_set.title]), flush=True)
    return next((code for code in codes if code), EXIT_OK)


def list_turns(run_sets: Sequence[RunSet]) -> list[tuple[RunSet, int]]:
    """List the runs to make, one of each set in turn; under torchrun or srun only the next run."""
    turns = [
        (run_set, number)
        for number in range(max(run_set.num_runs for run_set in run_sets))
        for run_set in run_sets
        if run_set.num_done <= number < run_set.num_runs
    ]
    return turns[:1] if run_sets[0].makes_one_run else turns


def summarize(run_set: RunSet, outcomes: Counter[str]) -> str:
    num_new = run_set.num_runs - run_set.num_done
    counts = {
        "already there": run_set.num_done,
        "converged": outcomes["converged"],
        "missed the target": outcomes["missed"],
        "came to their end": outcomes["ended"],
        "failed": outcomes["failed"] + outcomes["refused"] + outcomes["lost"],
        "not run": num_new - outcomes.total(),
    }
    listed = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    missing = counts["failed"] + counts["not run"]
    again = "the same command" if run_set.cell else "the same command with --continue"
    hint = f"; {missing} missing, {again} makes them" if missing else ""
    return f"{run_set.title}: of {run_set.num_runs} runs {listed}{hint}"
