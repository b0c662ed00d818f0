"""Read exports with each tracker's own reader: samples, seconds since the start, value."""

import csv
import json
import struct

from common.evidence.log import read_log
from common.evidence.score import run_of

KEYS = {"loss": "train_loss", "quality": "eval_accuracy", "samples_per_s": "throughput"}  # of a metric


def expected(folder):
    """Return (number, metric) -> (samples, seconds since run_start, value) of each record of its logs."""
    places = {}
    for path in folder.glob("result_*.txt"):
        log = read_log(path)
        start_ms = log.first("run_start").time_ms
        for metric, key in KEYS.items():
            places[path.stem[-1], metric] = [
                (round(log.samples(event)), (event.time_ms - start_ms) / 1000, event.value)
                for event in log.events(key)
            ]
    return places


def minutes_of(path):
    return run_of(read_log(path)).minutes


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def read_csv(out):
    numbers = {row["run"]: row["number"] for row in rows_of(out / "runs.csv")}
    values = {}
    for row in rows_of(out / "measurements.csv"):
        place = (int(row["samples"]), float(row["seconds"]), float(row["value"]))
        values.setdefault((numbers[row["run"]], row["metric"]), []).append(place)
    return values


def mlflow_runs(out):
    """Return MLflow's client, and its runs by number."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name.startswith("ttt-")]
    assert experiment.name == "ttt-bert-mini-proxy"
    return client, {one.info.run_name[-1]: one for one in client.search_runs([experiment.experiment_id])}


def read_mlflow(out):
    client, runs = mlflow_runs(out)
    return {
        (number, metric): [
            (point.step, (point.timestamp - run.info.start_time) / 1000, point.value)
            for point in sorted(
                client.get_metric_history(run.info.run_id, metric), key=lambda point: point.step
            )
        ]
        for number, run in runs.items()
        for metric in KEYS
    }


def open_board(folder):
    """Return TensorBoard's reader of the one run below a folder, and its file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    reader = EventAccumulator(str(file.parent))
    reader.Reload()
    return reader, file


def read_tensorboard(out):
    values = {}
    for folder in out.rglob("?@*"):
        reader, _ = open_board(folder)
        begun = reader.Tensors("provenance")[0].wall_time
        for metric in KEYS:
            scalars = [
                (one.step, round(one.wall_time - begun, 3), one.value) for one in reader.Scalars(metric)
            ]
            values[folder.name[0], metric] = scalars
    return values


def records_of_wandb(data):
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
        for record in map(Record.FromString, records_of_wandb(file.read_bytes())):
            if record.HasField("run"):
                name = record.run.display_name
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                rows.append({one.key or one.nested_key[0]: json.loads(one.value_json) for one in items})
        assert name not in runs
        runs[name] = (config, rows)
    return runs


def read_wandb(out):
    return {
        (name[-1], metric): [(row["samples"], row["seconds"], row[metric]) for row in rows if metric in row]
        for name, (_, rows) in offline_runs(out).items()
        for metric in KEYS
    }


# tracker -> a function that returns (number, metric) -> places, as `expected` does
READERS = {"csv": read_csv, "mlflow": read_mlflow, "tensorboard": read_tensorboard, "wandb": read_wandb}
