"""Exports to every tracker: copies, growing logs, interruptions, missing libraries, names in logs."""

import os
import signal
import sys
import threading
import time

import pytest

from common.evidence.log import load, parse_log
from common.evidence.rules.rule import edit
from common.evidence.trackers import export
from common.evidence.trackers.csv_files import CsvFiles
from common.evidence.trackers.export import export_runs
from common.evidence.trackers.mlflow import MlflowStore
from common.evidence.trackers.tensorboard import TensorBoardFiles
from common.evidence.trackers.tracked_run import read_run
from common.evidence.trackers.wandb import WandbRuns
from common.repository import ROOT, install_hint
from tests.command import one_line, start, ttt_here
from tests.common.evidence.trackers.conftest import LIBRARIES
from tests.common.evidence.trackers.readers import READERS, expected, open_board, rows_of
from tests.runs import until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the trackers' libraries


def test_a_copy_of_a_log_is_named_and_not_a_second_run(results, tmp_path):
    folder, _, _ = results
    copy = tmp_path / "copy" / folder.parent.name / folder.name
    copy.mkdir(parents=True)
    (copy / "result_0.txt").write_bytes((folder / "result_0.txt").read_bytes())
    done = ttt_here("export", folder, copy, "--to", "csv", "--out", tmp_path / "out")
    assert "left out: the same run as" in done.stdout and "2 runs of 1 set" in done.stdout
    assert len(rows_of(tmp_path / "out/runs.csv")) == 2


@pytest.mark.parametrize("tracker", READERS)
def test_follow_picks_up_new_lines_and_runs_and_ends_with_the_last(
    tracker, results, tmp_path, monkeypatch, to_export, prepare_store
):
    folder, path, whole = results
    monkeypatch.setattr(export, "POLL_S", 0.01)
    monkeypatch.setattr(export, "QUIET_S", 1.0)
    next_log = (folder / "result_0.txt").read_text().replace('"time_ms": 17000', '"time_ms": 18000')
    rest = whole[len(path.read_text()) :]
    follow, follows = export.Exporter.follow, threading.Event()
    monkeypatch.setattr(export.Exporter, "follow", lambda self: follows.set() or follow(self))

    def write():
        follows.wait(100)  # the import of a library takes seconds
        for first in range(0, len(rest), 1500):  # lines are cut anywhere
            with path.open("a") as file:
                file.write(rest[first : first + 1500])
            time.sleep(0.03)
        time.sleep(0.3)
        (folder / "result_2.txt").write_text(next_log)

    prepare_store(tracker, tmp_path / "followed")
    writer = threading.Thread(target=write)
    writer.start()
    done = to_export(folder, tmp_path / "followed", tracker, "--follow")
    writer.join()
    lines = done.stdout.splitlines()
    name = f"{folder.parent.name}/bert"
    assert [line.partition(",")[0] for line in lines[:3]] == [
        f"{name}/1: running",
        f"{name}/1: success",
        f"{name}/2: success",
    ]
    assert lines[3].startswith("3 runs of 1 set -> ")
    to_export(folder, tmp_path / "followed", tracker)  # once more: nothing is missing, nothing doubles
    values = READERS[tracker](tmp_path / "followed")
    for place, wanted in expected(folder).items():
        assert values[place] == [pytest.approx(one, rel=1e-6) for one in wanted], place


def test_ctrl_c_ends_following_with_130_and_what_was_written_is_whole(results, tmp_path):
    folder, _, _ = results
    command = [sys.executable, "-m", "common.cli", "export", folder, "--to", "csv"]
    process = start(*command, "--out", tmp_path / "out", "--follow")
    until(lambda: process.poll() is not None or (tmp_path / "out/measurements.csv").exists())
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "error: interrupted\n"
    assert len(rows_of(tmp_path / "out/runs.csv")) == 2
    assert sorted(os.listdir(tmp_path / "out")) == ["measurements.csv", "runs.csv"]  # no lock, no draft


FOREIGN = {"not UTF-8": b"\xff", "a huge cell": b"run,start\n" + b"a" * 200_000, "no run": b"run,start\n,1\n"}
FOREIGN |= {"other columns": b"name,score\n"}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_files_of_others_are_refused_and_both_stay_as_they_are(results, tmp_path, content):
    for name, other in (("runs.csv", "measurements.csv"), ("measurements.csv", "runs.csv")):
        (tmp_path / name).write_bytes(content)
        (tmp_path / other).write_text("run,start\n")
        line = one_line(ttt_here("export", results[0], "--to", "csv", "--out", tmp_path))
        assert f"{name}: was not written by `ttt export`" in line
        assert (tmp_path / name).read_bytes() == content and (tmp_path / other).read_text() == "run,start\n"


@pytest.mark.parametrize("content", [b'{"a": ', b'["a"]', b"text"])
@pytest.mark.parametrize(("tracker", "name"), [("wandb", "exported.json"), ("mlflow", "mlflow.db")])
def test_a_damaged_store_is_refused_in_one_line(tracker, name, content, results, tmp_path):
    pytest.importorskip(tracker, reason="the extra `track` is not installed")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(content)
    line = one_line(ttt_here("export", results[0], "--to", tracker, "--out", tmp_path / "out"))
    assert name in line and (tmp_path / "out" / name).read_bytes() == content


