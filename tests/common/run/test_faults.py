"""Processes that hang, die or get a signal: the run ends, one line says why, and nothing else is left.

The table of common/run/README.md states the results of these tests and those of faulty disks and machines.
"""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from common import processes
from common.errors import UserError
from common.run import launch, supervision, worker
from common.run.heartbeat import COMPUTING, EVALUATING, LOADING, Heartbeat
from common.run.supervision import TEMPORARY, Watchdog
from common.training.ranks import SINGLE_RANK
from tests.command import run
from tests.runs import BERT, END_S, HANG_S, RESNET, WHEN, failure_in, reason_of_abort, records, until

pytestmark = pytest.mark.usefixtures("prepared_data")
KILLED = r"ended by SIGKILL \(kill -9, or out of memory\)"
HUNG = r"no progress for 3 s \(--hung-after\), stopped, (computing a step|waiting for a batch)"
SETTLES_S = 0.1  # a rank may end its evaluation later than rank 0, which logs the next block


@pytest.mark.slow
def test_a_hung_rank_and_a_killed_one_end_their_runs_and_not_the_set(place, ttt):
    def faults():
        place.until_logged('"block_start"', times=2)
        time.sleep(SETTLES_S)
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
    hung, killed = map(reason_of_abort, place.results())
    who = "rank 1 of 2, after step [0-9]+: "
    assert re.fullmatch(who + HUNG, hung) and re.fullmatch(who + KILLED, killed)
    assert all(f"aborted: {why}; the log is kept" in done.stderr for why in (hung, killed))
    stacks = done.stderr.split("--- stack of ")[1:]
    assert [stack[:6] for stack in stacks] == ["rank 0", "rank 1"]
    assert all("run/loop.py" in stack for stack in stacks)  # a rank may have been stopped between two steps
    assert "of 2 runs 2 failed; 2 missing" in done.stdout


@pytest.mark.slow
def test_a_set_goes_on_after_a_fault_and_continues_after_ctrl_c(place, ttt):
    def faults():
        place.until_logged('"block_start"')
        place.rank().kill()
        place.until_logged('"block_start"', index=2)
        os.kill(os.getpid(), signal.SIGINT)
        return time.monotonic()

    settings = (*BERT, "target=0.005", "evaluate_from=90ba")  # long enough to be interrupted
    command = place.arguments(settings, "--runs", 3, "--seed", 5)
    done = ttt(command, faults)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    first, _, third = before = place.results()
    assert re.fullmatch(f"rank 0 of 1, {WHEN}: {KILLED}", reason_of_abort(first))
    assert re.fullmatch(f"{WHEN}: interrupted", reason_of_abort(third))
    assert "of 3 runs 1 converged, 2 failed; 2 missing" in done.stdout
    kept = [path.read_bytes() for path in before]

    other = place.start(*command, "--continue")  # one of the two makes the runs, the other waits for it
    done = ttt([*command, "--continue"])
    out, errors = other.communicate(timeout=HANG_S)
    assert (done.returncode, other.returncode) == (0, 0), errors
    assert (out + done.stdout).count("1 of 3 runs are there, 2 more did not") == 1
    assert "of 3 runs 1 already there, 2 converged\n" in out + done.stdout
    assert "which makes the runs of this folder" in out + done.stdout
    assert [path.name for path in place.results()] == [f"result_{index}.txt" for index in range(5)]
    assert [path.read_bytes() for path in before] == kept
    values = [record for path in place.results() for record in records(path) if record["key"] == "seed"]
    assert [record["value"] for record in values] == [5, 6, 7, 8, 9]

    done = ttt([*command, "--continue"])
    assert done.returncode == 0 and "3 of 3 runs are there" in done.stdout
    assert len(place.results()) == 5


