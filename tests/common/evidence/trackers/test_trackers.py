"""Runs in the trackers' own stores, read back with the trackers' own readers."""

import csv
import json
import os
import platform
import shutil
import signal
import struct
import sys
import threading
import time
from pathlib import Path

import pytest

from common.commands import export as command
from common.evidence.log import load, read_log
from common.evidence.score import run_of
from common.evidence.trackers import export
from common.evidence.trackers.csv_files import CsvFiles
from common.evidence.trackers.export import export_runs
from common.evidence.trackers.mlflow import MlflowStore
from common.evidence.trackers.tensorboard import TensorBoardFiles
from common.evidence.trackers.tracked_run import read_run
from common.evidence.trackers.wandb import WandbRuns
from common.repository import ROOT, install_hint
from tests.command import one_line, run, start, ttt_here
from tests.runs import until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the trackers' libraries
LIBRARIES = ("mlflow", "tensorboard", "wandb")
NUM_EVALUATIONS = 5
METRICS = ("loss", "quality", "samples_per_s")


@pytest.fixture
def results(golden, tmp_path):
    """Two runs of BERT at size mini; of the second only what was written before its second block."""
    logs = golden.set("bert", num_logs=2, size="mini")
    folder = golden.write(tmp_path / "results", logs)
    path = folder / "result_1.txt"
    lines = path.read_text().splitlines(keepends=True)
    second_block = [number for number, line in enumerate(lines) if '"block_start"' in line][1]
    path.write_text("".join(lines[:second_block]) + lines[second_block][:40])
    return folder, path, "".join(lines)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """MLflow's database without runs: to make one takes MLflow seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    pytest.importorskip("mlflow").MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def prepare_store(request):
    """Return a function that skips without the library of a tracker, and gives MLflow its database."""

    def prepare(tracker, out):
        if tracker in LIBRARIES:
            pytest.importorskip(tracker, reason="the extra `track` is not installed")
        if tracker == "mlflow" and not out.exists():
            out.mkdir(parents=True)
            shutil.copy(request.getfixturevalue("empty_database"), out)

    return prepare


@pytest.fixture
def to_export(prepare_store):
    """Return a function that runs `ttt export`, which must not fail."""

    def export_to(paths, out, tracker, *more):
        prepare_store(tracker, out)
        done = ttt_here("export", paths, "--to", tracker, "--out", out, *more)
        assert done.returncode == 0, done.stderr
        return done

    return export_to


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def tables(out):
    """Return the rows of an export as CSV: of runs by number, of measurements by number and metric."""
    runs = {row["number"]: row for row in rows_of(out / "runs.csv")}
    numbers = {row["run"]: number for number, row in runs.items()}
    values = {}
    for row in rows_of(out / "measurements.csv"):
        place = (int(row["samples"]), float(row["seconds"]), float(row["value"]))
        values.setdefault((numbers[row["run"]], row["metric"]), []).append(place)
    return runs, values


def expected(path):
    """Return metric -> (samples, seconds since run_start, value) of each record of a log."""
    log = read_log(path)
    start_ms = log.first("run_start").time_ms
    keys = {"loss": "train_loss", "quality": "eval_accuracy", "samples_per_s": "throughput"}
    return {
        metric: [
            (round(log.samples(event)), (event.time_ms - start_ms) / 1000, event.value)
            for event in log.events(key)
        ]
        for metric, key in keys.items()
    }


def test_csv_holds_every_value_of_a_log_and_what_the_run_was(results, tmp_path, to_export):
    folder, _, _ = results
    to_export(folder, tmp_path / "out", "csv")
    runs, values = tables(tmp_path / "out")
    for number in ("0", "1"):
        for metric, places in expected(folder / f"result_{number}.txt").items():
            assert values[number, metric] == places, metric
    assert len(values["0", "quality"]) == NUM_EVALUATIONS and len(values["1", "quality"]) == 1
    ended, under_way = runs["0"], runs["1"]
    minutes = run_of(read_log(folder / "result_0.txt")).minutes
    assert ended["status"] == "success" and float(ended["minutes_to_target"]) == minutes
    assert under_way["status"] == "running" and under_way["minutes_to_target"] == ""
    assert ended["parameter optimizer.lr"] == "2.048" and ended["parameter seed"] == "1000"
    assert ended["label"] == "unverified, proxy" and ended["size"] == "mini-proxy"
    assert (ended["commit"], ended["command"]) == ("0123abc", "ttt run")
    assert ended["dataset_fingerprint"] == "00ff00ff" and ended["methods"] == "blurpool"


def test_csv_keeps_other_runs_and_doubles_none(both, tmp_path, to_export):
    first, second = sorted((both / "results").glob("*/resnet"))
    to_export(first, tmp_path, "csv")
    alone = (tmp_path / "runs.csv").read_text()
    to_export(second, tmp_path, "csv")
    together = [(tmp_path / name).read_bytes() for name in ("runs.csv", "measurements.csv")]
    rows = rows_of(tmp_path / "runs.csv")
    assert len(rows) == 10 == len({row["run"] for row in rows})
    assert {row["run"] for row in csv.DictReader(alone.splitlines())} < {row["run"] for row in rows}
    for paths in (first, second):
        to_export(paths, tmp_path, "csv")
    assert [(tmp_path / name).read_bytes() for name in ("runs.csv", "measurements.csv")] == together


def test_csv_replaces_a_run_whose_name_a_spreadsheet_would_compute(results, tmp_path, to_export):
    folder, _, _ = results
    folder.parent.rename(folder.parent.with_name("-here"))
    for _ in range(2):
        to_export(folder.parents[1] / "-here" / folder.name, tmp_path / "out", "csv")
    rows = rows_of(tmp_path / "out/runs.csv")
    assert len(rows) == 2 and all(row["run"].startswith("'-here") for row in rows)


def test_a_server_of_mlflow_is_shown_by_its_address(monkeypatch, results):
    class Server(CsvFiles):
        view = MlflowStore.view

        def flush(self):
            pass

        def __str__(self):
            return "http://127.0.0.1:5000"

    monkeypatch.setattr(command, "open_store", lambda tracker, out: Server(results[0]))
    done = ttt_here("export", results[0], "--to", "mlflow")
    assert done.stdout.endswith("to see them: http://127.0.0.1:5000\n")


def test_a_copy_of_a_log_is_named_and_not_a_second_run(results, tmp_path):
    folder, _, _ = results
    copy = tmp_path / "copy" / folder.parent.name / folder.name
    copy.mkdir(parents=True)
    (copy / "result_0.txt").write_bytes((folder / "result_0.txt").read_bytes())
    done = ttt_here("export", folder, copy, "--to", "csv", "--out", tmp_path / "out")
    assert "left out: the same run as" in done.stdout and "2 runs of 1 sets" in done.stdout
    assert len(rows_of(tmp_path / "out/runs.csv")) == 2


def board(folder):
    """Return TensorBoard's reader of the one run below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    return EventAccumulator(str(file.parent)), file


