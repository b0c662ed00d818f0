"""Preparations of one data set at the same time, by real processes; files that are no manifests."""

import errno
import fcntl
import json
import os
import signal
import sys

import pytest

from common.data import manifest, preparation
from common.errors import UserError
from common.files import locked
from common.repository import ROOT
from common.training.load import load_config
from tests.command import one_line, start, ttt_here
from tests.runs import until

SLOW_WRITER = """
import shutil, sys, time
from pathlib import Path
from types import SimpleNamespace
from common.data import manifest, preparation

def embedded(directory, work, config):
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for number in range(10):
        (work / f"{number}.bin").write_bytes(bytes(1000))
        time.sleep(0.03)
    while Path(sys.argv[1], "hold").exists():
        time.sleep(0.01)
    print("written", flush=True)
    digest = manifest.write_manifest(work, {"settings": {}})
    manifest.put_in_place(work, directory)
    return digest

config = SimpleNamespace(size="mini", prepared_with=dict, prepared_files=set)
directory = Path(sys.argv[1], "mini")
print("digest", preparation.prepare(directory, config, None, embedded=embedded, full=None, name="", needs=""))
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def ended(processes):
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [output for output, _ in outputs]


def test_of_several_preparations_one_writes_and_the_others_wait_for_it(tmp_path):
    outputs = ended([start(sys.executable, "-c", SLOW_WRITER, tmp_path) for _ in range(3)])
    assert sum("written" in output for output in outputs) == 1
    digests = {output.splitlines()[-1] for output in outputs}
    assert digests == {f"digest {manifest.read_manifest(tmp_path / 'mini', hint='')['fingerprint']}"}
    assert manifest.verify(tmp_path / "mini", {}, hint="") == []
    assert [path.name for path in tmp_path.iterdir()] == ["mini"]


def test_a_killed_preparation_holds_up_nobody(tmp_path):
    (tmp_path / "hold").touch()
    first = start(sys.executable, "-c", SLOW_WRITER, tmp_path)
    until(lambda: list(tmp_path.glob(".mini.part/*")))
    second = start(sys.executable, "-c", SLOW_WRITER, tmp_path)
    assert f"waiting for process {first.pid}," in second.stdout.readline()
    third = start(sys.executable, "-c", SLOW_WRITER, tmp_path)
    third.stdout.readline()
    third.send_signal(signal.SIGINT)  # its end must not take the lock away from the others
    third.communicate(timeout=60)
    first.kill()
    first.communicate()
    (tmp_path / "hold").unlink()
    assert "written" in ended([second])[0]
    assert manifest.verify(tmp_path / "mini", {}, hint="") == []
    assert [path.name for path in tmp_path.iterdir()] == ["mini"]


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / ".mini.lock", "prepares mini"):
        assert "no locks on this file system" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def text(tmp_path):
    """A manifest of prose, and the options that name it."""
    config = load_config("language_bert", "baseline", size="mini", settings=[]).config
    for name in ("train.index.npy", "evaluation.index.npy"):
        (tmp_path / name).write_bytes(b"x")
    manifest.write_manifest(tmp_path, {"settings": config.prepared_with()})
    return tmp_path, ("language_bert", "--size", "mini", "--set", f"data.directory={tmp_path}")


@pytest.fixture
def full(tmp_path):
    """Files of size full, each of one byte, and the configuration that reads them."""
    settings = [f"data.directory={tmp_path / 'full'}"]
    loaded = load_config("language_bert", "baseline", size="full", settings=settings)
    directory = loaded.config.data_directory
    directory.mkdir()
    for name in (*loaded.config.prepared_files(), "train-00000.shard"):
        (directory / name).write_bytes(b"x")
    manifest.write_manifest(directory, {"settings": loaded.config.prepared_with()})
    return directory, loaded


@pytest.mark.parametrize("name", ["train.index.npy", "evaluation.index.npy", "model.safetensors"])
def test_labels_and_weights_that_changed_at_the_same_size_are_refused_before_a_run(full, name):
    directory, loaded = full
    preparation.check_data(loaded)
    (directory / name).write_bytes(b"y")
    with pytest.raises(UserError, match=f"{name}: content changed.*; run: ttt data prepare .* --source DIR$"):
        preparation.check_data(loaded)


def test_shards_are_not_read_before_a_run(full):
    directory, loaded = full
    (directory / "train-00000.shard").write_bytes(b"y")
    preparation.check_data(loaded)


def test_the_state_of_data_is_described_from_names_and_sizes(full):
    directory, loaded = full
    (directory / "train.index.npy").write_bytes(b"y")  # of the same size
    assert preparation.describe_data(loaded.config) == "prepared"
    settings = [f"data.directory={directory}", "data.corpus=other"]
    other = load_config("language_bert", "baseline", size="full", settings=settings)
    assert preparation.describe_data(other.config).startswith("do not fit (")
    (directory / "train-00000.shard").write_bytes(b"")
    state = preparation.describe_data(loaded.config)
    assert state.startswith("damaged (") and "train-00000.shard: 0 bytes, expected 1)" in state
    (directory / manifest.MANIFEST).unlink()
    state = preparation.describe_data(loaded.config)
    assert state.startswith(f"missing in {directory}; run: ttt data prepare language_bert --size full")


@pytest.mark.parametrize(
    ("settings", "content", "times_read", "code"),
    [(["data.corpus=other"], b"x", 0, 2), ([], b"xx", 0, 2), ([], b"y", 1, 2), ([], b"x", 1, 0)],
    ids=["other settings", "another size", "changed", "intact"],
)
def test_a_preparation_reads_only_what_fits_and_once(full, monkeypatch, settings, content, times_read, code):
    directory, _ = full
    (directory / "train-00000.shard").write_bytes(content)
    read, hash_file = [], manifest.hash_file
    monkeypatch.setattr(manifest, "hash_file", lambda path: read.append(path.name) or hash_file(path))
    options = ["--size", "full", "--set", f"data.directory={directory}", *settings]
    assert ttt_here("data", "prepare", "language_bert", *options).returncode == code
    assert read.count("model.safetensors") == times_read


def test_a_file_that_the_manifest_never_knew_is_missed(text):
    done = ttt_here("data", "verify", *text[1])
    (line,) = done.stdout.splitlines()
    assert done.returncode == 1 and "mini: intact, but lacks vocab.txt, fingerprint" in line
    (text[0] / "train.index.npy").write_bytes(b"y")
    damage, line = ttt_here("data", "verify", *text[1]).stdout.splitlines()
    assert "content changed" in damage and "mini: damaged, lacks vocab.txt, fingerprint" in line


def test_a_source_is_refused_at_size_mini_though_the_data_are_there():
    assert ttt_here("data", "prepare", "bert", "--size", "mini").returncode == 0
    line = one_line(ttt_here("data", "prepare", "bert", "--size", "mini", "--source", "nowhere"))
    assert "--source nowhere: size mini makes its own data" in line


def test_data_without_starting_weights_are_whole_and_are_not_replaced(tmp_path):
    place, random = [f"data.directory={tmp_path}"], ["model.start=random"]
    config = load_config("language_bert", "baseline", size="full", settings=[*place, *random]).config
    for name in config.prepared_files():
        (tmp_path / name).write_bytes(b"x")
    manifest.write_manifest(tmp_path, {"settings": config.prepared_with()})
    options = ("language_bert", "--size", "full", "--set", *place)
    assert ttt_here("data", "verify", *options, *random).returncode == 0
    (line,) = ttt_here("data", "verify", *options).stdout.splitlines()
    assert "full: intact, but lacks model.safetensors, fingerprint" in line
    line = one_line(ttt_here("data", "prepare", *options, "--source", tmp_path))
    assert "model.safetensors: missing; these data are whole and are not replaced: choose" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("files", files) for files in ([], {"a": 3}, {"a": {"bytes": "5", "sha256": ""}})),
        ("files", {"a": {"sha256": ""}}),
        *(("facts", facts) for facts in (3, {"settings": []}, None)),
        ("", '{"files": ' + "[" * 100_000),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_manifest_of_wrong_types_or_nested_without_end_is_refused_in_one_line(text, key, value):
    directory, options = text
    content = {"files": {}, "facts": {}} | {key: value}
    content["fingerprint"] = manifest.fingerprint(content["files"], content["facts"])
    (directory / manifest.MANIFEST).write_text(json.dumps(content) if key else value)
    for verb, advice in (
        ("verify", "remove the folder, then run: ttt data prepare "),
        ("prepare", "remove the folder"),
    ):
        line = one_line(ttt_here("data", verb, *options))
        assert f"manifest.json: not a data manifest ({key}" in line and f"; {advice}" in line


def test_old_data_that_cannot_be_removed_are_named(tmp_path, monkeypatch):
    for name in ("full", "finished"):
        (tmp_path / name).mkdir()

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(manifest.shutil, "rmtree", refuse)
    with pytest.raises(UserError, match=r"full: the old data cannot be removed \(Permission denied\)"):
        manifest.put_in_place(tmp_path / "finished", tmp_path / "full")
