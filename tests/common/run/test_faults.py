"""Faults met by real processes: what ends, what one line says, what is kept, and that nothing else is left.

The table of common/run/README.md states what these tests show.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from common.commands.data import prepare
from common.data import manifest
from common.machine import hardware
from common.repository import ROOT, benchmarks
from common.run.heartbeat import COMPUTING, EVALUATING, LOADING, Heartbeat
from common.run.supervision import Watchdog
from common.training.load import load_config
from tests.runs import BERT, END_S, HANG_S, RESNET, until

WHEN = "(after step [0-9]+|before the first step)"
KILLED = r"ended by SIGKILL \(kill -9, or out of memory\)"
HUNG = r"no progress for 3 s \(--hung-after\), stopped, (computing a step|waiting for a batch)"


@pytest.fixture(scope="module", autouse=True)
def prepared():
    for name in benchmarks():
        prepare(load_config(name, "baseline", size="mini", settings=[]).config)


def stop_of(path):
    """Return how the log of a run that failed was closed: the reason."""
    last = json.loads(path.read_text().splitlines()[-1].split(" ", 1)[1])
    assert last["key"] == "run_stop" and last["metadata"]["status"] == "aborted"
    return last["metadata"]["reason"]


def failure_in(done, path, code=1):
    """Assert that one line says who failed, when and why, as the log does; returns it."""
    assert done.returncode == code
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("  aborted: ")]
    why = stop_of(path)
    assert line == f"  aborted: {why}; the log is kept: {os.path.relpath(path)}"
    return why


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own, of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder):
    with contextlib.suppress(OSError), (folder / "filler").open("wb") as file:
        while True:
            file.write(bytes(512))
            file.flush()


@pytest.mark.slow
def test_a_hung_rank_and_a_killed_one_end_their_runs_and_not_the_set(place, ttt):
    def faults():
        place.until_logged('"block_start"', times=2)
        place.rank(1).suspend()
        suspended = time.monotonic()
        place.until_logged('"run_stop"')
        assert time.monotonic() - suspended < END_S + 3
        place.until_logged('"block_start"', index=1, times=2)
        place.rank(1).kill()
        return time.monotonic()

    options = ("--nproc", 2, "--runs", 2, "--hung-after", 3)
    done = ttt(place.arguments(BERT, *options), faults)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    hung, killed = map(stop_of, place.results())
    said = "rank 1 of 2, after step [0-9]+: "
    assert re.fullmatch(said + HUNG, hung)
    assert re.fullmatch(said + KILLED, killed)
    assert f"aborted: {hung}; the log is kept" in done.stderr
    assert f"aborted: {killed}; the log is kept" in done.stderr
    stacks = done.stderr.split("--- stack of ")[1:]
    assert [stack[:6] for stack in stacks] == ["rank 0", "rank 1"]
    assert all("train_step" in stack or "train_block" in stack for stack in stacks)
    assert "of 2 runs 2 failed; 2 missing" in done.stdout


@pytest.mark.slow
def test_a_set_goes_on_after_a_fault_and_continues_after_ctrl_c(place, ttt):
    def faults():
        place.until_logged('"block_start"')
        place.rank().kill()
        place.until_logged('"block_start"', index=2)
        os.kill(os.getpid(), signal.SIGINT)
        return time.monotonic()

    settings = (*BERT, "target=0.005", "evaluate_from=300ba")  # long enough to be interrupted
    command = place.arguments(settings, "--runs", 3, "--seed", 5)
    done = ttt(command, faults)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    first, _, third = before = place.results()
    assert re.fullmatch(f"rank 0 of 1, {WHEN}: {KILLED}", stop_of(first))
    assert re.fullmatch(f"{WHEN}: interrupted", stop_of(third))
    assert "of 3 runs 1 converged, 2 failed; 2 missing" in done.stdout
    kept = [path.read_bytes() for path in before]

    other = start(place, *command, "--continue")  # one of the two makes the runs, the other waits for it
    done = ttt([*command, "--continue"])
    out, errors = other.communicate(timeout=HANG_S)
    assert (done.returncode, other.returncode) == (0, 0), errors
    assert sorted(text.count("1 of 3 runs are there, 2 more did not") for text in (out, done.stdout)) == [
        0,
        1,
    ]
    assert "of 3 runs 1 were there, 2 converged\n" in out + done.stdout
    assert "which makes the missing runs of this folder" in out + done.stdout
    assert [path.name for path in place.results()] == [f"result_{index}.txt" for index in range(5)]
    assert [path.read_bytes() for path in before] == kept
    text = "".join(path.read_text() for path in place.results())
    assert re.findall(r'"key": "seed", "value": (\d+)', text) == ["5", "6", "7", "8", "9"]

    done = ttt([*command, "--continue"])
    assert done.returncode == 0 and "3 of 3 runs are there" in done.stdout
    assert len(place.results()) == 5


def start(place, *arguments, **environment):
    """Start a launcher as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "common.cli", *arguments],
        cwd=ROOT,
        env=os.environ | place.environment | environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_death_of_the_launcher_ends_its_ranks_which_close_the_log(place):
    launchers = [start(place, *place.arguments(BERT, "--nproc", num, "--index", num)) for num in (1, 2)]
    paths = [place.until_logged('"block_start"', index=num) for num in (1, 2)]
    for each in launchers:
        each.kill()
    place.check_nothing_left()
    for each in launchers:
        each.communicate(timeout=END_S)
    assert all(re.fullmatch(f"{WHEN}: interrupted", stop_of(path)) for path in paths)


