"""An export read back with the tracker's own reader: every value once, and the facts of the run."""

import platform
import re

import pytest

from common.commands import export as command
from common.evidence.trackers.csv_files import CsvFiles
from common.evidence.trackers.mlflow import MlflowStore
from tests.command import ttt_here
from tests.common.evidence.conftest import NUM_EVALUATIONS
from tests.common.evidence.trackers.readers import (
    READERS,
    expected,
    minutes_of,
    mlflow_runs,
    offline_runs,
    open_board,
    rows_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the trackers' libraries


@pytest.mark.parametrize("tracker", READERS)
def test_every_value_is_read_back_and_an_export_again_doubles_none(tracker, results, tmp_path, to_export):
    folder, path, whole = results
    for count in (1, NUM_EVALUATIONS, NUM_EVALUATIONS):
        to_export(folder, tmp_path / "out", tracker)
        places, values = expected(folder), READERS[tracker](tmp_path / "out")
        assert [len(places[number, "quality"]) for number in "01"] == [NUM_EVALUATIONS, count]
        assert values.keys() >= places.keys()
        for place in places:
            is_rounded = tracker == "tensorboard"  # to 32 bits
            wanted = [pytest.approx(one, rel=1e-6) for one in places[place]] if is_rounded else places[place]
            assert values[place] == wanted, place
        path.write_text(whole)


def test_csv_states_what_a_run_was(results, tmp_path, to_export):
    folder, _, _ = results
    to_export(folder, tmp_path / "out", "csv")
    ended, under_way = sorted(rows_of(tmp_path / "out/runs.csv"), key=lambda row: row["number"])
    assert ended["status"] == "success"
    assert float(ended["minutes_to_target"]) == minutes_of(folder / "result_0.txt")
    assert under_way["status"] == "running" and under_way["minutes_to_target"] == ""
    assert ended["parameter optimizer.lr"] == "2.048" and ended["parameter seed"] == "1000"
    assert ended["label"] == "unverified, proxy" and ended["size"] == "mini-proxy"
    assert (ended["commit"], ended["command"]) == ("0123abc", "ttt run")
    assert ended["dataset_fingerprint"] == "00ff00ff" and ended["methods"] == "blurpool"


def test_csv_keeps_the_rows_of_other_runs(both, tmp_path, to_export):
    first, second = sorted((both / "results").glob("*/resnet"))
    made = []
    for paths in (first, second, first, second):
        to_export(paths, tmp_path, "csv")
        made.append([(tmp_path / name).read_bytes() for name in ("runs.csv", "measurements.csv")])
    assert made[1] == made[2] == made[3] != made[0]
    rows = rows_of(tmp_path / "runs.csv")
    assert len(rows) == 10 == len({row["run"] for row in rows})


def test_csv_replaces_a_run_whose_name_a_spreadsheet_would_compute(results, tmp_path, to_export):
    folder, _, _ = results
    folder.parent.rename(folder.parent.with_name("-here"))
    made = []
    for _ in range(2):
        to_export(folder.parents[1] / "-here" / folder.name, tmp_path / "out", "csv")
        made.append((tmp_path / "out/measurements.csv").read_bytes())
    rows = rows_of(tmp_path / "out/runs.csv")
    assert len(rows) == 2 and all(row["run"].startswith("'-here") for row in rows)
    assert made[0] == made[1] and READERS["csv"](tmp_path / "out")  # both files name a run alike


def test_mlflow_has_parameters_tags_and_how_a_run_ended(results, tmp_path, to_export):
    folder, path, whole = results
    to_export(folder, tmp_path / "out", "mlflow")
    _, runs = mlflow_runs(tmp_path / "out")
    data = runs["0"].data
    assert {number: run.info.status for number, run in runs.items()} == {"0": "FINISHED", "1": "RUNNING"}
    assert data.metrics["minutes_to_target"] == minutes_of(folder / "result_0.txt")
    assert data.params["optimizer.lr"] == "2.048" and data.tags["label"] == "unverified, proxy"
    assert data.tags["mlflow.source.git.commit"] == "0123abc"
    path.write_text(whole)
    to_export(folder, tmp_path / "out", "mlflow")
    assert mlflow_runs(tmp_path / "out")[1]["1"].info.status == "FINISHED"


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


def test_tensorboard_has_parameters_provenance_and_the_end(results, tmp_path, to_export):
    folder, _, _ = results
    to_export(folder, tmp_path / "out", "tensorboard")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    reader, file = open_board(next((tmp_path / "out").rglob("0@*")))
    (minutes,) = reader.Scalars("minutes_to_target")
    assert minutes.value == pytest.approx(minutes_of(folder / "result_0.txt"))
    contents = reader.PluginTagToContent("hparams")
    start, end = (
        HParamsPluginData.FromString(contents[f"_hparams_/session_{part}_info"]) for part in ("start", "end")
    )
    assert start.session_start_info.hparams["optimizer.lr"].number_value == 2.048
    assert end.session_end_info.status == 1  # success
    (provenance,) = reader.Tensors("provenance")
    assert b"unverified, proxy" in provenance.tensor_proto.string_val[0]
    assert platform.node() not in file.name


def test_tensorboard_goes_on_reading_a_file_that_grows(results, tmp_path, to_export):
    folder, path, whole = results
    to_export(folder, tmp_path / "out", "tensorboard")
    reader, file = open_board(next((tmp_path / "out").rglob("1@*")))
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


def test_wandb_has_parameters_and_nothing_of_this_machine(results, tmp_path, to_export):
    folder, _, _ = results
    name = platform.node().encode()  # random names may contain the letters of a short one
    machine = rb"\b%b\b|%b" % (re.escape(name), re.escape(bytes([len(name)]) + name))
    to_export(folder, tmp_path / "out", "wandb")
    runs = offline_runs(tmp_path / "out")
    assert sorted(runs) == [f"{folder.parent.name}/{folder.name}/{number}" for number in "01"]
    assert all(config["optimizer.lr"] == 2.048 for config, _ in runs.values())
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file() and file.suffix != ".log":
            assert not re.search(machine, file.read_bytes()), file
