"""Runs as CSV files, read back with the standard library."""

import csv

from common.evidence.log import read_log
from common.evidence.score import run_of

NUM_EVALUATIONS = 5


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
    made = []
    for _ in range(2):
        to_export(folder.parents[1] / "-here" / folder.name, tmp_path / "out", "csv")
        made.append((tmp_path / "out/measurements.csv").read_bytes())
    rows = rows_of(tmp_path / "out/runs.csv")
    assert len(rows) == 2 and all(row["run"].startswith("'-here") for row in rows)
    assert made[0] == made[1] and tables(tmp_path / "out")[1]  # both files name a run alike