@pytest.mark.slow
def test_a_rank_that_waits_for_another_ends_after_its_launcher(place):
    launcher = start(place, *place.arguments(BERT, "--nproc", 2))
    path = place.until_logged('"block_start"')
    stopped = place.rank(1)
    stopped.suspend()
    time.sleep(1)  # rank 0 waits for it by now, outside of Python
    launcher.kill()
    until(lambda: [each.pid for each in place.processes("common.run.worker")] == [stopped.pid], END_S)
    assert stop_of(path).endswith("interrupted")
    stopped.resume()
    place.check_nothing_left()
    launcher.communicate(timeout=END_S)


@pytest.mark.slow
def test_an_allocation_that_is_taken_away_ends_every_process_and_closes_the_log(place):
    launcher = start(place, *place.arguments(BERT, "--nproc", 2))
    path = place.until_logged('"block_start"')
    for each in place.processes():  # as Slurm does
        each.terminate()
    until(lambda: told_again(place.processes("common.run.worker")), END_S)
    _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 130 and "Traceback" not in errors
    assert stop_of(path).endswith("interrupted") and f"aborted: {stop_of(path)}" in errors
    place.check_nothing_left()


def told_again(processes):
    """Send SIGTERM once more, as the launcher does, and Slurm; returns whether nobody is left."""
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    return not processes


@pytest.mark.slow
def test_two_launches_on_one_result_leave_one_run(place, ttt):
    command = place.arguments((*BERT, "target=0.005"), "--index", 3)
    other = start(place, *command)
    done = ttt(command)
    out, errors = other.communicate(timeout=HANG_S)
    codes = {done.returncode: done.stderr, other.returncode: errors}
    assert set(codes) == {0, 2} and "never overwritten" in codes[2]
    (path,) = place.results()
    assert path.read_text().count('"run_stop"') == 1 and (done.stdout + out).count("success") == 1


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_a_log_that_is_whole(place, ttt, small_disk):
    place.results_folder = small_disk

    def faults():
        place.until_logged('"eval_accuracy"')
        fill(small_disk)

    settings = (*BERT, "evaluate_every=1ba", "evaluate_from=1ba", "evaluation_batch_size=64")
    command = place.arguments(settings, "--runs", 2, "--force")  # the preflight would refuse so small a disk
    done = ttt_without_files(ttt, place, command, faults)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (path,) = place.results()
    why = stop_of(path)
    assert re.fullmatch(
        r"rank 0 of 1, after step \d+: result_0.txt: cannot write the log \(No space left on device\)", why
    )
    assert f"aborted: {why}; the log is kept" in done.stderr
    assert "cannot write results here (No space left on device)" in done.stderr.splitlines()[-1]
    assert "of 2 runs 1 failed, 1 not run; 2 missing" in done.stdout


def ttt_without_files(ttt, place, arguments, faults):
    """Run a command whose results folder also holds what fills the disk."""
    place.check_nothing_left, check = lambda: None, place.check_nothing_left
    done = ttt(arguments, faults)
    (place.results_folder / "filler").unlink()
    check()
    return done


def test_a_disk_that_fills_up_while_data_are_prepared_is_told_and_cleared(ttt, small_disk):
    directory = small_disk / "digits"
    command = ["data", "prepare", "image_classification", "--size", "mini"]
    done = ttt([*command, "--set", f"data.directory={directory}"])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert list(small_disk.iterdir()) == []


def test_a_results_folder_that_is_read_only_is_named(place, ttt, small_disk):
    place.results_folder = small_disk / "results"
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for more in ([], ["--force"]):  # told by the preflight, or where the result would be written
        done = ttt(place.arguments(BERT, *more))
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert str(small_disk) in line and "Read-only file system" in line


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_and_with_fail_fast_the_set(place, ttt):
    settings = (*RESNET, "optimizer.learning_rate=1.0e+30")  # with workers, whose folders are temporary files
    done = ttt(place.arguments(settings, "--nproc", 2, "--runs", 3, "--fail-fast"))
    (path,) = place.results()
    why = failure_in(done, path, 2)
    assert re.match("rank [01] of 2, after step 30: training: the loss is nan", why)
    assert "of 3 runs 1 failed, 2 not run; 3 missing" in done.stdout


