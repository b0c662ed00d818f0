"""Offline runs of W&B, read back in its own records."""

import json
import platform
import struct

import pytest

from tests.common.evidence.trackers.test_csv_files import NUM_EVALUATIONS, expected

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the trackers' libraries


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