@pytest.mark.slow
def test_the_death_of_the_launcher_ends_its_ranks_which_close_the_log(place):
    runs = {1: 1, 2: 2, 3: 2}  # index -> ranks
    launchers = [place.start(*place.arguments(BERT, "--nproc", n, "--index", i)) for i, n in runs.items()]
    paths = [place.until_logged('"block_start"', index=index) for index in runs]
    stopped = place.rank(1)  # of one of the last two
    stopped.suspend()
    time.sleep(1)  # rank 0 waits for it by now, outside of Python
    for launcher in launchers:
        launcher.kill()
    until(lambda: [rank.pid for rank in place.processes("common.run.worker")] == [stopped.pid], END_S)
    assert all(re.fullmatch(f"{WHEN}: interrupted", reason_of_abort(path)) for path in paths)
    stopped.resume()
    place.check_nothing_left()
    for launcher in launchers:
        launcher.communicate(timeout=END_S)


@pytest.mark.slow
def test_an_allocation_that_is_taken_away_ends_every_process_and_closes_the_log(place):
    launcher = place.start(*place.arguments(BERT, "--nproc", 2))
    path = place.until_logged('"block_start"')

    def is_over():  # told again and again, as by Slurm and by the launcher
        for process in place.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        return not place.processes("common.run.worker")

    until(is_over, END_S)
    _, errors = launcher.communicate(timeout=END_S)
    assert launcher.returncode == 130 and "Traceback" not in errors
    assert reason_of_abort(path).endswith("interrupted") and f"aborted: {reason_of_abort(path)}" in errors
    place.check_nothing_left()


@pytest.mark.slow
def test_two_launches_on_one_result_leave_one_run(place, ttt):
    command = place.arguments((*BERT, "target=0.005"), "--index", 3)
    other = place.start(*command)
    done = ttt(command)
    out, errors = other.communicate(timeout=HANG_S)
    codes = {done.returncode: done.stderr, other.returncode: errors}
    assert set(codes) == {0, 2} and "never overwritten" in codes[2]
    (path,) = place.results()
    assert path.read_text().count('"run_stop"') == 1 and (done.stdout + out).count("success") == 1


@pytest.mark.slow
def test_a_loaders_worker_that_is_killed_ends_the_run_and_a_stopped_one_does_not_outlive_it(place, ttt):
    def fault_of_worker(index, fault):
        place.until_logged('"block_start"', index=index)
        rank = place.rank()
        (worker,) = until(rank.children)
        fault(rank, worker)

    def stop(rank, worker):
        worker.suspend()  # and would stay for ever
        rank.kill()

    done = ttt(place.arguments(RESNET), lambda: fault_of_worker(0, stop))
    assert done.returncode == 1
    done = ttt(place.arguments(RESNET), lambda: fault_of_worker(1, lambda rank, worker: worker.kill()))
    why = failure_in(done, place.results()[1])
    assert "Traceback" not in done.stderr
    expected = "rank 0 of 1, .*RuntimeError: DataLoader worker .*(Killed|exited unexpectedly)"
    assert re.match(expected, why)