@pytest.fixture
def own_data(place):
    """A copy of the text, to be damaged, and the setting that names it."""
    copy = place.folder / "data"
    shutil.copytree(ROOT / "data/language_bert/mini", copy)
    return copy, f"data.directory={copy}"


@pytest.mark.slow
def test_a_shard_that_is_damaged_under_way_is_named_with_its_record(place, ttt, own_data):
    copy, setting = own_data
    shard = copy / "train-00000.shard"

    def faults():
        place.until_logged('"block_start"')
        with shard.open("r+b") as file:
            file.write(bytes(shard.stat().st_size))
        return time.monotonic()

    done = ttt(place.arguments((*BERT, setting)), faults)
    why = failure_in(done, place.results()[0], 2)
    assert re.fullmatch(rf"rank 0 of 1, .*: {shard} record \d+: is corrupt \(CRC differs\)", why)
    done = ttt(place.arguments((*BERT, setting)))
    assert done.returncode == 2 and "content changed" in done.stderr and len(place.results()) == 1


@pytest.mark.slow
def test_half_of_the_evaluation_set_is_noticed_before_the_clock_or_at_the_evaluation(place, ttt, own_data):
    copy, setting = own_data
    index = np.load(copy / "evaluation.index.npy")
    np.save(copy / "evaluation.index.npy", index[:192])
    done = ttt(place.arguments((*BERT, setting)))
    assert done.returncode == 2 and "evaluation.index.npy" in done.stderr and place.results() == []

    words = (index["num_tokens"].astype(int) + 2 * index["num_masked"])[:192].sum()
    os.truncate(copy / "evaluation-00000.shard", 2 * int(words))
    manifest.write_manifest(copy, manifest.read_manifest(copy, hint="")["facts"])
    done = ttt(place.arguments((*BERT, setting, "evaluate_untrained=true")))
    why = failure_in(done, place.results()[0], 2)
    assert why == f"rank 0 of 1, before the first step: {copy}: evaluation: 192 samples, expected 384"


@pytest.mark.slow
def test_a_loaders_worker_that_is_killed_ends_the_run_and_a_stopped_one_does_not_outlive_it(place, ttt):
    def faults():
        place.until_logged('"block_start"', index=1)
        rank = place.rank()
        (worker,) = until(rank.children)
        worker.kill()
        return time.monotonic()

    def stop():
        place.until_logged('"block_start"')
        rank = place.rank()
        (worker,) = until(rank.children)
        worker.suspend()  # and would stay for ever
        rank.kill()

    assert ttt(place.arguments(RESNET), stop).returncode == 1
    done = ttt(place.arguments(RESNET, "--index", 1), faults)
    why = failure_in(done, place.results()[1])
    assert "Traceback" not in done.stderr
    assert why.startswith("rank 0 of 1, ") and re.search(
        r"RuntimeError: DataLoader worker .*(Killed|exited unexpectedly)", why
    )


QUICK = (*BERT, "target=0.005", "evaluate_from=30ba")  # its first evaluation is its last


@pytest.mark.slow
def test_a_console_that_goes_away_ends_no_run(place):
    launcher = start(place, *place.arguments(QUICK, "--runs", 2))
    launcher.stdout.readline()
    launcher.stdout.close()  # as head does
    assert launcher.wait(HANG_S) == 141
    assert "Traceback" not in launcher.stderr.read()
    launcher.stderr.close()
    assert [path.read_text().count('"success"') for path in place.results()] == [1, 1]
    for redirection, code in ((">/dev/full", 141), (">&-", 0), ("2>&-", 0)):
        command = [sys.executable, "-m", "common.cli", *place.arguments(QUICK)]
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
            cwd=ROOT,
            env=os.environ | place.environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == code and "Traceback" not in done.stderr
        assert ("cannot be written (No space left on device)" in done.stderr) == (code == 141)
    assert [path.read_text().count('"success"') for path in place.results()] == [1] * 5
    place.check_nothing_left()


@pytest.mark.slow
def test_a_result_that_is_removed_under_way_costs_that_run_alone(place, ttt):
    def faults():
        place.until_logged('"block_start"').unlink()

    settings = (*BERT, "target=0.005", "evaluate_from=300ba")
    done = ttt(place.arguments(settings, "--runs", 2), faults)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("  aborted: ")]
    assert "was removed while it ran" in line
    assert "of 2 runs 1 converged, 1 failed; 1 missing" in done.stdout
    assert len(place.results()) == 1


