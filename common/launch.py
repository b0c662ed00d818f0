"""A run set: reserves results, draws seeds, starts each run as a process, keeps what a dead one leaves."""

import json
import os
import secrets
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import config as configs
from common import fingerprint, hardware, mllog, ranks, resume, system
from common.config import ROOT, Loaded, RunConfig
from common.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, UserError
from common.evidence.log import read_log

OFFICIAL_RUNS = {"resnet": 5, "bert": 10}
GRACE_S = 15  # how long a run may take to close its log when it is told to end


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """The runs of one configuration on this system; `directory` holds their results.

    `num_ranks` are to be started here; 1 also where torchrun or srun has started them. With a `checkpoint`
    the one run goes on from there.
    """

    loaded: Loaded
    system: str
    directory: Path
    num_runs: int
    seeds: tuple[int, ...]
    num_ranks: int = 1
    checkpoint: Path | None = None


def choose_ranks(config: RunConfig, asked: int | None) -> int:
    """Return how many ranks to start: as many as asked for, else one per GPU, else one.

    Raises UserError for more than there are samples in a batch, or GPUs; none are started below torchrun.
    """
    num_started, num_gpus = ranks.place().world_size, count_gpus()
    if asked is not None and num_started > 1:
        raise UserError(f"--nproc {asked}: {num_started} ranks were started already", hint="leave it out")
    chosen = asked or (1 if num_started > 1 else min(num_gpus or 1, config.global_batch_size))
    check_share(config, max(chosen, num_started))
    if 0 < num_gpus < chosen:
        raise UserError(f"--nproc {chosen}: {num_gpus} GPU(s) are visible, and each rank needs its own")
    return chosen


def count_gpus() -> int:
    """Return how many GPUs a run may use: those that CUDA_VISIBLE_DEVICES names, else all of this machine."""
    visible, count = os.environ.get("CUDA_VISIBLE_DEVICES"), len(hardware.gpu_names())
    return (
        count if visible is None else min(count, len([each for each in visible.split(",") if each.strip()]))
    )


def check_share(config: RunConfig, num_ranks: int) -> None:
    """Raise UserError when a rank would get no sample of a batch."""
    if num_ranks > config.global_batch_size:
        raise UserError(
            f"{num_ranks} ranks cannot divide {config.global_batch_size} samples", where="global_batch_size"
        )


def plan_run_set(loaded: Loaded, *, results: Path, runs: str, seed: int | None, num_ranks: int = 1) -> RunSet:
    """Decide names, number and seeds before the first run starts. `runs` is a number or `official`."""
    name = configs.benchmark_module(loaded.config.benchmark).Benchmark.mlperf_name
    if runs != "official" and not (runs.isdecimal() and 1 <= int(runs) <= 1000):
        raise UserError(f"--runs {runs}: expected a number from 1 to 1000, or official")
    num_runs = OFFICIAL_RUNS[name] if runs == "official" else int(runs)
    if num_runs > 1 and ranks.place().world_size > 1:
        raise UserError("below torchrun or srun each start is one run", hint="use --runs 1")
    seeds = [secrets.randbits(31)] if seed is None else [seed]
    while len(seeds) < num_runs:
        following = seeds[-1] + 1 if seed is not None else secrets.randbits(31)
        seeds += [following] if following not in seeds else []
    identifier = system.system_id(loaded.config)
    return RunSet(
        loaded=loaded,
        system=identifier,
        directory=results / identifier / name,
        num_runs=num_runs,
        seeds=tuple(seeds),
        num_ranks=num_ranks,
    )


def check_data(loaded: Loaded) -> None:
    """Verify the prepared data before anything is timed. Raises UserError for the first problem.

    At size full the content is left alone: reading it would warm the page cache, and loaders check it.
    """
    config = loaded.config
    directory = config.data.directory  # type: ignore[attr-defined]
    problems = fingerprint.verify(
        ROOT / directory, config.prepared_with(), hint=config.prepared_hint, has_content=config.size == "mini"
    )
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(problems[0].replace(f"{ROOT}/", "") + more, hint=config.prepared_hint)


def create_next(directory: Path, pattern: str) -> Path:
    """Create the first file of `pattern`, such as result_{}.txt from 0, that does not exist, exclusively."""
    number = 0
    while True:
        path = directory / pattern.format(number)
        try:
            path.open("x").close()
        except FileExistsError:
            number += 1
        else:
            return path


def reserve(directory: Path, index: int | None) -> Path:
    """Create result_N.txt exclusively: the next free one, or exactly `index`.

    Raises UserError when it exists.
    """
    path = directory / f"result_{index}.txt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if index is None:
            return create_next(directory, "result_{}.txt")
        path.open("x").close()
    except FileExistsError:
        if not directory.is_dir():
            raise UserError("not a folder", where=str(directory)) from None
        raise UserError("this result exists; results are never overwritten", where=str(path)) from None
    except OSError as error:
        raise UserError(f"cannot write results here ({error.strerror})", where=str(directory)) from error
    return path


