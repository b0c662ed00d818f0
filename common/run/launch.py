"""Runs a run set: reserves results, draws seeds, starts each run as a process, closes the logs."""

import itertools
import math
import os
import secrets
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from common import repository
from common.config.merge import to_yaml
from common.config.schema import Loaded, RunConfig
from common.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, UserError
from common.evidence.disturbance import summarize_disturbance
from common.evidence.log import MAX_DRIFT_MS, NUM_RUNS, Log, read_log
from common.files import (
    create_next,
    explain_os_error,
    hold_lock,
    make_folder,
    temporary_folder,
    undo_on_failure,
    write_all,
)
from common.machine import hardware, load, system
from common.machine.hardware import count_gpus, requested_gpus
from common.processes import delay_signals
from common.repository import MODULE, WORKSPACE, hide_folders, mlperf_name, name_data
from common.run import mllog
from common.run.heartbeat import Heartbeat
from common.run.run_set import REPLAY, UNWRITABLE, Ended, RunSet, Spec
from common.run.sealing import seal
from common.run.sealing.anchoring import Anchoring
from common.run.set_folder import choose_folder, num_threads
from common.run.supervision import Watchdog, rank_environments, supervise, temporary_environment
from common.training import batch_check, ranks
from common.training.checkpoint_header import tidy

BALLAST_BYTES = 1 << 16  # kept free for the last line of a log on a disk that fills up
FOLDERS, DIRECTORY = ("--data", "--results", "--systems"), "data.directory"
SIGNAL_CAUSES: dict[int, str] = {  # the usual ones
    signal.SIGKILL: " (kill -9, or out of memory)",
    signal.SIGBUS: " (a file was cut short, or a disk failed)",
}


def describe_signal(number: int) -> str:
    """Say which signal ended a process, and its usual cause."""
    names = {one.value: one.name for one in signal.Signals}  # without most real-time signals
    return f"ended by {names.get(number, f'signal {number}')}{SIGNAL_CAUSES.get(number, '')}"


def choose_ranks(config: RunConfig, asked: int | None) -> int:
    """Return how many ranks to start: as many as `--nproc` says, else one per GPU, else one.

    Under torchrun or srun it is 1. Raises UserError for more ranks than samples in a batch, or than GPUs.
    """
    num_started, num_gpus = ranks.read_rank_info().world_size, count_gpus()
    if asked is not None and num_started > 1:
        raise UserError(f"--nproc {asked}: {num_started} ranks were started already", hint="leave it out")
    chosen = asked or (1 if num_started > 1 else min(num_gpus or 1, config.global_batch_size))
    check_batch_share(config, max(chosen, num_started))
    if requested_gpus() and not hardware.gpu_names():
        hint = "leave the variable empty to run on the CPU"
        raise UserError("is set but no GPU was found", where="CUDA_VISIBLE_DEVICES", hint=hint)
    if 0 < num_gpus < chosen:
        raise UserError(f"--nproc {chosen}: each rank needs a GPU of its own, visible: {num_gpus}")
    return chosen


def check_batch_share(config: RunConfig, num_ranks: int) -> None:
    if num_ranks > config.global_batch_size:
        what = f"{num_ranks} ranks cannot divide {config.global_batch_size} samples"
        raise UserError(what, where="global_batch_size")


def verify_recipe(loaded: Loaded, asked: int | None) -> tuple[Loaded, int]:
    """Return the configuration, marked if its recipe is unverified, and the number of ranks to start.

    Raises UserError for an unverified recipe that no --set has asked for.
    """
    num_ranks = choose_ranks(loaded.config, asked)
    world_size = ranks.count_all(num_ranks)
    loaded = batch_check.mark_unverified(loaded, world_size)
    batch_check.check_asked(loaded, world_size)
    return loaded, num_ranks


