"""A run's process that a person or the system ends; results under odd conditions."""

import errno
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import psutil
import pytest

from common.errors import EXIT_INTERRUPTED, UserError
from common.processes import delay_signals
from common.run import launch, mllog, supervision
from tests.command import run, start
from tests.runs import until

CHILD = """
import pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path(sys.argv[1], "started").touch()
while not told: time.sleep(0.02)
time.sleep(float(sys.argv[2]))
pathlib.Path(sys.argv[1], "closed").touch()
"""
PARENT = """
import sys
from common.run import supervision
supervision.GRACE_S = 3
sys.exit(supervision.supervise(sys.argv[1:]).code)
"""


TORN = """
import os, signal
os.register_at_fork(after_in_{where}=lambda: os.kill(os.getpid(), signal.SIGINT))
"""
POLLED = """
import os, signal, subprocess, threading, types
from common.run import supervision
signals = [signal.SIGINT]
class Lock:
    def __init__(self):
        self.lock = threading.Lock()
    def acquire(self, *blocking):
        is_taken = self.lock.acquire(*blocking)
        while signals:
            os.kill(os.getpid(), signals.pop())
        return is_taken
    def release(self):
        self.lock.release()
subprocess.threading = types.SimpleNamespace(Lock=Lock)
"""


def supervised(folder, *signals, closes_in_s):
    """Supervise a child that closes its log late; send the parent's group signals, return its exit code."""
    arguments = [sys.executable, "-c", PARENT, "-c", CHILD, str(folder), str(closes_in_s)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = start(*arguments, start_new_session=True, **quiet)
    try:
        until((folder / "started").exists)
        for number in signals:
            if number == signal.SIGTERM:
                process.terminate()
            else:
                os.killpg(process.pid, number)
            time.sleep(0.5)
        return process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    ("signals", "closes_in_s", "is_closed"),
    [
        *(([number], 1, True) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
        ([signal.SIGINT], 60, False),  # then it is killed
        ([signal.SIGINT, signal.SIGINT], 2, True),  # a person is impatient
    ],
)
def test_an_ended_run_gets_time_to_close_its_log(signals, closes_in_s, is_closed, tmp_path):
    assert supervised(tmp_path, *signals, closes_in_s=closes_in_s) == EXIT_INTERRUPTED
    assert (tmp_path / "closed").exists() == is_closed


def test_what_gloo_and_nccl_open_is_on_the_loopback_interface_unless_a_person_says_otherwise(monkeypatch):
    names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert supervision.rank_environments(1, Path("here")) == [{}]  # which opens none
    first, second = supervision.rank_environments(2, Path("here"))
    lo = supervision.LOOPBACK
    assert lo in psutil.net_if_addrs() and [first[name] for name in names] == [lo, f"={lo}"]
    assert second == first | {"RANK": "1", "LOCAL_RANK": "1"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert supervision.rank_environments(2, Path("here"))[0]["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(("where", "code"), [("parent", EXIT_INTERRUPTED), ("child", 0)])
def test_ctrl_c_while_a_run_is_being_started_tears_nothing(where, code):
    script = TORN.format(where=where) + PARENT
    command = [sys.executable, "-c", script, "-c", "import time; time.sleep(2)"]
    done = run(*command, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")


def test_ctrl_c_while_a_process_is_polled_leaves_it_to_be_waited_for():
    command = [sys.executable, "-c", POLLED + PARENT, "-c", "import time; time.sleep(60)"]
    done = run(*command, timeout=25)  # of KILLED_S, which waiting in vain takes
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "")


def test_a_result_is_reserved_once_with_the_number_asked_for_and_gaps_are_filled(tmp_path):
    folder = tmp_path / "bert"
    assert launch.reserve(folder, 2).name == "result_2.txt"
    names = [launch.reserve(folder, None).name for _ in range(3)]
    assert names == ["result_0.txt", "result_1.txt", "result_3.txt"]
    with pytest.raises(UserError, match="never overwritten"):
        launch.reserve(folder, 1)
    for path in (folder / "result_0.txt", folder / "result_0.txt" / "system" / "bert"):
        with pytest.raises(UserError, match="result_0.txt"):
            launch.reserve(path, None)


def test_the_length_of_a_run_is_that_of_the_clock_which_nobody_sets(tmp_path, monkeypatch, capsys):
    now = iter([1.7e9, *[1.7e9 + 10] * 5, *[1.7e9 - 3590] * 20])
    monkeypatch.setattr(time, "time", lambda: next(now))
    path = launch.reserve(tmp_path, None)
    log = mllog.RunLog(path)
    log.event("cache_clear", True)
    log.start("init_start")
    log.event("quality_target", 0.5)
    log.event("benchmark_size", "mini")
    log.stop("init_stop")
    log.start("run_start")
    log.start("eval_start")
    log.stop("eval_stop")
    log.event("eval_accuracy", 0.6, samples=10)
    log.stop("run_stop", status="success", duration_ms=20_000, clock_drift_ms=-3_600_000)
    log.close()
    ended = launch.close_log(path, 0, "", path.name)
    out, err = capsys.readouterr()
    assert ended.outcome == "converged" and "success: 20.0 s to the target" in out
    assert "the clock was set by -3600 s" in err
    assert launch.expected_seconds(tmp_path) == 20
    launch.close_log(path, 1, "interrupted", "")  # of a replay, whose folder is removed
    assert "result_0.txt" not in "".join(capsys.readouterr())


def test_the_reserve_of_a_log_is_on_the_disk_and_cannot_be_compressed(tmp_path, monkeypatch):
    path = launch.reserve(tmp_path, None)
    with launch.reserve_disk_space(path) as ballast:
        content = os.pread(ballast.fileno(), 2 * launch.BALLAST_BYTES, 0)
    assert len(zlib.compress(content)) >= launch.BALLAST_BYTES

    def fail(_):  # as over NFS, which reports a full disk late
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="cannot write results here"):
        launch.reserve_disk_space(path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def timed_log(tmp_path):
    """A result whose clock runs."""
    path = launch.reserve(tmp_path, None)
    log = mllog.RunLog(path)
    log.event("cache_clear", True)
    log.start("init_start")
    log.stop("init_stop")
    log.start("run_start")
    log.close()
    return path


@pytest.mark.parametrize("damage", [b"\0\n", b"\xff\n", b"x" * 2**24 + b"\n", b"\n" * 100_001])
def test_the_log_of_a_timed_run_is_kept_where_it_cannot_be_read(damage, timed_log, capsys):
    with timed_log.open("ab") as file:
        file.write(damage)
    ended = launch.close_log(timed_log, 1, "", timed_log.name)
    assert (ended.code, ended.outcome) == (1, "failed") and timed_log.read_bytes().count(b'"run_stop"') == 1
    assert "the log is kept: result_0.txt" in capsys.readouterr().err
    ended = launch.close_log(timed_log, 0, "", timed_log.name)  # its end stands in it
    assert (ended.code, ended.outcome, ended.reason) == (1, "failed", "its log cannot be read")


def test_a_log_that_the_disk_does_not_give_is_kept(timed_log, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        ended = launch.close_log(timed_log, 1, "", timed_log.name)
    assert (ended.code, ended.outcome) == (1, "failed") and timed_log.exists()
    assert "could not be closed and has no run_stop" in capsys.readouterr().err


def test_a_log_whose_clock_was_not_started_whole_is_removed(timed_log, capsys):
    os.truncate(timed_log, timed_log.stat().st_size - 20)  # by a disk that filled up
    assert launch.close_log(timed_log, 2, "no room", timed_log.name) == (2, "refused", "no room")
    assert not timed_log.exists() and "nothing was timed" in capsys.readouterr().err


def test_a_signal_that_was_held_back_counts_also_where_the_block_fails():
    with pytest.raises(KeyboardInterrupt), delay_signals():
        signal.raise_signal(signal.SIGINT)
        raise OSError