def head(run_set: RunSet, command: Sequence[str]) -> str:
    """Return the plain lines at the head of a result: command, commit, versions, merged configuration."""
    config = run_set.loaded.config
    facts = {
        "benchmark": config.benchmark,
        "configuration": config.configuration,
        "size": f"{config.size} (a proxy: not a submission)" if config.size == "mini" else config.size,
        "command": shlex.join(["ttt", *command]),
        "commit": commit(),
        "versions": ", ".join(f"{name} {version}" for name, version in system.versions().items()),
    }
    lines = [f"{key}: {value}" for key, value in facts.items()]
    lines += [f"changed by {change}" for change in run_set.loaded.changes]
    lines += ["--- configuration", *(f"  {line}" for line in configs.to_yaml(config).splitlines())]
    text = "".join(f"# {line}\n" for line in lines).replace(f"{ROOT}/", "").replace(mllog.TOKEN, "")
    return text.encode("ascii", "backslashreplace").decode()


def commit() -> str:
    """Return the commit of the code, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        code = [":!results", ":!systems"]
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *code)
        return f"{git('rev-parse', 'HEAD')} ({'modified' if changed else 'clean'})"
    except (OSError, subprocess.CalledProcessError):  # not a checkout, or no git
        return "unknown"


def expected_seconds(directory: Path) -> float | None:
    """Return the median time of the successful runs in a results folder."""
    logs = [read_log(path) for path in sorted(directory.glob("result_*.txt"))]
    minutes = [log.minutes for log in logs if log.is_converged and log.minutes is not None]
    return 60 * statistics.median(minutes) if minutes else None


def run_once(run_set: RunSet, number: int, command: Sequence[str], index: int | None = None) -> int:
    """Run number `number` (from 0) as a process and return its exit code; its log is closed in any case."""
    config = run_set.loaded.config
    expected = expected_seconds(run_set.directory)
    path = reserve(run_set.directory, index)
    path.write_text(head(run_set, command))
    label = f"run {number + 1}/{run_set.num_runs}"
    shown = os.path.relpath(path)
    print(f"{config.benchmark} {config.configuration} {config.size}, {label} -> {shown}", flush=True)
    result = os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)
    spec: dict[str, Any] = {
        "config": config.model_dump(),
        "seed": run_set.seeds[number],
        "system": run_set.system,
        "result": result,
        "label": label,
        "expected_s": expected,
        "checkpoint": str(run_set.checkpoint) if run_set.checkpoint else None,
    }
    code = EXIT_INTERRUPTED  # until the process says otherwise
    try:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "spec.json"
            file.write_text(json.dumps(spec))
            code = supervise([*program(run_set.num_ranks), str(file)])
    finally:
        code = close(path, code, shown)
        resume.tidy(path, is_done=code == EXIT_OK)
    return code


def program(num_ranks: int) -> list[str]:
    """Return what runs one rank, or starts several."""
    python = [sys.executable, "-m"]
    return [*python, "common.torchrun", str(num_ranks)] if num_ranks > 1 else [*python, "common.timed_run"]


def take_part() -> int:
    """Be another rank than 0 of a run that torchrun or srun started; rank 0 knows what to do and logs it."""
    code = supervise(program(1))
    return EXIT_FINDINGS if code < 0 else code


def supervise(arguments: list[str]) -> int:
    """Run a process to its end; an interruption is passed on, and the process gets time to close its log."""
    process = subprocess.Popen(arguments, cwd=ROOT, start_new_session=True)  # only we signal it
    endings = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [(number, signal.getsignal(number)) for number in endings]
    for number, handler in previous[1:]:
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, raise_interrupt)
    try:
        return process.wait()
    except KeyboardInterrupt:
        for number in endings:  # a second Ctrl-C must not leave the log open
            signal.signal(number, signal.SIG_IGN)
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return EXIT_INTERRUPTED
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


def raise_interrupt(number: int, frame: Any) -> None:
    """Treat SIGTERM, and a closed terminal, as Ctrl-C."""
    raise KeyboardInterrupt


def close(path: Path, code: int, shown: str) -> int:
    """See that the log of an ended process is whole, and say in one line how the run ended."""
    mllog.abort(path, reason=f"the process ended with code {code}")
    log = read_log(path)
    if log.first("run_start") is None:
        path.unlink()
        print(
            f"error: the run ended (code {code}) before its clock started; nothing was timed", file=sys.stderr
        )
        return code or EXIT_FINDINGS
    if log.is_converged:
        print(f"  success: {60 * (log.minutes or 0):.1f} s to the target; {shown}")
    else:
        print(
            f"  aborted: the target was not reached (code {code}); the log is kept: {shown}", file=sys.stderr
        )
    if code == EXIT_OK and not log.is_converged:
        return EXIT_FINDINGS
    return EXIT_FINDINGS if code < 0 else code
