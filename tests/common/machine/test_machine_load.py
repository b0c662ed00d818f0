"""Other programs on this machine are seen, reported and left cores; its own record shows a slow one."""

import contextlib
import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from common.evidence.log import read_log
from common.machine import host, record
from common.machine import load as machine_load
from common.machine.line import OK, WARNING, ok
from common.machine.load import Load, Meter, busy_programs, look, most_threads, read_alone
from common.run import launch
from common.run.machine_watch import MachineWatch
from common.run.mllog import RunLog
from common.training.ranks import SINGLE_RANK
from tests.command import ttt
from tests.runs import SHORT, until

NUM_CORES = len(machine_load.affinity())


@contextlib.contextmanager
def neighbours(number=NUM_CORES):
    """Keep so many cores busy."""
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    processes = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(number)]
    try:
        for process in processes:
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_other_programs_are_measured_and_named_without_their_arguments(usual_threads, monkeypatch):
    with neighbours():
        assert look().taken > 0.7
        names = busy_programs()
        number, why = most_threads(1)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")  # a person has chosen
        assert most_threads(1) == (None, "")
    assert number == 1 or number < NUM_CORES
    assert "other programs" in why and "recipe" in why
    assert any(name.startswith("python") for name in names)
    assert not any("while" in name or "-c" in name for name in names)


def test_own_work_is_nobody_elses(usual_threads):
    meter, until = Meter(), time.process_time() + 0.3
    while time.process_time() < until:
        pass
    reading = meter.read()
    assert reading.own_s >= 0.3
    assert machine_load.load_of([reading], [reading]).others <= (reading.busy - 0.25) / reading.seconds


@pytest.mark.parametrize(
    ("load", "num_ranks", "threads"),
    [
        (Load(2, 0.0, 0.0), 1, 2),
        (Load(2, 0.2, 0.0), 1, 2),
        (Load(2, 0.7, 0.0), 1, 1),
        (Load(2, 2.0, 0.0), 1, 1),
        (Load(2, 0.0, 0.9), 1, 1),
        (Load(64, 1.0, 0.0), 1, 63),
        (Load(64, 1.0, 0.0), 8, 7),
        (Load(1.5, 0.0, 0.0), 1, 1),
    ],
)
def test_each_thread_gets_a_core_for_itself(load, num_ranks, threads):
    assert load.threads(num_ranks) == threads


def test_stolen_time_and_the_quota_of_a_container_count(monkeypatch, tmp_path):
    stat, quota = tmp_path / "stat", tmp_path / "cpu.max"
    monkeypatch.setattr(machine_load, "STAT", stat)
    quota_v1 = [tmp_path / "quota", tmp_path / "period"]
    monkeypatch.setattr(machine_load, "QUOTA", quota)
    monkeypatch.setattr(machine_load, "QUOTA_V1", quota_v1)
    monkeypatch.setattr(machine_load, "affinity", lambda: {0, 1, 2, 3})

    def write(steal):
        stat.write_text("cpu 9 0 0\n" + "".join(f"cpu{n} 0 0 0 0 0 0 0 {steal} 0 0\n" for n in range(8)))

    write(0)
    meter = Meter()
    time.sleep(0.1)
    write(10)
    load = read_alone(meter)
    assert 0.4 / 0.3 < load.steal < 0.4 / 0.09 and load.cores == 4
    quota.write_text("150000 100000\n")
    assert machine_load.usable_cores() == 1.5
    quota.write_text("max 100000\n")
    assert machine_load.usable_cores() == 4
    quota.unlink()
    quota_v1[1].write_text("100000\n")
    for text, cores in (("250000\n", 2.5), ("-1\n", 4)):
        quota_v1[0].write_text(text)
        assert machine_load.usable_cores() == cores
    stat.unlink()
    assert Meter().read() is None and look() is None
    assert host.processors(Meter()).state == OK


# The number of threads falls when others come.


