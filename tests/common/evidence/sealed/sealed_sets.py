"""Sealed sets made of logs: a seal, the list of the runs and chained logs, as `ttt run` writes them."""

import json
import shutil
from datetime import UTC, datetime

from common.evidence.log import parse_log
from common.evidence.recipes import configuration_of
from common.evidence.records import TOKEN
from common.evidence.rules.rule import edit, record_of, retime, time_of
from common.evidence.rules.sealed_files import bytes_of, extend, seal_again
from common.evidence.sealed.seal import RUNS, SEAL, Ended, Seal, Started
from common.repository import ROOT

NO_HASH = "0" * 64


def stamp(ms):
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat()


def outcome_of(log):
    if log.is_converged:
        return "converged"
    return "missed" if log.came_to_its_end else "failed"


def seal_logs(logs):
    """Return the files of a sealed set of these logs: a mapping of names to lines."""
    parsed = {name: parse_log(bytes_of(lines), name) for name, lines in logs.items()}
    order = sorted(parsed, key=lambda name: parsed[name].times[0])
    lead = parsed[order[0]]
    seal = Seal(
        made=stamp(lead.times[0] - 2000),
        system=lead.text("submission_platform"),
        benchmark=lead.benchmark,
        configuration_name=lead.configuration,
        size=lead.text("benchmark_size"),
        num_runs=len(logs),
        seeds=[parsed[name].value("seed") for name in order],
        commit=lead.header("commit"),
        code=lead.header("code"),
        versions=lead.header("versions"),
        ranks=lead.value("num_ranks") or 1,
        threads=lead.threads or 0,
        machine={},
        data=lead.text("dataset_fingerprint"),
        configuration=configuration_of(lead.settings),
    )
    events = []
    for name in order:
        log, times = parsed[name], [time_of(line) for line in logs[name] if TOKEN in line]
        start, end = stamp(times[0] - 1000), stamp(times[-1] + 1000)
        events.append(Started(time=start, result=name, seed=log.value("seed"), previous=NO_HASH))
        events.append(Ended(time=end, result=name, outcome=outcome_of(log), head=NO_HASH, previous=NO_HASH))
    lines = [event.model_dump_json() for event in events]
    return seal_again({SEAL: [seal.model_dump_json()], RUNS: lines, **logs})


def seal_committed(root, system, seal=seal_logs):
    """Write a committed set of resnet below a folder as if it had been sealed, and its description."""
    (root / "systems").mkdir()
    shutil.copy(ROOT / f"systems/{system}.json", root / "systems")
    paths = sorted((ROOT / f"results/{system}/resnet").glob("result_*.txt"))
    files = seal({path.name: path.read_text().splitlines() for path in paths})
    return write_files(files, root / "results" / system / "resnet")


def kill(lines):
    """Return the log of a run that a fault ended before its first evaluation."""
    at = next(index for index, line in enumerate(lines) if '"key": "eval_start"' in line)
    record = record_of(lines[-1]) | {"time_ms": time_of(lines[at - 1]) + 5}
    record["metadata"] = {"file": "mllog.py", "lineno": 1, "status": "aborted", "reason": "ended by SIGKILL"}
    return [*lines[:at], TOKEN + json.dumps(record)]


def with_killed(logs, at):
    """Return a sealed set in which run `at` was killed, so that one more was decided at the end."""
    logs = sorted(logs, key=start_of)
    killed = edit("seed", value=7)(kill(logs[at]))
    shift = time_of(killed[-1]) - start_of(killed) + 5_000
    later = [retime(lines, lambda ms: ms + shift) for lines in logs[at:]]
    return extend(seal_logs(numbered([*logs[:at], killed, *later])))


def start_of(lines):
    return time_of(next(line for line in lines if TOKEN in line))


def write_files(files, folder):
    """Write the files of a set to a new folder results/<system>/<benchmark>; returns it."""
    folder.mkdir(parents=True)
    for name, lines in files.items():
        (folder / name).write_bytes(bytes_of(lines))
    return folder


def numbered(logs):
    return {f"result_{number}.txt": lines for number, lines in enumerate(logs)}