def plan_run_set(
    loaded: Loaded,
    *,
    results: Path,
    runs: str,
    seed: int | None,
    num_ranks: int = 1,
    cell: str = "",
    tuned_from: str = "",
) -> RunSet:
    """Decide folder, number and seeds before the first run starts. `runs` is a number or `official`."""
    name = mlperf_name(loaded.config.benchmark)
    if runs != "official" and not (runs.isdecimal() and 1 <= int(runs) <= 1000):
        raise UserError(f"--runs {runs}: expected a number from 1 to 1000, or official")
    num_runs = NUM_RUNS[name] if runs == "official" else int(runs)
    if cell:
        directory, why_apart = results / system.system_id(loaded.config, cell) / name, ""
    else:
        directory, why_apart = choose_folder(loaded, results, name, num_ranks, tuned_from=tuned_from)
    return RunSet(
        loaded=loaded,
        why_apart=why_apart,
        directory=directory,
        num_runs=num_runs,
        seeds=draw_seeds(num_runs, seed),
        num_ranks=num_ranks,
        cell=cell,
    )


def draw_seeds(num_runs: int, first: int | None, used: Collection[int] = ()) -> tuple[int, ...]:
    """Draw seeds that differ from each other and from those `used`: at random, or counted from `first`."""
    drawn = (secrets.randbits(31) for _ in itertools.count()) if first is None else itertools.count(first)
    seeds: dict[int, None] = {}
    while len(seeds) < num_runs:
        if (seed := next(drawn)) not in used:
            seeds[seed] = None
    return tuple(seeds)


def reserve(directory: Path, index: int | None, text: str = "", *, first: int = 0) -> Path:
    """Create result_N.txt and write `text` to it; N is `index`, or the next free number from `first` on.

    Raises UserError when it exists or cannot be written.
    """
    path = directory / f"result_{index}.txt"
    with explain_os_error(UNWRITABLE, directory):
        try:
            make_folder(directory)
            if index is None:
                path = create_next(directory, "result_{}.txt", first)
            else:
                path.open("x").close()
        except FileExistsError:
            if not directory.is_dir():
                raise UserError("not a folder", where=str(directory)) from None
            raise UserError("this result exists; results are never overwritten", where=str(path)) from None
        with undo_on_failure(path.unlink):
            path.write_text(text)
    return path


def reserve_disk_space(path: Path) -> IO[bytes]:
    """Hold 64 KiB on the result's disk until the returned file is closed, so that run_stop can be written.

    Removes the result and raises UserError when the disk is too full for that.
    """
    with explain_os_error(UNWRITABLE, path.parent), undo_on_failure(path.unlink):
        file = tempfile.TemporaryFile(dir=path.parent, buffering=0)  # noqa: SIM115 - the caller closes it
        with undo_on_failure(file.close):
            write_all(file, os.urandom(BALLAST_BYTES))  # zeros take no room where a disk compresses
            os.fsync(file.fileno())
    return file


def describe_command(command: Sequence[str], config: RunConfig) -> str:
    """Return a command as its log states it: with a name for each folder outside the repository.

    The names are `data`, `results` and `systems`. argparse accepts prefixes of options; so does this.
    """
    words, directory = ["ttt"], config.data.directory  # type: ignore[attr-defined]
    for before, word in zip(["", *command], command, strict=False):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        names = [name for name in (*FOLDERS, "--anchor") if len(option) > 2 and name.startswith(option)]
        if names == ["--anchor"] and value:  # the URL may be private, or hold a key
            words.append(f"{option}=" * bool(equals) + "URL")
        elif names and value and not Path(value).resolve().is_relative_to(WORKSPACE):
            words.append(f"{option}=" * bool(equals) + names[0].removeprefix("--"))
        else:
            words.append(word.replace(f"{DIRECTORY}={directory}", f"{DIRECTORY}={name_data(directory)}"))
    return shlex.join(words)