def test_tensorboard_reads_the_scalars_the_parameters_and_the_end(results, tmp_path, to_export):
    folder, _, _ = results
    to_export(folder, tmp_path / "out", "tensorboard")
    reader, file = board(next((tmp_path / "out").rglob("0@*")))
    reader.Reload()
    start_s = read_log(folder / "result_0.txt").first("run_start").time_ms / 1000
    for metric, places in expected(folder / "result_0.txt").items():
        scalars = [(one.step, one.wall_time - start_s, one.value) for one in reader.Scalars(metric)]
        assert scalars == [pytest.approx(place, rel=1e-6, abs=1e-3) for place in places]
    assert reader.Scalars("minutes_to_target")[0].value == pytest.approx(
        run_of(read_log(folder / "result_0.txt")).minutes
    )
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    contents = reader.PluginTagToContent("hparams")
    parameters = HParamsPluginData.FromString(
        contents["_hparams_/session_start_info"]
    ).session_start_info.hparams
    assert parameters["optimizer.lr"].number_value == 2.048
    assert (
        HParamsPluginData.FromString(contents["_hparams_/session_end_info"]).session_end_info.status == 1
    )  # success
    (provenance,) = reader.Tensors("provenance")
    assert b"unverified, proxy" in provenance.tensor_proto.string_val[0]
    assert platform.node() not in file.name


def test_tensorboard_goes_on_reading_a_file_that_grows(results, tmp_path, to_export):
    folder, path, whole = results
    to_export(folder, tmp_path / "out", "tensorboard")
    reader, file = board(next((tmp_path / "out").rglob("1@*")))
    reader.Reload()
    assert len(reader.Scalars("quality")) == 1
    before, number = file.read_bytes(), file.stat().st_ino
    path.write_text(whole)
    to_export(folder, tmp_path / "out", "tensorboard")
    assert file.read_bytes().startswith(before) and file.stat().st_ino == number
    reader.Reload()  # the same reader: it has the file open
    assert len(reader.Scalars("quality")) == NUM_EVALUATIONS
    before = file.read_bytes()
    to_export(folder, tmp_path / "out", "tensorboard")
    assert file.read_bytes() == before and len(list((tmp_path / "out").rglob("*tfevents*"))) == 2