def heeds(pid, number):
    """Return whether a process has a handler of a signal."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search("SigCgt:\\s*([0-9a-f]+)", text)[1], 16) >> (number - 1) & 1


def test_sigterm_before_anything_has_started_is_told_in_one_line(place):
    launcher = start(place, *place.arguments(BERT))
    until(lambda: heeds(launcher.pid, signal.SIGTERM))
    launcher.terminate()
    _, errors = launcher.communicate(timeout=END_S)
    assert (launcher.returncode, errors) == (130, "error: interrupted\n")
    assert place.results() == []


STEPPED = """
import os, sys, time
real, start = time.time, time.monotonic()
if "common.run.worker" in sys.orig_argv:
    time.time = lambda: real() + 3600 * os.path.exists(os.environ["CLOCK_STEPPED"])
"""


@pytest.mark.slow
def test_a_clock_that_is_set_under_way_stands_in_the_log_and_in_the_audit(place, ttt, monkeypatch):
    (place.folder / "sitecustomize.py").write_text(STEPPED)
    monkeypatch.setenv("PYTHONPATH", f"{place.folder}{os.pathsep}{ROOT}")
    monkeypatch.setenv("CLOCK_STEPPED", str(place.folder / "stepped"))

    def faults():
        place.until_logged('"block_start"')
        (place.folder / "stepped").touch()

    done = ttt(place.arguments((*BERT, "target=0.005", "evaluate_from=90ba")), faults)
    assert done.returncode == 0, done.stderr
    (path,) = place.results()
    last = json.loads(path.read_text().splitlines()[-1].split(" ", 1)[1])
    assert last["metadata"]["status"] == "success"
    assert last["metadata"]["clock_drift_ms"] == pytest.approx(3600_000, abs=1000)
    assert last["metadata"]["duration_ms"] < HANG_S * 1000
    assert "the clock was set by 3600 s during this run" in done.stderr
    checked = ttt(["check", str(place.results_folder)])
    assert "T208" in checked.stdout


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(place):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        launcher = start(place, *place.arguments(BERT), **started, MASTER_PORT=port)
        _, errors = launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 2
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert f"rank 0 of 2, before the first step: 127.0.0.1:{port}: the ranks cannot meet here" in line
    assert "EADDRINUSE" in line and "Traceback" not in errors and place.results() == []
    place.check_nothing_left()


@pytest.mark.slow
def test_ranks_of_one_machine_listen_on_its_loopback_only(place):
    launcher = start(place, *place.arguments(BERT, "--nproc", 2))
    place.until_logged('"block_start"')
    ranks = place.processes("common.run.worker")
    listening = [
        each.laddr
        for process in [psutil.Process(launcher.pid), *ranks]
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert len(ranks) == 2 and {address.ip for address in listening} <= {"127.0.0.1"}
    launcher.terminate()
    launcher.communicate(timeout=END_S)
    place.check_nothing_left()


@pytest.mark.slow
def test_a_gpu_that_cannot_be_used_is_missed_and_no_cpu_stands_in(place, ttt, monkeypatch):
    if hardware.gpu_names():
        pytest.skip("there is a GPU here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = ttt(place.arguments(BERT))
    assert done.returncode == 2
    assert done.stderr.startswith("error: CUDA_VISIBLE_DEVICES: is set but no GPU was found")
    monkeypatch.setattr(hardware, "gpu_names", lambda: ["A100"])  # as on a machine with the wrong PyTorch
    done = ttt(place.arguments(BERT, "--runs", 3, "--force"))
    assert done.returncode == 2 and place.results() == []
    assert "rank 0 of 1, before the first step: torch " in done.stderr
    assert "PyTorch cannot use the GPU of this machine" in done.stderr
    assert "of 3 runs 1 failed, 2 not run" in done.stdout  # the mistake would be met three times


def test_the_rank_that_the_others_wait_for_is_late():
    board = Heartbeat.create(3, {})
    for slot, phase in zip(board.slots, (COMPUTING, LOADING, COMPUTING), strict=True):
        slot.enter(7, phase)
    watchdog = Watchdog(board, range(3), limit_s=1)
    running, stopped = psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED
    assert watchdog.late({0: running, 1: running, 2: running}) == [1]
    board.slots[1].enter(7, COMPUTING)
    assert watchdog.late({0: running, 1: running, 2: stopped}) == [2]
    assert watchdog.late({0: running, 1: running, 2: running}) == [0, 1, 2]
    board.slots[0].enter(8, EVALUATING)
    assert watchdog.late({0: running, 1: running, 2: running}) == [1, 2]
    board.close()
