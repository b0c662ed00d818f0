"""The log writer refuses what the rules forbid, and what would be lost."""

import errno
import json
import math
import os

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.evidence.log import parse_log, read_log
from common.run import launch, mllog
from common.run.mllog import LogOrderError, RunLog


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result_0.txt"


@pytest.fixture
def new(path):
    log = RunLog(path)
    yield log
    log.close()


@pytest.fixture
def run(new):
    return start_run(new)


def start_run(log):
    log.event("cache_clear", True, how="test")
    log.start("init_start")
    log.event("seed", 3)
    log.stop("init_stop")
    log.start("run_start")
    return log


def records(path):
    return [
        json.loads(line.split(" ", 1)[1])
        for line in path.read_text().splitlines()
        if line.startswith(":::MLLOG ")
    ]


@pytest.mark.parametrize(
    "key", ["init_start", "run_start", "run_stop", "block_start", "eval_accuracy", "seed"]
)
def test_nothing_comes_before_cache_clear(new, key):
    with pytest.raises(LogOrderError, match=key):
        new.event(key, 1)


@pytest.mark.parametrize(
    "key", ["run_start", "init_stop", "cache_clear", "seed", "eval_accuracy", "block_stop", "eval_stop"]
)
def test_a_started_run_refuses_what_cannot_follow(run, key):
    with pytest.raises(LogOrderError):
        run.event(key, 1)


def test_nothing_follows_run_stop(run):
    run.stop("run_stop", status="aborted")
    for key in ("run_stop", "eval_start", "throughput"):
        with pytest.raises(LogOrderError, match="stopped"):
            run.event(key, 1)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.0),
        np.float32(1),
        np.bool_(True),
        b"x",
        {1},
        math.nan,
        math.inf,
        [torch.tensor(1)],
        {"a": b"x"},
    ],
    ids=str,
)
def test_a_value_that_would_be_lost_or_changed_is_refused(run, value):
    with pytest.raises(LogOrderError, match="plain"):
        run.event("throughput", value)
    with pytest.raises(LogOrderError, match="plain"):
        run.event("throughput", 1.0, epoch_num=value)


def test_records_name_their_call_site_relative_to_the_repository(run, path):
    assert {record["metadata"]["file"] for record in records(path)} == {"tests/common/run/test_mllog.py"}


def test_the_log_of_a_dead_process_is_closed_as_aborted_even_inside_a_line(run, path):
    run.close()
    path.write_text(path.read_text() + ':::MLLOG {"namespace": "", "time_')
    assert mllog.abort(path, reason="killed")
    last = json.loads(path.read_text().splitlines()[-1].split(" ", 1)[1])
    assert (last["key"], last["metadata"]["status"]) == ("run_stop", "aborted")


def test_a_finished_log_and_one_that_never_started_stay_as_they_are(run, path):
    run.stop("run_stop", status="success")
    before = path.read_bytes()
    assert not mllog.abort(path)
    assert path.read_bytes() == before
    path.write_text("# head\n")
    assert not mllog.abort(path)
    assert path.read_text() == "# head\n"


def finish(log):
    log.start("block_start", first_epoch_num=1, epoch_count=1)
    log.start("epoch_start", epoch_num=1)
    log.stop("epoch_stop", epoch_num=1)
    log.stop("block_stop", first_epoch_num=1)
    log.start("eval_start", epoch_num=1)
    log.stop("eval_stop", epoch_num=1)
    log.event("eval_accuracy", 0.5, epoch_num=1, samples=1)
    log.stop("run_stop", status="success")


def test_the_legal_order_is_accepted_and_every_record_is_on_disk_when_the_call_returns(run, path):
    finish(run)
    assert records(path)[-1]["metadata"]["status"] == "success"


def test_a_fact_that_is_logged_once_is_refused_twice(new):
    new.event("cache_clear", True)
    new.start("init_start")
    new.event("seed", 3)
    with pytest.raises(LogOrderError, match="already"):
        new.event("seed", 3)