def histories(out):
    """Return MLflow's runs by number, with the history of each metric."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name.startswith("ttt-")]
    assert experiment.name == "ttt-bert-mini-proxy"
    runs = {one.info.run_name[-1]: one for one in client.search_runs([experiment.experiment_id])}
    return runs, {
        (number, metric): [
            (point.step, (point.timestamp - one.info.start_time) / 1000, point.value)
            for point in sorted(
                client.get_metric_history(one.info.run_id, metric), key=lambda point: point.step
            )
        ]
        for number, one in runs.items()
        for metric in METRICS
    }


def test_mlflow_reads_them_back_and_an_export_twice_doubles_nothing(results, tmp_path, to_export):
    folder, path, whole = results
    to_export(folder, tmp_path / "out", "mlflow")
    runs, values = histories(tmp_path / "out")
    assert sorted(runs) == ["0", "1"]
    for number in runs:
        for metric, places in expected(folder / f"result_{number}.txt").items():
            assert values[number, metric] == places
    data = runs["0"].data
    assert (runs["0"].info.status, runs["1"].info.status) == ("FINISHED", "RUNNING")
    assert data.metrics["minutes_to_target"] == run_of(read_log(folder / "result_0.txt")).minutes
    assert data.params["optimizer.lr"] == "2.048" and data.tags["label"] == "unverified, proxy"
    assert data.tags["mlflow.source.git.commit"] == "0123abc"
    path.write_text(whole)
    for _ in range(2):
        to_export(folder, tmp_path / "out", "mlflow")
    runs, values = histories(tmp_path / "out")
    assert sorted(runs) == ["0", "1"] and runs["1"].info.status == "FINISHED"
    for metric, places in expected(path).items():
        assert values["1", metric] == places and len(values["0", metric]) == NUM_EVALUATIONS


def blocks_of(data):
    """Yield the records of a file of W&B, which is a log of LevelDB behind a head of 7 bytes."""
    place, record = 7, b""
    while place < len(data):
        rest = 32768 - place % 32768
        if rest < 7:  # no room for the head of a part
            place += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def offline_runs(out):
    """Return configuration and history of each offline run of W&B by its name, in W&B's own records."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = {}
    for file in (out / "wandb").glob("offline-run-*/*.wandb"):
        name, rows, config = "", [], {}
        for record in map(Record.FromString, blocks_of(file.read_bytes())):
            if record.HasField("run"):
                name = record.run.display_name
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                rows.append({one.key or one.nested_key[0]: json.loads(one.value_json) for one in items})
        assert name not in runs
        runs[name] = (config, rows)
    return runs


def test_wandb_keeps_them_offline_once_and_without_this_machine(results, tmp_path, to_export):
    folder, path, whole = results
    for number in range(3):
        to_export(folder, tmp_path / "out", "wandb")
        if number == 1:
            path.write_text(whole)
    runs = offline_runs(tmp_path / "out")
    set_name = f"{folder.parent.name}/{folder.name}"
    assert sorted(runs) == [f"{set_name}/0", f"{set_name}/1"]
    for name, (config, rows) in runs.items():
        assert config["optimizer.lr"] == 2.048
        for metric, places in expected(folder / f"result_{name[-1]}.txt").items():
            logged = [(row["samples"], row["seconds"], row[metric]) for row in rows if metric in row]
            assert logged == places and len(logged) == NUM_EVALUATIONS
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file() and file.suffix != ".log":
            assert platform.node().encode() not in file.read_bytes(), file


@pytest.mark.parametrize("tracker", ["csv", "tensorboard", "mlflow", "wandb"])
def test_follow_picks_up_new_lines_and_runs_and_ends_with_the_last(
    tracker, results, tmp_path, monkeypatch, to_export
):
    folder, path, whole = results
    monkeypatch.setattr(export, "POLL_S", 0.01)
    monkeypatch.setattr(export, "QUIET_S", 1.0)
    next_log = (folder / "result_0.txt").read_text().replace('"time_ms": 17000', '"time_ms": 18000')
    rest = whole[len(path.read_text()) :]

    def write():
        time.sleep(0.2)
        for first in range(0, len(rest), 1500):  # lines are cut anywhere
            with path.open("a") as file:
                file.write(rest[first : first + 1500])
            time.sleep(0.03)
        time.sleep(0.3)
        (folder / "result_2.txt").write_text(next_log)

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
    assert lines[3].startswith("3 runs of 1 sets -> ")
    to_export(folder, tmp_path / "after", "csv")
    _, after = tables(tmp_path / "after")
    to_export(folder, tmp_path / "followed", tracker)  # once more: nothing is missing, nothing doubles
    for number in "012":
        for metric in METRICS:
            assert read_back(tracker, tmp_path / "followed", number, metric) == [
                pytest.approx(place, rel=1e-6) for place in after[number, metric]
            ]