def compose_head(run_set: RunSet, command: Sequence[str]) -> str:
    """Compose the comment lines at the head of a result: command, commit, versions, configuration."""
    config = run_set.loaded.config
    lines = [
        f"benchmark: {config.benchmark}",
        f"configuration: {config.configuration}",
        f"size: {config.size}{' (a proxy: not a submission)' if config.size == 'mini' else ''}",
        f"command: {describe_command(command, config)}",
        *repository.head_lines(),
        f"versions: {system.versions_line()}",
        f"threads: {num_threads(run_set.num_ranks)}",
        *(f"preflight: {line_of_check}" for line_of_check in run_set.preflight),
        *(f"changed by {change}" for change in run_set.loaded.changes),
        "--- configuration",
        *(f"  {line}" for line in to_yaml(config).splitlines()),
    ]
    text = hide_folders("".join(f"# {line}\n" for line in lines)).replace(mllog.TOKEN, "")
    return text.encode("ascii", "backslashreplace").decode()


def expected_seconds(directory: Path) -> float | None:
    logs = [read_log(path) for path in sorted(directory.glob("result_*.txt"))]
    durations = [log.duration_s for log in logs if log.is_converged and not log.is_resumed]
    return statistics.median(durations) if durations else None


def specify_run(run_set: RunSet, seed: int, path: Path, most_threads: int | None) -> Spec:
    return Spec(
        config=run_set.loaded.config.model_dump(),
        seed=seed,
        system=run_set.system,
        result=os.path.relpath(path, WORKSPACE) if path.is_relative_to(WORKSPACE) else str(path),
        expected_s=expected_seconds(run_set.directory),
        drops_caches=run_set.drops_caches,
        needs_gpu=count_gpus() > 0,
        checkpoint=str(run_set.checkpoint) if run_set.checkpoint else None,
        most_threads=most_threads,
        processor=hardware.processor_name(),
        bf16_instructions=tuple(hardware.bf16_instructions()),
    )


def run_once(
    run_set: RunSet,
    number: int,
    command: Sequence[str],
    index: int | None,
    record: Callable[[Ended], None],
    anchors: Anchoring,
) -> Ended:
    """Start run `number` (from 0) as a process; its log is closed in any case.

    `record` gets the end of the run, also if a signal then prevents the return. The authority of `anchors`,
    if it has one, stamps the log.
    """
    is_alone = not count_gpus() and ranks.read_rank_info().world_size == 1  # else torch chooses the threads
    most_threads, crowd = load.most_threads(run_set.num_ranks) if is_alone else (None, "")
    if crowd:
        run_set = replace(run_set, preflight=(*run_set.preflight, f"warning: {crowd}"))
        print(f"  warning: {crowd}", file=sys.stderr)
    text = compose_head(run_set, command)
    path: Path | None = None
    code, failure = EXIT_INTERRUPTED, "interrupted"  # until the process has ended
    try:
        with delay_signals():
            reserved = reserve(run_set.directory, index, text, first=run_set.first_index)
            running = hold_lock(reserved)  # the lock ends with this process: see untimed.py
            with undo_on_failure(running.close):
                ballast = reserve_disk_space(reserved)
                with undo_on_failure(ballast.close):
                    seal.start_run(run_set, number, reserved)
            shown, path = "" if run_set.cell == REPLAY else os.path.relpath(reserved), reserved
        place = f" -> {shown}" if shown else ""
        print(f"{run_set.title}, run {number + 1}/{run_set.num_runs}{place}", flush=True)
        if run_set.checkpoint is None:  # a resumed run replaces its log, and no interval of it is compared
            anchors.watch(path)
        spec = specify_run(run_set, run_set.seeds[number], path, most_threads)
        try:
            code, failure = run_ranks(run_set.num_ranks, asdict(spec), hung_after_s=run_set.hung_after_s)
        except OSError as error:
            why = f"{error.strerror or error} ({error.filename or 'starting the ranks'})"
            code, failure = EXIT_USAGE, why
    finally:
        if path is not None:
            with delay_signals():
                ballast.close()
                running.close()
                outcome = close_log(path, code, failure, shown)
                seal.end_run(run_set, path, outcome)
                record(outcome)
                tidy(path, is_done=outcome.code == EXIT_OK)
    return outcome


