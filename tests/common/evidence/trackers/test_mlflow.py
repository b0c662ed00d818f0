"""Runs in MLflow's database, read back with its own client."""

import pytest

from common.commands import export as command
from common.evidence.log import read_log
from common.evidence.score import run_of
from common.evidence.trackers.csv_files import CsvFiles
from common.evidence.trackers.mlflow import MlflowStore
from tests.command import ttt_here
from tests.common.evidence.trackers.test_csv_files import NUM_EVALUATIONS, expected

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the trackers' libraries
METRICS = ("loss", "quality", "samples_per_s")


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