@pytest.mark.parametrize("written", [1, 40, -1])
def test_a_log_cut_inside_its_last_record_is_closed(run, path, written):
    run.close()
    start = path.read_text().splitlines()[-1].replace("INTERVAL_START", "INTERVAL_END")
    path.write_text(path.read_text() + start.replace("run_start", "eval_start")[:written])
    assert mllog.abort(path)
    assert path.read_text().count('"run_stop"') == 1
    assert not mllog.abort(path)


def test_a_log_cut_inside_run_stop_is_closed(run, path):
    run.close()
    start = path.read_text().splitlines()[-1]
    path.write_text(path.read_text() + start.replace("run_start", "run_stop")[:-20])
    assert mllog.abort(path)


def test_every_record_of_a_log_that_was_cut_is_json_once_it_is_closed(run, path):
    run.close()
    path.write_text(path.read_text() + ':::MLLOG {"namespace": "", "time_')
    assert mllog.abort(path)
    assert records(path)[-1]["key"] == "run_stop"


class Disk:
    """The content of a folder after a power cut: names and bytes as they were at the last fsync."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.contents, self.names, self.fsync = folder, {}, set(), os.fsync
        monkeypatch.setattr(os, "fsync", self.synchronize)

    def synchronize(self, descriptor):
        self.fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path == str(self.folder):
            self.names = set(os.listdir(path))
        elif os.path.isfile(path):
            with open(path, "rb") as file:
                self.contents[os.path.basename(path)] = file.read()

    def after_a_cut(self):
        return {name: self.contents.get(name, b"") for name in self.names}


def write_run(log, num_blocks=3):
    for number in range(num_blocks):
        log.start("block_start", first_epoch_num=number)
        log.event("train_loss", 5.0 - number)
        log.stop("block_stop", first_epoch_num=number)
        log.start("eval_start", epoch_num=number)
        log.stop("eval_stop", epoch_num=number)
        log.event("eval_accuracy", 0.1 * number, epoch_num=number)


def test_a_power_cut_after_its_end_loses_no_byte_of_a_run(tmp_path, monkeypatch):
    folder = tmp_path / "results" / "machine" / "bert"
    disk = Disk(folder, monkeypatch)
    path = launch.reserve(folder, None, "# benchmark: language_bert\n")
    log = start_run(RunLog(path))
    write_run(log)
    log.stop("run_stop", status="success")
    assert disk.after_a_cut() == {path.name: path.read_bytes()}
    log.close()


def test_a_power_cut_at_any_byte_leaves_a_log_that_is_read_and_closed(tmp_path, path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of them
    log = start_run(RunLog(path))
    write_run(log)
    log.stop("run_stop", status="success")
    log.close()
    content = path.read_bytes()
    assert parse_log(content, path.name).last("run_stop").metadata["status"] == "success"
    cut = tmp_path / "result_1.txt"
    for length in range(0, len(content), 11):
        cut.write_bytes(content[:length])
        before = parse_log(content[: content.rfind(b"\n", 0, length) + 1], cut.name)  # its whole lines
        is_closed = mllog.abort(cut, reason="a power cut")
        after = read_log(cut)
        assert is_closed == (before.first("run_start") is not None)
        assert not is_closed or after.last("run_stop").metadata["status"] == "aborted"
        assert after.records[: len(before.records)] == before.records


def test_a_disk_that_fails_at_the_end_of_a_run_is_told(run, path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="result_0.txt: the disk may not hold the log"):
        run.stop("run_stop", status="success")
    assert records(path)[-1]["key"] == "run_stop"


def test_a_line_that_could_not_be_written_once_is_an_error_and_nothing_takes_its_place(
    run, path, monkeypatch
):
    """MLPerf's logger catches what writing a line raises, and writes another one."""
    flush, calls = run.handler.stream.flush, []

    def fail_once():
        calls.append(None)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush()

    monkeypatch.setattr(run.handler, "flush", fail_once)
    for _ in range(2):
        with pytest.raises(UserError, match="result_0.txt: cannot write the log"):
            run.event("dataset_fingerprint", "00ff")
    run.close()
    assert all(line.startswith(":::MLLOG {") for line in path.read_text().splitlines())
