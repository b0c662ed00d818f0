"""The process that has records stamped, against authorities that answer, refuse, lie, hang or are absent."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import psutil
import pytest

from common.errors import UserError
from common.evidence.sealed.anchors import ANCHORS
from common.evidence.sealed.replies import load_roots
from common.run.sealing import anchor
from common.run.sealing.anchor import MAX_WAITING, Request, Stamper
from common.run.sealing.anchoring import anchoring
from common.run.sealing.anchoring import authority as authority_of
from tests.authority import serve
from tests.common.evidence.anchored import audit_anchors
from tests.runs import END_S, until

RECORD = '{"time_ms": %d, "event_type": "POINT_IN_TIME", "key": "%s", "value": 0.5, "metadata": {}}'
BEHAVIOURS = {  # of an authority -> what is said of it
    "refuse": "HTTP status 403",
    "reject": "refused",
    "garbage": "ASN.1",
    "flood": "larger than",
    "redirect": "HTTP status 302",
    "other": "another request",
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("authority")) as served:
        yield served


def make_set(root):
    folder = root / "8xA100-optimized" / "bert"
    folder.mkdir(parents=True)
    (folder / "runset.json").write_text("{}\n")
    (folder / "result_0.txt").touch()  # as the launcher does before a log is watched
    return folder


def append_record(path, key, time_ms=None):
    with path.open("a") as file:
        file.write(f":::MLLOG {RECORD % (time_ms or time.time() * 1000, key)}\n")


def wait_for_imports(asking):
    """Wait until the process that asks the authority has made itself nicer, and half a second more."""
    until(lambda: asking.nice() > min(psutil.Process().nice(), 18))  # 19 is the most
    time.sleep(0.5)


def anchors_of(folder):
    return [json.loads(line) for line in (folder / ANCHORS).read_text().splitlines()]


def write_run(folder, pause_s=0.0):
    for key in ("init_start", "run_start", "train_loss", "eval_accuracy", "eval_accuracy", "run_stop"):
        append_record(folder / "result_0.txt", key)
        time.sleep(pause_s)


def test_records_are_stamped_while_they_are_written(authority, tmp_path, capfd):
    served, url = authority
    folder = make_set(tmp_path)
    log = folder / "result_0.txt"
    log.write_text("# a head\n")
    with anchoring(url) as anchors:
        anchors.stamp(folder / "runset.json")
        anchors.watch(log)
        until(lambda: (folder / ANCHORS).exists())
        append_record(log, "init_start")
        append_record(log, "run_start")
        until(lambda: len(anchors_of(folder)) == 2)
        size = log.stat().st_size
        with log.open("a") as file:  # a record that is half written when its process is killed
            file.write(':::MLLOG {"key": "eval_accuracy"')
        time.sleep(0.5)
        os.truncate(log, size)
        append_record(log, "eval_accuracy")
        append_record(log, "run_stop")
    anchored, findings = audit_anchors(folder, load_roots(served.root))
    assert findings == [] and anchored.summary() == "4 of 4 places stamped by CN=Test Authority"
    assert sorted((one["of"], one["line"]) for one in anchors_of(folder)) == [
        *(("result_0.txt", line) for line in (3, 4, 5)),
        ("runset.json", 0),
    ]
    assert all("url" not in one and one.get("delay_ms", 0) < 2000 for one in anchors_of(folder))
    said = capfd.readouterr()
    assert said.out == "time-stamps: 4 of 4 were granted\n" and said.err == ""


def test_a_failing_authority_gets_one_warning_and_delays_nothing(authority, tmp_path, capfd):
    _, url = authority
    with ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))  # nobody else takes the port
        urls = {"closed": f"http://127.0.0.1:{deaf.getsockname()[1]}"}
        urls |= {name: f"{url}/{name}" for name in BEHAVIOURS}
        folders = {name: make_set(tmp_path / name) for name in urls}
        opened = {name: stack.enter_context(anchoring(urls[name])) for name in urls}
        for name, anchors in opened.items():
            anchors.stamp(folders[name] / "runset.json")
            anchors.watch(folders[name] / "result_0.txt")
            write_run(folders[name])
    for name, folder in folders.items():
        failures = [one["failure"] for one in anchors_of(folder)]
        assert len(failures) == 5 and not any("reply" in one for one in anchors_of(folder))
        expected = BEHAVIOURS.get(name, "refused")
        assert [failure for failure in failures if expected not in failure] == []
        assert "127.0.0.1" not in (folder / ANCHORS).read_text()
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == len(urls) and all("the run goes on" in warning for warning in warnings)


def test_an_authority_that_hangs_delays_the_end_by_its_limit_alone(authority, tmp_path):
    folder = make_set(tmp_path)
    with anchoring(f"{authority[1]}/hang", limit_s=2) as anchors:
        started = time.monotonic()
        anchors.stamp(folder / "runset.json")
        anchors.watch(folder / "result_0.txt")
        write_run(folder)
        assert time.monotonic() - started < 1
        wait_for_imports(psutil.Process(anchors.processes.processes[0].pid))
        ended = time.monotonic()
    assert time.monotonic() - ended < 2.3
    failures = {one["failure"] for one in anchors_of(folder)}
    assert len(anchors_of(folder)) == 5
    assert failures <= {"no reply within 2 s", "no reply before the command ended"}


def test_whatever_ends_a_request_stands_beside_the_results(authority, tmp_path, monkeypatch):
    def panic(*_):
        raise BaseException("a panic of the library")

    monkeypatch.setattr(anchor, "request_stamp", panic)
    folder, now_s = make_set(tmp_path), time.monotonic()
    stamper = Stamper(authority[1], limit_s=10)
    stamper.ask(Request(folder / "runset.json", 0, b"{}\n", now_s, now_s))
    stamper.finish()
    assert [one["failure"] for one in anchors_of(folder)] == ["a panic of the library"]


def test_a_request_that_waits_behind_others_is_not_said_to_have_been_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(anchor, "request_stamp", lambda *_: time.sleep(2))
    folder, now_s = make_set(tmp_path), time.monotonic()
    stamper = Stamper("http://127.0.0.1:1", limit_s=1)
    for _ in range(MAX_WAITING + 1):
        stamper.ask(Request(folder / "runset.json", 0, b"{}\n", now_s, now_s))
    stamper.finish()
    *sent, waiting = [one["failure"] for one in anchors_of(folder)]
    assert set(sent) == {"no reply within 1 s"}
    assert waiting == f"{MAX_WAITING} requests before it have no reply"


def test_a_late_reply_says_so_and_bounds_no_interval(authority, tmp_path):
    folder = make_set(tmp_path)
    with anchoring(f"{authority[1]}/slow") as anchors:
        anchors.watch(folder / "result_0.txt")
        write_run(folder)
    assert all(one["delay_ms"] >= 3000 for one in anchors_of(folder))
    _, findings = audit_anchors(folder)
    assert [finding.rule for finding in findings] == ["N905", "N905"]  # the seal has none


def test_the_process_ends_with_its_launcher_and_not_by_ctrl_c(authority):
    code = "import sys, time; from common.run.sealing.anchoring import anchoring\n"
    code += "with anchoring(sys.argv[1]): print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, authority[1]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        assert launcher.stdout.readline() == b"ready\n"
        (child,) = until(lambda: psutil.Process(launcher.pid).children())
        assert os.getsid(child.pid) == child.pid != os.getpgid(launcher.pid)  # no key of its terminal
        launcher.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, END_S)


def test_a_folder_that_cannot_be_written_ends_nothing(authority, tmp_path, capfd):
    folder = make_set(tmp_path)
    (folder / ANCHORS).mkdir()
    with anchoring(authority[1]) as anchors:
        anchors.stamp(folder / "runset.json")
    said = capfd.readouterr()
    assert said.out == "time-stamps: 0 of 1 were granted\n" and "cannot write anchors.jsonl" in said.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_keeps_nobody_waiting(authority, tmp_path, number, capfd):
    folder = make_set(tmp_path)
    with anchoring(authority[1], limit_s=2) as anchors:
        process = anchors.processes.processes[0]
        anchors.stamp(folder / "runset.json")
        until(lambda: (folder / ANCHORS).exists())
        process.send_signal(number)
        started = time.monotonic()
        for _ in range(2000):
            anchors.watch(folder / "result_0.txt")
        write_run(folder)
        assert time.monotonic() - started < 2
        ended = time.monotonic()
    assert time.monotonic() - ended < 2.3
    lines = [(one["line"], one.get("failure")) for one in anchors_of(folder)]
    assert lines == [
        (0, None),
        *((line, "the process that asks the authority ended") for line in (2, 4, 5, 6)),
    ]
    assert capfd.readouterr().err.count("warning") == 1


def test_ctrl_c_while_the_last_replies_are_missing_ends_at_once_and_writes_that_down(authority, tmp_path):
    folder = make_set(tmp_path)
    code = "import sys, pathlib; from common.run.sealing.anchoring import anchoring\n"
    code += "with anchoring(sys.argv[1]) as anchors: anchors.stamp(pathlib.Path(sys.argv[2]))\n"
    command = [sys.executable, "-c", code, f"{authority[1]}/hang", folder / "runset.json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as launcher:
        (asking,) = until(lambda: psutil.Process(launcher.pid).children())
        wait_for_imports(asking)
        started = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate()
    assert time.monotonic() - started < 2
    assert [one["failure"] for one in anchors_of(folder)] == ["no reply before the command ended"]


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://a.example.com", "file:///etc/passwd", "http://", "a.example.com", "http://a b.example.com"),
        *("http://me:secret@a.example.com", "https://token@a.example.com/tsa"),
    ],
)
def test_only_addresses_without_a_login_are_taken(url):
    with pytest.raises(UserError, match="--anchor: ") as refusal:
        authority_of(url)
    assert "secret" not in str(refusal.value) and "token" not in str(refusal.value)