def run_ranks(num_ranks: int, spec: dict[str, Any], *, hung_after_s: float) -> tuple[int, str]:
    """Run the ranks that this process has to start; returns the exit code, and which rank failed and why."""
    rank_info = ranks.read_rank_info()
    local_ranks = range(rank_info.rank, rank_info.rank + num_ranks)
    with (
        temporary_folder() as folder,
        closing(Heartbeat.create(ranks.count_all(num_ranks), spec)) as heartbeat,
    ):
        temporary = temporary_environment(folder)
        environments = [environment | temporary for environment in rank_environments(num_ranks, folder)]
        watchdog = Watchdog(heartbeat, local_ranks, hung_after_s)
        number, code = supervise([*MODULE, "common.run.worker", heartbeat.path], environments, watchdog)
    if code == EXIT_INTERRUPTED:
        return code, heartbeat.interruption()
    if code < 0:
        heartbeat.record_death(local_ranks[number], describe_signal(-code))
        code = EXIT_FINDINGS
    return code, heartbeat.failure()


def take_part(hung_after_s: float) -> int:
    """Run a rank other than 0 under torchrun or srun; rank 0 has the specification and writes the log."""
    code, failure = run_ranks(1, {}, hung_after_s=hung_after_s)
    if failure and code != EXIT_INTERRUPTED:
        print(f"error: {failure}", file=sys.stderr)
    return code


def close_log(path: Path, code: int, failure: str, shown: str) -> Ended:
    """Close the log of an ended run if it is open, and print in one line how the run ended.

    `shown` is the path of a log that is kept, else ''.
    """
    why, was_open, was_timed = failure or f"the process ended with code {code}", True, True
    place = f"; {shown}" if shown else ""
    try:
        content = path.read_bytes()
        was_timed = b'"run_start"' in content[: content.rfind(b"\n") + 1]  # a cut line started no clock
        was_open = mllog.abort(path, reason=why)
    except FileNotFoundError:
        what = f"{failure}{'; ' if failure else ''}its result was removed while it ran, and is lost"
        print(f"  aborted: {what}", file=sys.stderr)
        return Ended(EXIT_FINDINGS if code in (EXIT_OK, EXIT_USAGE) else code, "lost", what)
    except (OSError, UserError) as error:
        print(f"error: the log could not be closed and has no run_stop: {error}", file=sys.stderr)
    log = read_log(path)
    if disturbance := summarize_disturbance(log):
        print(f"  warning: {disturbance}")
    if not was_timed:
        path.unlink()
        print(f"error: {why}; the clock had not started, nothing was timed", file=sys.stderr)
        return Ended(code or EXIT_FINDINGS, "refused" if code == EXIT_USAGE else "failed", why)
    is_study_end = log.is_study and code == EXIT_OK and not was_open
    if is_study_end or log.is_converged:
        quality = log.curve[-1].accuracy if log.curve else math.nan
        outcome = f"to the end, quality {quality:.4f}" if is_study_end else "to the target"
        print(f"  {'done' if is_study_end else 'success'}: {log.duration_s:.1f} s {outcome}{place}")
        warn_after_end(log, failure)
        return Ended(code, "ended" if is_study_end else "converged", failure)
    has_failed = was_open or bool(failure) or log.first("run_start") is None
    if not (was_open or failure):
        why = "its log cannot be read" if has_failed else "the target was not reached"
    kept = f"; the log is kept: {shown}" if shown else ""
    print(f"  aborted: {why}{kept}", file=sys.stderr)
    return Ended(code or EXIT_FINDINGS, "failed" if has_failed else "missed", why)


def warn_after_end(log: Log, failure: str) -> None:
    """Warn of a failure after the end of a run, and of a clock that was set while it ran."""
    if failure:
        print(f"  warning: after its end: {failure}", file=sys.stderr)
    stop = log.last("run_stop")
    drift_ms = stop.metadata.get("clock_drift_ms") if stop else None
    if isinstance(drift_ms, int) and abs(drift_ms) > MAX_DRIFT_MS:
        what = f"the clock was set by {drift_ms / 1e3:.0f} s during this run"
        print(f"  warning: {what}: the log's times are off, its duration_ms is right", file=sys.stderr)
