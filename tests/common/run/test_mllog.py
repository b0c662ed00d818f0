"""The log writer refuses records that the rules forbid, and logs that would be lost."""

import errno
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.evidence.log import parse_log, read_log
from common.evidence.sealed.chain import is_chained, read_chain
from common.run import launch, mllog
from common.run.mllog import LogOrderError, RunLog
from tests.runs import records


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


def write_run(log, num_blocks=3, status="success"):
    for number in range(num_blocks):
        log.start("block_start", first_epoch_num=number)
        log.start("epoch_start", epoch_num=number)
        log.event("threads_lowered", 1)
        log.stop("epoch_stop", epoch_num=number)
        log.event("train_loss", 5.0 - number)
        log.stop("block_stop", first_epoch_num=number)
        log.start("eval_start", epoch_num=number)
        log.stop("eval_stop", epoch_num=number)
        log.event("eval_accuracy", 0.1 * number, epoch_num=number)
    log.stop("run_stop", status=status)


@pytest.mark.parametrize(
    ("state", "keys"),
    [
        ("new", "init_start run_start run_stop block_start eval_accuracy seed"),
        ("init", "seed run_start cache_clear"),  # one seed is there
        ("run", "run_start init_stop cache_clear seed eval_accuracy block_stop eval_stop"),
        ("stopped", "run_stop eval_start throughput"),
    ],
)
def test_a_record_that_cannot_follow_is_refused(state, keys, new):
    writes = [
        lambda: new.event("cache_clear", True),
        lambda: new.start("init_start"),
        lambda: new.event("seed", 3),
        lambda: new.stop("init_stop"),
        lambda: new.start("run_start"),
        lambda: write_run(new),
    ]
    for write in writes[: {"new": 0, "init": 3, "run": 5, "stopped": 6}[state]]:
        write()
    assert new.state == state
    for key in keys.split():
        with pytest.raises(LogOrderError, match=key):
            new.event(key, 1)


@pytest.mark.parametrize(
    "value",
    [
        *(torch.tensor(1.0), np.float32(1), np.bool_(True), b"x", {1}, math.nan, math.inf),
        *([torch.tensor(1)], {"a": b"x"}),
    ],
    ids=str,
)
def test_a_value_that_would_be_lost_or_changed_is_refused(run, value):
    with pytest.raises(LogOrderError, match="plain"):
        run.event("throughput", value)
    with pytest.raises(LogOrderError, match="plain"):
        run.event("throughput", 1.0, epoch_num=value)


def test_records_are_on_disk_when_the_call_returns_and_name_their_call_site(run, path):
    write_run(run)
    assert records(path)[-1]["metadata"]["status"] == "success"
    assert {record["metadata"]["file"] for record in records(path)} == {"tests/common/run/test_mllog.py"}


def test_each_record_carries_the_hash_of_all_that_stands_before_it(path):
    path.write_text("# head\n")
    log = start_run(RunLog(path))
    log.logger.logger.warning("a line of MLPerf's logger that is no record")
    log.close()
    write_run(log := RunLog(path, state="run"))
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert is_chained(b"".join(lines)) and read_chain(b"".join(lines)).breaks == ()
    for number, line in enumerate(lines[:-1]):
        removed, edited = lines[:number] + lines[number + 1 :], [*lines]
        edited[number] = line.replace(b"e", b"E", 1)
        assert read_chain(b"".join(removed)).breaks and read_chain(b"".join(edited)).breaks


def test_a_finished_log_and_one_that_never_started_stay_as_they_are(run, path):
    run.stop("run_stop", status="success")
    before = path.read_bytes()
    assert not mllog.abort(path)
    assert path.read_bytes() == before
    path.write_text("# head\n")
    assert not mllog.abort(path)
    assert path.read_text() == "# head\n"


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


def test_a_power_cut_after_its_end_loses_no_byte_of_a_run(tmp_path, monkeypatch):
    folder = tmp_path / "results" / "machine" / "bert"
    disk = Disk(folder, monkeypatch)
    path = launch.reserve(folder, None, "# benchmark: language_bert\n")
    log = start_run(RunLog(path))
    write_run(log)
    assert disk.after_a_cut() == {path.name: path.read_bytes()}
    log.close()


def test_a_power_cut_at_any_byte_leaves_a_log_that_is_read_and_closed_once(tmp_path, run, path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of them
    write_run(run)
    content = path.read_bytes()
    assert parse_log(content, path.name).last("run_stop").metadata["status"] == "success"
    cut = tmp_path / "result_1.txt"
    for length in (*range(0, len(content), 11), len(content) - 1):  # the last cuts off a newline
        cut.write_bytes(content[:length])
        before = parse_log(content[: content.rfind(b"\n", 0, length) + 1], cut.name)  # its whole lines
        is_closed = mllog.abort(cut, reason="a power cut")
        after = read_log(cut)
        assert not is_closed or read_chain(cut.read_bytes()).breaks == ()
        assert is_closed == (before.first("run_start") is not None)
        assert [stop.metadata["status"] for stop in after.events("run_stop")] == ["aborted"] * is_closed
        assert not mllog.abort(cut)
        assert after.records[: len(before.records)] == before.records


def failing(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_at_the_end_of_a_run_is_told(run, path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(UserError, match="result_0.txt: the disk may not hold the log"):
        run.stop("run_stop", status="success")
    assert records(path)[-1]["key"] == "run_stop"


def test_a_line_that_could_not_be_written_once_is_an_error_and_nothing_takes_its_place(
    run, path, monkeypatch
):
    """MLPerf's logger catches what writing a line raises, and writes another one."""
    calls = iter([failing])
    flush = run.handler.stream.flush
    monkeypatch.setattr(run.handler, "flush", lambda: next(calls, flush)())
    for _ in range(2):
        with pytest.raises(UserError, match="result_0.txt: cannot write the log"):
            run.event("dataset_fingerprint", "00ff")
    run.close()
    assert all(line.startswith(":::MLLOG {") for line in path.read_text().splitlines())
    mllog.abort(path, reason="the disk")
    assert read_chain(path.read_bytes()).breaks == ()


def test_a_log_whose_file_was_removed_or_replaced_says_so_before_a_block(run, path):
    run.check_file()
    os.replace(shutil.copy(path, path.with_name("copy")), path)  # as editors, rsync and git do
    for _ in range(2):
        with pytest.raises(UserError, match=r"result_0\.txt: was removed or replaced"):
            run.check_file()
        path.unlink(missing_ok=True)


def test_the_null_device_that_other_ranks_write_to_is_always_there():
    log = RunLog(Path(os.devnull))
    log.check_file()
    log.close()
