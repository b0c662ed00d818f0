"""Runs a run set: reserves results, draws seeds, starts each run as a process, closes the logs."""

import errno
import itertools
import math
import os
import secrets
import shlex
import statistics
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from common import repository
from common.config.merge import to_yaml
from common.config.schema import Loaded, RunConfig
from common.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, UserError
from common.evidence.disturbance import summarize_disturbance
from common.evidence.log import NUM_RUNS, Log, read_log
from common.files import create_next, make_folder
from common.machine import hardware, load, system
from common.machine.hardware import count_gpus, requested_gpus
from common.processes import delay_signals
from common.repository import ROOT, benchmark_module
from common.run import mllog, set_folder
from common.run.environments import rank_environments, temporary_environment
from common.run.heartbeat import Heartbeat
from common.run.run_set import Ended, RunSet
from common.run.set_folder import SetFolder, Way, num_threads
from common.run.supervision import Watchdog, supervise
from common.training import ranks
from common.training.checkpoint_header import tidy

MAX_DRIFT_MS = 1000
BALLAST_BYTES = 1 << 16  # kept free for the last line of a log on a disk that fills up


def choose_ranks(config: RunConfig, asked: int | None) -> int:
    """Return how many ranks to start: as many as `--nproc` says, else one per GPU, else one.

    Raises UserError for more ranks than samples in a batch, or than GPUs. Below torchrun it is 1.
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
        raise UserError(f"--nproc {chosen}: {num_gpus} GPU(s) are visible, and each rank needs its own")
    return chosen


def choose_ways(config: RunConfig, num_ranks: int) -> tuple[Way, Way]:
    """Return the ranks, device and threads of a run that starts now, and the defaults of this machine.

    A run that torchrun or srun has started has no defaults: the two are equal.
    """
    num_started, has_gpu = ranks.read_rank_info().world_size, bool(hardware.gpu_names())
    way = Way(max(num_ranks, num_started), "GPU" if count_gpus() else "CPU", num_threads(num_ranks))
    if num_started > 1:
        return way, way
    usual = min(len(hardware.gpu_names()) or 1, config.global_batch_size)
    return way, Way(usual, "GPU" if has_gpu else "CPU", num_threads(usual, is_asked=False))


def check_batch_share(config: RunConfig, num_ranks: int) -> None:
    if num_ranks > config.global_batch_size:
        raise UserError(
            f"{num_ranks} ranks cannot divide {config.global_batch_size} samples", where="global_batch_size"
        )


def plan_run_set(
    loaded: Loaded, *, results: Path, runs: str, seed: int | None, num_ranks: int = 1, cell: str = ""
) -> RunSet:
    """Decide names, number and seeds before the first run starts. `runs` is a number or `official`."""
    name = benchmark_module(loaded.config.benchmark).Benchmark.names.mlperf
    if runs != "official" and not (runs.isdecimal() and 1 <= int(runs) <= 1000):
        raise UserError(f"--runs {runs}: expected a number from 1 to 1000, or official")
    num_runs = NUM_RUNS[name] if runs == "official" else int(runs)
    if num_runs > 1 and ranks.read_rank_info().world_size > 1:
        raise UserError("below torchrun or srun each start is one run", hint="use --runs 1")
    folder = SetFolder(system.system_id(loaded.config, cell), "")
    if not cell:
        folder = set_folder.choose_folder(loaded, results, name, *choose_ways(loaded.config, num_ranks))
    return RunSet(
        loaded=loaded,
        system=folder.system,
        why_apart=folder.why,
        directory=results / folder.system / name,
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
        seeds |= {seed: None for seed in [next(drawn)] if seed not in used}
    return tuple(seeds)


def reserve(directory: Path, index: int | None, text: str = "", *, first: int = 0) -> Path:
    """Create result_N.txt with its first lines: the next free number from `first`, or exactly `index`.

    Raises UserError when it exists or cannot be written.
    """
    path = directory / f"result_{index}.txt"
    try:
        make_folder(directory)
        if index is None:
            path = create_next(directory, "result_{}.txt", first)
        else:
            path.open("x").close()
        try:
            path.write_text(text)
        except OSError:
            path.unlink()
            raise
    except FileExistsError:
        if not directory.is_dir():
            raise UserError("not a folder", where=str(directory)) from None
        raise UserError("this result exists; results are never overwritten", where=str(path)) from None
    except OSError as error:
        raise UserError(f"cannot write results here ({error.strerror})", where=str(directory)) from error
    return path


def compose_head(run_set: RunSet, command: Sequence[str]) -> str:
    """Compose the comment lines at the head of a result: command, commit, versions, configuration."""
    config = run_set.loaded.config
    facts = {
        "benchmark": config.benchmark,
        "configuration": config.configuration,
        "size": f"{config.size} (a proxy: not a submission)" if config.size == "mini" else config.size,
        "command": shlex.join(["ttt", *command]),
    }
    lines = [f"{key}: {value}" for key, value in facts.items()]
    lines += [*repository.head_lines(), f"versions: {system.versions_line()}"]
    lines += [f"threads: {num_threads(run_set.num_ranks)}"]
    lines += [f"preflight: {line_of_check}" for line_of_check in run_set.preflight]
    lines += [f"changed by {change}" for change in run_set.loaded.changes]
    lines += ["--- configuration", *(f"  {line}" for line in to_yaml(config).splitlines())]
    text = "".join(f"# {line}\n" for line in lines).replace(f"{ROOT}/", "").replace(mllog.TOKEN, "")
    return text.encode("ascii", "backslashreplace").decode()


def expected_seconds(directory: Path) -> float | None:
    logs = [read_log(path) for path in sorted(directory.glob("result_*.txt"))]
    durations = [log.duration_s for log in logs if log.is_converged]
    return statistics.median(durations) if durations else None


def run_once(run_set: RunSet, number: int, command: Sequence[str], index: int | None = None) -> Ended:
    """Start run `number` (from 0) as a process and report how it ended; its log is closed in any case."""
    config = run_set.loaded.config
    expected = expected_seconds(run_set.directory)
    most_threads, crowd = choose_threads(run_set)
    if crowd:
        run_set = replace(run_set, preflight=(*run_set.preflight, f"warning: {crowd}"))
        print(f"  warning: {crowd}", file=sys.stderr)
    label, text = f"run {number + 1}/{run_set.num_runs}", compose_head(run_set, command)
    path: Path | None = None
    ended, failure = EXIT_INTERRUPTED, "interrupted"  # until the process says otherwise
    try:
        with delay_signals():
            reserved = reserve(run_set.directory, index, text, first=run_set.first_index)
            ballast, shown, path = reserve_disk_space(reserved), os.path.relpath(reserved), reserved
        print(f"{run_set.title}, {label} -> {shown}", flush=True)
        spec: dict[str, Any] = {
            "config": config.model_dump(),
            "seed": run_set.seeds[number],
            "system": run_set.system,
            "result": os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path),
            "label": label,
            "expected_s": expected,
            "drops_caches": run_set.drops_caches,
            "needs_gpu": count_gpus() > 0,
            "checkpoint": str(run_set.checkpoint) if run_set.checkpoint else None,
            "most_threads": most_threads,
        }
        ended, failure = run_ranks(run_set.num_ranks, spec, hung_after_s=run_set.hung_after_s)
    finally:
        if path is not None:
            with delay_signals():
                ballast.close()
                outcome = close_log(path, ended, failure, shown)
                tidy(path, is_done=outcome.code == EXIT_OK)
    return outcome


def choose_threads(run_set: RunSet) -> tuple[int | None, str]:
    """Return the most threads of a rank, and the reason for fewer than all: other programs use the cores.

    Torch decides on GPUs, and where torchrun or srun starts ranks beside this one.
    """
    if count_gpus() or ranks.read_rank_info().world_size > 1:
        return None, ""
    return load.most_threads(run_set.num_ranks)


def reserve_disk_space(path: Path) -> IO[bytes]:
    """Hold 64 KiB on the result's disk until the returned file is closed, so that run_stop can be written.

    Removes the result and raises UserError when the disk is too full for that.
    """
    file: IO[bytes] | None = None
    try:
        file = tempfile.TemporaryFile(dir=path.parent, buffering=0)  # noqa: SIM115 - the caller closes it
        if file.write(bytes(BALLAST_BYTES)) < BALLAST_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        if file:
            file.close()
        path.unlink()
        raise UserError(f"cannot write results here ({error.strerror})", where=str(path.parent)) from error
    return file


def run_ranks(num_ranks: int, spec: dict[str, Any], *, hung_after_s: float) -> tuple[int, str]:
    """Run the ranks that this process has to start; returns the exit code, and which rank failed and why."""
    rank_info = ranks.read_rank_info()
    local_ranks = range(rank_info.rank, rank_info.rank + num_ranks)
    with (
        tempfile.TemporaryDirectory(prefix="ttt-", ignore_cleanup_errors=True) as folder,
        closing(Heartbeat.create(max(num_ranks, rank_info.world_size), spec)) as heartbeat,
    ):
        environments = [
            {**environment, **temporary_environment(folder)}
            for environment in rank_environments(num_ranks, folder)
        ]
        watchdog = Watchdog(heartbeat, local_ranks, hung_after_s)
        number, code = supervise(["-m", "common.run.worker", heartbeat.path], environments, watchdog)
    if code == EXIT_INTERRUPTED:
        return code, heartbeat.interruption()
    if code < 0:
        heartbeat.record_signal(local_ranks[number], -code)
    return (EXIT_FINDINGS if code < 0 else code), heartbeat.failure()


def take_part(hung_after_s: float) -> int:
    """Run a rank other than 0 below torchrun or srun; rank 0 has the specification and writes the log."""
    code, failure = run_ranks(1, {}, hung_after_s=hung_after_s)
    if failure and code != EXIT_INTERRUPTED:
        print(f"error: {failure}", file=sys.stderr)
    return code


def warn_after_end(log: Log, failure: str) -> None:
    """Warn of a failure after the end of a run, and of a clock that was set while it ran."""
    if failure:
        print(f"  warning: after its end: {failure}", file=sys.stderr)
    stop = log.last("run_stop")
    drift_ms = stop.metadata.get("clock_drift_ms") if stop else None
    if isinstance(drift_ms, int) and abs(drift_ms) > MAX_DRIFT_MS:
        what = f"the clock was set by {drift_ms / 1e3:.0f} s during this run"
        print(f"  warning: {what}: the log's times are off, its duration_ms is right", file=sys.stderr)


def close_log(path: Path, code: int, failure: str, shown: str) -> Ended:
    """Close the log of an ended run if it is open, and print in one line how the run ended."""
    was_open = True
    try:
        was_open = mllog.abort(path, reason=failure or f"the process ended with code {code}")
    except FileNotFoundError:
        what = "its result was removed while it ran, and is lost"
        print(f"  aborted: {failure}{'; ' if failure else ''}{what}: {shown}", file=sys.stderr)
        return Ended(code or EXIT_FINDINGS, "failed")
    except (OSError, UserError) as error:
        print(f"error: the log could not be closed and has no run_stop: {error}", file=sys.stderr)
    log = read_log(path)
    if disturbance := summarize_disturbance(log):
        print(f"  warning: {disturbance}")
    if log.first("run_start") is None:
        path.unlink()
        why = failure or f"it ended with code {code}"
        print(f"error: {why}; the clock had not started, nothing was timed", file=sys.stderr)
        return Ended(code or EXIT_FINDINGS, "refused" if code == EXIT_USAGE else "failed")
    if log.is_study and code == EXIT_OK and not was_open:
        quality = log.curve[-1].accuracy if log.curve else math.nan
        print(f"  done: {log.duration_s:.1f} s to the end, quality {quality:.4f}; {shown}")
        warn_after_end(log, failure)
        return Ended(code, "ended")
    if log.is_converged:
        print(f"  success: {log.duration_s:.1f} s to the target; {shown}")
        warn_after_end(log, failure)
        return Ended(code, "converged")
    has_failed = was_open or bool(failure)
    why = failure or (f"it ended with code {code}" if has_failed else "the target was not reached")
    print(f"  aborted: {why}; the log is kept: {shown}", file=sys.stderr)
    return Ended(code or EXIT_FINDINGS, "failed" if has_failed else "missed")