def read_back(tracker, out, number, metric):
    """Return what a tracker's reader says: (samples, seconds, value) of each measurement."""
    if tracker == "csv":
        return tables(out)[1][number, metric]
    if tracker == "mlflow":
        return histories(out)[1][number, metric]
    if tracker == "wandb":
        ((_, rows),) = [entry for name, entry in offline_runs(out).items() if name.endswith(f"/{number}")]
        return [(row["samples"], row["seconds"], row[metric]) for row in rows if metric in row]
    reader, _ = board(next(out.rglob(f"{number}@*")))
    reader.Reload()
    begun = reader.Tensors("provenance")[0].wall_time
    return [(one.step, round(one.wall_time - begun, 3), one.value) for one in reader.Scalars(metric)]


def test_ctrl_c_ends_following_with_130_and_what_was_written_is_whole(results, tmp_path):
    folder, _, _ = results
    command = [sys.executable, "-m", "common.cli", "export", folder, "--to", "csv"]
    process = start(*command, "--out", tmp_path / "out", "--follow")
    until(lambda: process.poll() is not None or (tmp_path / "out/measurements.csv").exists())
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "error: interrupted\n"
    assert len(tables(tmp_path / "out")[0]) == 2
    assert sorted(os.listdir(tmp_path / "out")) == ["measurements.csv", "runs.csv"]  # no lock, no draft


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


def test_a_table_of_somebody_else_is_left_as_it_is(both, tmp_path):
    (tmp_path / "runs.csv").write_text("name,score\nmine,1\n")
    assert "choose another --out" in one_line(
        ttt_here("export", both / "results", "--to", "csv", "--out", tmp_path)
    )
    assert (tmp_path / "runs.csv").read_text() == "name,score\nmine,1\n"


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
        reader, _ = board(out)
        reader.Reload()
        text = reader.Tensors("provenance")[0].tensor_proto.string_val[0]
        assert b"<b>" not in text and b"=HYPERLINK(1) &#124; &#60;b&#62;" in text


def test_a_log_without_a_start_is_named_and_the_others_are_exported(results, tmp_path, to_export):
    folder, path, _ = results
    path.write_text("# benchmark: bert\n")
    done = to_export(folder, tmp_path / "out", "csv")
    assert "result_1.txt: left out: no record" in done.stdout and "1 runs of 1 sets" in done.stdout
    (folder / "result_0.txt").unlink()
    done = ttt_here("export", folder, "--to", "csv", "--out", tmp_path / "none")
    assert done.returncode == 1 and "no run was exported" in done.stderr


def test_a_run_of_a_study_states_no_minutes_to_its_target(golden):
    log = golden.log("bert", size="mini")
    study = [line.replace('"seed"', '"stop_at_target"').replace("1000", "false") for line in log]
    assert log != study
    folder = Path("study")
    runs = [read_run(load_lines(lines, folder)) for lines in (log, study)]
    assert "minutes_to_target" in runs[0].outcome and runs[1].outcome == {}
    assert runs[1].tags["label"] == "unverified, proxy, study"


def load_lines(lines, folder):
    from common.evidence.log import parse_log

    return parse_log("\n".join(lines).encode(), str(folder / "result_0.txt"))


def test_every_committed_run_is_exported(tmp_path):
    folders = [ROOT / f"results/reference-2cpu-mini-{name}" for name in ("baseline", "optimized")]
    done = ttt_here("export", *folders, "--to", "csv", "--out", tmp_path)
    assert done.returncode == 0 and "30 runs of 4 sets" in done.stdout
    logs = [log for run_set in load(folders) for log in run_set.logs]
    rows = rows_of(tmp_path / "runs.csv")
    assert sorted(float(row["minutes_to_target"]) for row in rows) == sorted(log.minutes for log in logs)
    assert all(row["commit"] and row["parameter optimizer.learning_rate"] for row in rows)


def test_no_run_loads_an_export_and_no_export_loads_torch():
    code = "import sys, common.commands.export; sys.exit('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).returncode == 0
    rooms = [ROOT / "common" / room for room in ("run", "training", "methods", "data")]
    texts = [path.read_text() for room in rooms for path in room.rglob("*.py")]
    assert texts and not any("evidence.trackers" in text for text in texts)