@pytest.fixture
def two_threads(usual_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_give_way_to_programs_that_stay(two_threads, monkeypatch, tmp_path):
    monkeypatch.setattr("common.run.machine_watch.BETWEEN_LOOKS_S", 0.2)
    path = tmp_path / "result_0.txt"
    watch, log = MachineWatch(None, SINGLE_RANK, torch.device("cpu")), RunLog(path, state="epoch")
    with neighbours():
        until(lambda: watch.step(log, 7) or "threads_lowered" in path.read_text(), seconds=10)
    log.close()
    event = read_log(path).last("threads_lowered")
    assert (event.value, event.metadata["before"], event.metadata["step"]) == (1, 2, 7)
    assert torch.get_num_threads() == 1


def test_threads_stay_on_gpus_beside_other_ranks_and_where_a_person_chose(two_threads, monkeypatch):
    rank = SimpleNamespace(world_size=2, local_rank=0)
    assert not MachineWatch(None, SINGLE_RANK, torch.device("cuda")).can_lower
    assert not MachineWatch(None, rank, torch.device("cpu")).can_lower
    assert MachineWatch(3, SINGLE_RANK, torch.device("cpu")).can_lower
    assert torch.get_num_threads() == 2  # 3 are no reason to raise it
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not MachineWatch(1, SINGLE_RANK, torch.device("cpu")).can_lower
    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_a_run_beside_a_busy_program_takes_fewer_threads_and_says_so(tmp_path, usual_threads, prepared_data):
    sets = [f"--set={setting}" for setting in SHORT]
    where = ["--results", tmp_path / "results", "--systems", tmp_path / "systems"]
    with neighbours():
        done = ttt("run", "language_bert", "optimized", "--size", "mini", *where, *sets)
    assert done.returncode == 0, done.stderr
    assert "warning: other programs use" in done.stderr
    (path,) = tmp_path.rglob("result_0.txt")
    text = path.read_text()
    assert re.search(r"\n# preflight: warning: processors: other programs use .*python", text)
    assert re.search(r'"num_threads", "value": 1,', text) or NUM_CORES > 2
    event = read_log(path).last("machine_load")
    assert event.value > 0.5 and len(event.metadata["involuntary_switches"]) == 1
    audit = ttt("check", path)
    assert audit.returncode == 0 and "T233 warning" in audit.stdout, audit.stdout


def test_a_run_whose_blocks_were_disturbed_ends_with_a_warning(tmp_path, capsys):
    events = (("run_start", None, {}), ("machine_load", 1.0, {"cores": 2, "threads": 2}))
    records = [{"time_ms": 1_700_000_000_000, "key": k, "value": v, "metadata": m} for k, v, m in events]
    path = tmp_path / "result_0.txt"
    path.write_text("".join(f":::MLLOG {json.dumps(record)}\n" for record in records))
    launch.close_log(path, 1, "", "here")
    assert "  warning: disturbed in 1 of 1 block " in capsys.readouterr().out


# The machine's own record.


def test_half_the_record_is_a_warning_and_a_better_speed_is_kept(no_record):
    line = ok("speed", "so fast")
    for speed, state in ((100.0, OK), (50.0, WARNING), (200.0, OK), (100.0, WARNING)):
        judged = record.judge_speed(line, "product", speed)
        assert judged.state == state
    assert judged.values["factor"] == 2.0 and "2.0 times as fast" in judged.found
    assert record.judge_speed(line, "copy", 1.0).state == OK
    (path,) = no_record.iterdir()
    for nonsense in ("[" * 9999, f'{{"product": 1{"0" * 400}}}'):
        path.write_text(nonsense)
        assert record.judge_speed(line, "product", 1.0).state == OK
    path.unlink()
    no_record.rmdir()
    no_record.touch()
    assert "cannot be kept" in record.judge_speed(line, "product", 1.0).found


def test_a_core_is_compared_with_its_best(no_record):
    first = host.core_speed()
    assert first.state == OK and first.values["flops_per_s"] > 1e8
    record.judge_speed(first, "speed of a core", 10 * first.values["flops_per_s"])
    assert host.core_speed().state == WARNING