def test_sigterm_before_anything_has_started_is_told_in_one_line(place):
    launcher = place.start(*place.arguments(BERT))
    status, mask = Path(f"/proc/{launcher.pid}/status"), 1 << signal.SIGTERM - 1
    handled = re.compile("SigCgt:\\s*([0-9a-f]+)")
    until(lambda: int(handled.search(status.read_text())[1], 16) & mask)
    launcher.terminate()
    _, errors = launcher.communicate(timeout=END_S)
    assert (launcher.returncode, errors) == (130, "error: interrupted\n")
    assert place.results() == []


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_interrupted_rank_removes_its_files_where_its_log_cannot_be_closed(is_gone, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise UserError("cannot write the log", where="result_0.txt")

    folder = tmp_path / "ttt-x"
    folder.mkdir()
    monkeypatch.setenv(TEMPORARY, str(folder))
    if not is_gone:
        monkeypatch.setattr(worker.mllog, "abort", fail)
    with contextlib.closing(Heartbeat.create(1, {"result": str(tmp_path / "result_0.txt")})) as heartbeat:
        worker.tidy_up(SINGLE_RANK, heartbeat)
    assert list(tmp_path.iterdir()) == []


HANGING = """
import os, signal, time
from common.run import worker
from common.training.ranks import SINGLE_RANK
worker.INTERRUPTED_S = 0.1
worker.end_in_time(SINGLE_RANK, None)  # no heartbeat: an error of tidying up
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
except KeyboardInterrupt:
    time.sleep(30)  # as in a device
"""


def test_a_rank_that_hangs_ends_also_where_tidying_up_fails():
    started = time.monotonic()
    done = run(sys.executable, "-c", HANGING)
    assert (done.returncode, done.stderr) == (130, "") and time.monotonic() - started < 30


def test_a_process_that_no_signal_ends_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(processes, "KILLED_S", 0.1)
    started = time.monotonic()
    ranks = processes.Processes(["-c", "import time; time.sleep(20)"], [{}])
    ranks.signal = lambda number: None  # as in uninterruptible sleep
    ranks.end(grace_s=0.1)
    assert time.monotonic() - started < 15
    ranks.processes[0].wait()  # it was killed at last, as a descendant


def test_a_hung_rank_that_no_signal_ends_does_not_keep_its_launcher(monkeypatch, capsys):
    class Sleeping:
        """A rank that is never seen to end."""

        pid, num_waits = os.getpid(), 0

        def __init__(self, *_, **__):
            self.processes = [self]

        def wait(self, timeout_s):
            self.num_waits += 1
            assert self.num_waits < 10

        def signal(self, number):
            pass

        send_signal = end = signal

    monkeypatch.setattr(supervision, "Processes", Sleeping)
    monkeypatch.setattr(supervision, "START_S", 3)
    monkeypatch.setattr(supervision, "DUMP_S", 0)
    for name in ("ignore_ending_signals", "handle_ending_signals"):
        monkeypatch.setattr(supervision, name, lambda *_: contextlib.nullcontext())
    with contextlib.closing(Heartbeat.create(1, {})) as heartbeat:
        ended = supervision.supervise([], [{}], Watchdog(heartbeat, [0], limit_s=1))
        assert ended == (0, -signal.SIGKILL)
        assert heartbeat.failure().startswith("rank 0 of 1, before the first step: no progress for 3 s")
    assert capsys.readouterr().err.count("--- stack of rank 0") == 1


def test_signals_have_a_name_or_a_number():
    assert launch.describe_signal(signal.SIGBUS).startswith("ended by SIGBUS (a file was cut short")
    assert launch.describe_signal(signal.SIGRTMIN + 1) == f"ended by signal {signal.SIGRTMIN + 1}"


def test_the_memory_of_a_system_without_memfd_is_a_file_until_it_is_closed(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    heartbeat = Heartbeat.create(1, {"result": "here"})
    heartbeat.slots[0].enter(7, COMPUTING)
    with contextlib.closing(Heartbeat.open(heartbeat.path, 1)) as other:
        assert other.spec == {"result": "here"}
    heartbeat.close()
    assert not os.path.exists(heartbeat.path)


def test_the_rank_that_the_others_wait_for_is_late():
    heartbeat = Heartbeat.create(3, {})
    for slot, phase in zip(heartbeat.slots, (COMPUTING, LOADING, COMPUTING), strict=True):
        slot.enter(7, phase)
    watchdog = Watchdog(heartbeat, range(3), limit_s=1)
    waiting = dict.fromkeys(range(3), psutil.STATUS_SLEEPING)
    assert watchdog.late(waiting) == [1]
    heartbeat.slots[1].enter(7, COMPUTING)
    assert watchdog.late(waiting | {2: psutil.STATUS_STOPPED}) == [2]
    assert watchdog.late(waiting) == [0, 1, 2]
    heartbeat.slots[0].enter(8, EVALUATING)
    assert watchdog.late(waiting) == [1, 2]
    heartbeat.record_death(1, "no progress")
    heartbeat.slots[1].enter(9, LOADING)  # it woke up
    assert heartbeat.failure() == "rank 1 of 3, after step 7: no progress"
    heartbeat.close()