def test_a_log_that_has_not_grown_for_a_day_ends_following(results, tmp_path, monkeypatch, to_export):
    folder, path, _ = results
    monkeypatch.setattr(export, "POLL_S", 0.01)
    monkeypatch.setattr(export, "QUIET_S", 0.05)
    yesterday = time.time() - export.BROKEN_OFF_S - 60
    os.utime(path, (yesterday, yesterday))
    done = to_export(folder, tmp_path / "out", "csv", "--follow")
    assert "/1: running" in done.stdout


@pytest.mark.parametrize("tracker", LIBRARIES)
def test_a_missing_library_is_one_line_that_says_what_to_install(tracker, results, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == tracker]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, tracker, None)
    line = one_line(ttt_here("export", results[0], "--to", tracker, "--out", tmp_path / "out"))
    assert "is not installed" in line and install_hint("track") in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "tensorbord"], "tensorboard"),
        ([], "--to"),
        (["--to", "csv", "--out", "http://127.0.0.1:5000"], "csv is exported into a folder"),
        (["--to", "csv", "--out", "README.md"], "README.md: cannot export into this folder"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words, both, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert words in one_line(ttt_here("export", both / "results", *arguments))


def hostile(golden):
    """Return a log whose names would leave their folder, or be formulas or markup."""
    lines = "\n".join(golden.log("bert", size="mini"))
    for old, new in {
        "8xA100-mini-optimized": "../../../escaped",
        "# command: ttt run": "# command: =HYPERLINK(1) | <b>`x`",
        '"opt_name", "value": "sgd"': '"opt/../\\u0000name", "value": "@sum"',
        '"mini"': '"../mini"',
        "170000": "99999999",
    }.items():
        assert old in lines
        lines = lines.replace(old, new)
    return lines + "\n"


@pytest.mark.parametrize("store", [CsvFiles, TensorBoardFiles, MlflowStore, WandbRuns])
def test_names_in_a_log_stay_names(store, golden, prepare_store, tmp_path):
    path = tmp_path / "logs" / "mine.log"
    path.parent.mkdir()
    path.write_text(hostile(golden))
    lines = []
    out = tmp_path / "a" / "b" / "c" / "out"
    prepare_store(store.__module__.rpartition(".")[2], out)
    assert export_runs([path], store(out), follows=False, report=lines.append) == 1, lines
    assert sorted(os.listdir(tmp_path)) == ["a", "logs"] and os.listdir(out.parent) == ["out"]
    if store is CsvFiles:
        (row,) = rows_of(out / "runs.csv")
        assert row["command"].startswith("'=HYPERLINK") and row["parameter opt_..__name"] == "'@sum"
    if store is TensorBoardFiles:
        reader, _ = open_board(out)
        text = reader.Tensors("provenance")[0].tensor_proto.string_val[0]
        assert b"<b>" not in text and b"=HYPERLINK(1) &#124; &#60;b&#62;" in text


def test_a_log_without_a_start_is_named_and_the_others_are_exported(results, tmp_path, to_export):
    folder, path, _ = results
    path.write_text("# benchmark: bert\n")
    done = to_export(folder, tmp_path / "out", "csv")
    assert "result_1.txt: left out: no record" in done.stdout and "1 run of 1 set" in done.stdout
    path.write_text((folder / "result_0.txt").read_text().replace('"time_ms": 1', '"time_ms": -1'))
    assert "left out: line 15: time_ms is -1" in to_export(folder, tmp_path / "out", "csv").stdout
    (folder / "result_0.txt").unlink()
    done = ttt_here("export", folder, "--to", "csv", "--out", tmp_path / "none")
    assert done.returncode == 1 and "no run was exported" in done.stderr


def test_a_run_of_a_study_states_no_minutes_to_its_target(golden):
    log = golden.log("bert", size="mini")
    study = edit("stop_at_target", value=False)(log)
    assert log != study
    runs = [read_run(parse_log("\n".join(lines).encode(), "result_0.txt")) for lines in (log, study)]
    assert "minutes_to_target" in runs[0].outcome and runs[1].outcome == {}
    assert runs[1].tags["label"] == "unverified, proxy, study"


def test_every_committed_run_is_exported(tmp_path):
    folders = [ROOT / f"results/reference-2cpu-mini-{name}" for name in ("baseline", "optimized")]
    done = ttt_here("export", *folders, "--to", "csv", "--out", tmp_path)
    assert done.returncode == 0 and "30 runs of 4 sets" in done.stdout
    logs = [log for run_set in load(folders) for log in run_set.logs]
    rows = rows_of(tmp_path / "runs.csv")
    assert sorted(float(row["minutes_to_target"]) for row in rows) == sorted(log.minutes for log in logs)
    assert all(row["commit"] and row["parameter optimizer.learning_rate"] for row in rows)
