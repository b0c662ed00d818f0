"""Runs in TensorBoard's files, read back with its own reader."""

import platform

import pytest

from common.evidence.log import read_log
from common.evidence.score import run_of
from tests.common.evidence.trackers.test_csv_files import NUM_EVALUATIONS, expected

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the trackers' libraries


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
