"""Times of short real runs beside a busy process, and alone, under several settings of OpenMP.

Runs of all settings are interleaved, so that a change of the machine concerns all of them. Every run takes
the same number of steps: with another number of threads sums round differently, and a target may need other
steps.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.config.division import OPEN
from common.config.names import split_name
from common.errors import UserError
from common.evidence import intervals
from common.evidence.log import read_log
from common.evidence.page import markdown_table
from common.files import temporary_folder
from common.machine.load import affinity, look
from common.repository import MODULE, WORKSPACE
from common.training.load import load_config

SPIN = "while True: pass"
FOLLOW = """
import os, pathlib, sys, time
results, comes_s, spin = sys.argv[1:]
while not any("block_start" in path.read_text() for path in pathlib.Path(results).glob("*/*/result_*.txt")):
    time.sleep(0.05)
time.sleep(float(comes_s))
os.execv(sys.executable, [sys.executable, "-c", spin])
"""
LIMIT_S = 100.0  # of a run with its start; 54 times as long as usual was seen
COMES_S = 2.0  # after its first step, where the neighbour comes under way
SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_")  # variables that begin so are not passed to a run
MOMENTS = ("quiet", "busy", "comes")


def list_policies() -> dict[str, dict[str, str]]:
    cores = len(affinity())
    return {
        "a thread on every core": {"OMP_NUM_THREADS": str(cores)},
        "the same, waiting passively": {"OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "PASSIVE"},
        "one thread fewer": {"OMP_NUM_THREADS": str(max(1, cores - 1))},
        "as many as are free (default)": {},
    }


@contextmanager
def busy_process(moment: str, results: Path) -> Iterator[None]:
    """Keep a core busy, all the time or from `COMES_S` after the first step of the run in `results`."""
    if moment == "quiet":
        yield
        return
    code = SPIN if moment == "busy" else FOLLOW
    with subprocess.Popen([sys.executable, "-c", code, str(results), str(COMES_S), SPIN]) as process:
        try:
            yield
        finally:
            process.kill()


def time_run(command: list[str], policy: dict[str, str], moment: str, limit_s: float) -> dict[str, Any]:
    """Return the seconds of a run's clock, its threads, and how it was disturbed.

    A run that reaches the limit is ended; its time so far is `more_than_s`.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    with temporary_folder() as folder:
        results, errors = folder / "results", folder / "errors.txt"
        paths = ["--results", str(results), "--systems", str(folder / "systems")]
        with busy_process(moment, results), errors.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *MODULE, "common.cli", *command, *paths],
                cwd=WORKSPACE,
                env=inherited | policy,
                stdout=subprocess.DEVNULL,
                stderr=stream,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(limit_s)
            finally:
                is_late = process.poll() is None
                process.terminate()  # closes the log
                process.wait()
        log = next((read_log(path) for path in results.rglob("result_*.txt")), None)
        if is_late:
            return {"seconds": None, "more_than_s": 60 * (log.minutes or 0.0) if log else 0.0}
        if log is None or not log.came_to_its_end:
            hint = (errors.read_text().strip() or "?")[-200:]
            raise UserError("a run did not come to its end", where="neighbour", hint=hint)
        threads, lowered = log.value("num_threads"), log.last("threads_lowered")
        return {
            "seconds": log.duration_s,
            "threads": threads,
            "threads_at_the_end": lowered.value if lowered else threads,
            "others": [event.value for event in log.events("machine_load")],
        }


def measure_neighbour(
    benchmark: str, name: str, *, size: str, num_steps: int, rounds: int, num_pairs: int
) -> dict[str, Any]:
    """Return the figures of every setting, alone and beside a busy process, each `rounds` times in turn.

    Then `num_pairs` quiet runs of the first and the last setting, which may differ by less than two runs do.
    """
    configuration, settings = split_name(benchmark, name, size=size)
    lasting = (f"{key}={num_steps}ba" for key in ("max_duration", "evaluate_every", "evaluate_from"))
    warmup = f"schedule.warmup={max(1, num_steps // 10)}ba"
    settings += [OPEN, "target=0.99", *lasting, "evaluate_offset=0sp", "evaluate_untrained=false", warmup]
    loaded = load_config(benchmark, configuration, size=size, settings=settings)  # a mistake ends it here
    sets = [part for setting in settings for part in ("--set", setting)]
    command = ["run", benchmark, configuration, "--size", size, "--seed", "3", *sets]
    load = look()
    policies = list_policies()
    figures: dict[str, Any] = {
        "benchmark": benchmark,
        "configuration": name,
        "size": size,
        "steps": loaded.config.plan().num_steps,  # a method may shorten it
        "cores": len(affinity()),
        "others_at_the_start": load.taken if load else None,
        "runs": {policy: {moment: [] for moment in MOMENTS} for policy in policies},
        "quiet_pairs": [],
    }
    for _, moment, policy in itertools.product(range(rounds), MOMENTS, policies):
        run = time_run(command, policies[policy], moment, LIMIT_S)
        figures["runs"][policy][moment].append(run)
        print(f"{moment:6} {policy:32} {json.dumps(run)}", file=sys.stderr, flush=True)
    before, *_, now = policies
    for pair in range(num_pairs):
        seconds = {}
        for policy in (before, now) if pair % 2 == 0 else (now, before):
            seconds[policy] = time_run(command, policies[policy], "quiet", LIMIT_S)["seconds"] or LIMIT_S
        figures["quiet_pairs"].append([seconds[before], seconds[now]])
        print(f"pair {pair + 1}: {seconds[before]:.2f} s before, {seconds[now]:.2f} s now", file=sys.stderr)
    figures["table"] = write_table(figures)
    return figures


def write_table(figures: dict[str, Any]) -> str:
    """Return the figures as a table for a page: medians, and the longest where they differ."""
    text = (
        f"Seconds of {figures['steps']:,} steps and an evaluation of {figures['benchmark']} "
        f"{figures['configuration']}, size {figures['size']}, {figures['cores']} cores: median and range."
    )
    rows = [
        [policy, *(describe_times(moments[moment]) for moment in MOMENTS)]
        for policy, moments in figures["runs"].items()
        if moments["quiet"]
    ]
    if rows:
        titles = ("setting", "quiet", "beside one busy process", "one that comes after 2 s")
        text += "\n\n" + markdown_table(titles, rows).rstrip()
    if pairs := figures["quiet_pairs"]:
        ratio = intervals.median([now / before for before, now in pairs])
        known = f", 95 % {ratio.interval.low:.3f} to {ratio.interval.high:.3f}" if ratio.interval else ""
        text += f"\n\nQuiet, now over before: {ratio.value:.3f} (median of {len(pairs)} pairs{known})."
    return text


def describe_times(runs: list[dict[str, Any]]) -> str:
    times = sorted(run["seconds"] or run["more_than_s"] for run in runs)
    over = "over " if any(run["seconds"] is None for run in runs) else ""
    middle = f"{over}{statistics.median(times):.1f}"
    return f"{middle} ({times[0]:.1f} to {times[-1]:.1f})" if len(times) > 1 else middle
