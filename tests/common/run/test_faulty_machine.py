"""A machine whose console, clock, port or GPU fails under a run, and a training that diverges."""

import os
import re
import socket

import psutil
import pytest

from common.machine import hardware
from common.repository import ROOT
from tests.runs import BERT, END_S, HANG_S, RESNET, failure_in, records

pytestmark = pytest.mark.usefixtures("prepared_data")
QUICK = (*BERT, "target=0.005", "evaluate_from=30ba")  # its first evaluation is its last


@pytest.mark.slow
def test_a_console_that_goes_away_ends_no_run(place):
    launcher = place.start(*place.arguments(QUICK, "--runs", 2))
    launcher.stdout.readline()
    launcher.stdout.close()  # as head does
    assert launcher.wait(HANG_S) == 141
    assert "Traceback" not in launcher.stderr.read()
    launcher.stderr.close()
    assert [path.read_text().count('"success"') for path in place.results()] == [1, 1]
    place.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "code"),
    [
        (">/dev/full", 141),
        *(pytest.param(closed, 0, marks=pytest.mark.on_demand) for closed in (">&-", "2>&-")),
    ],
)
def test_a_console_that_is_full_or_closed_ends_no_run(place, redirection, code):
    launcher = place.start(*place.arguments(QUICK), shell=f'exec "$@" {redirection}')
    _, errors = launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == code and "Traceback" not in errors
    assert ("cannot be written (No space left on device)" in errors) == (code == 141)
    assert [path.read_text().count('"success"') for path in place.results()] == [1]
    place.check_nothing_left()


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
    end = records(path)[-1]["metadata"]
    assert end["status"] == "success" and end["duration_ms"] < HANG_S * 1000
    assert end["clock_drift_ms"] == pytest.approx(3600_000, abs=1000)
    assert "the clock was set by 3600 s" in done.stderr
    assert "T208" in ttt(["check", str(place.results_folder)]).stdout


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(place):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        launcher = place.start(*place.arguments(BERT), **started, MASTER_PORT=port)
        _, errors = launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 2
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert f"rank 0 of 2, before the first step: 127.0.0.1:{port}: the ranks cannot meet here" in line
    assert "EADDRINUSE" in line and "Traceback" not in errors and place.results() == []
    place.check_nothing_left()


@pytest.mark.slow
def test_ranks_of_one_machine_listen_on_its_loopback_only_wherever_their_files_are(place):
    """A # or ? in the name of a folder would end a URL."""
    odd = place.temporary / "a#b?c d"
    odd.mkdir()
    place.results_folder = place.folder / "r#e?s [1]"
    launcher = place.start(*place.arguments(BERT, "--nproc", 2), TMPDIR=str(odd))
    place.until_logged('"block_start"')
    assert list(odd.glob("ttt-*/store")) and [path.name for path in place.temporary.iterdir()] == [odd.name]
    ranks = place.processes("common.run.worker")
    sockets = [
        connection
        for process in [psutil.Process(launcher.pid), *ranks]
        for connection in process.net_connections("inet")
    ]
    addresses = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert len(ranks) == 2 and addresses == {"127.0.0.1"}
    launcher.terminate()
    launcher.communicate(timeout=END_S)
    odd.rmdir()
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


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_and_with_fail_fast_the_set(place, ttt):
    settings = (*RESNET, "optimizer.learning_rate=1.0e+30")  # with workers, whose folders are temporary files
    done = ttt(place.arguments(settings, "--nproc", 2, "--runs", 3, "--fail-fast"))
    (path,) = place.results()
    why = failure_in(done, path, 2)
    assert re.match("rank [01] of 2, after step 30: training: the loss is nan", why)
    assert "of 3 runs 1 failed, 2 not run; 3 missing" in done.stdout
