"""Checks of the host: full disks, little shared memory and few open files, made real by mount and ulimit."""

import json
import os
import sys

import pytest

from common.errors import UserError
from common.machine import host
from common.machine.line import FAULT, OK
from common.machine.preflight import preflight
from common.training.load import load_config
from tests.command import TTT, run
from tests.runs import SHORT


def on_a_small_disk(folder, script, *arguments):
    """Run a shell script where `folder` is a disk of 2 MiB, which ends with it."""
    if run("unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=2m", "none", folder).returncode:
        pytest.skip("this system mounts nothing for a user")
    mount = f'mount -t tmpfs -o size=2m none "{folder}" && {script}'
    return run("unshare", "-rm", "sh", "-c", mount, "sh", *arguments)


@pytest.mark.slow
def test_a_run_is_refused_on_a_full_disk_and_forced_says_so_in_its_log(tmp_path, prepared_data):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    sets = [f"--set={setting}" for setting in SHORT]
    where = ["--results", disk / "results", "--systems", tmp_path / "systems"]
    command = [TTT, "run", "language_bert", "optimized", "--size", "mini", *where, *sets]
    done = on_a_small_disk(disk, '"$@"; code=$?; ls -R . > /dev/null; exit $code', *command)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: room for results: 2.0 MiB free at ") and line.endswith("with --force")
    assert not (tmp_path / "systems").exists()
    keep = f'"$@"; code=$?; cp -r "{disk}" "{kept}"; exit $code'
    done = on_a_small_disk(disk, keep, *command, "--force")
    assert done.returncode == 0, done.stderr
    (path,) = kept.rglob("result_0.txt")
    text = path.read_text()
    assert "\n# preflight: fault, forced: room for results: 2.0 MiB free" in text
    assert '"status": "success"' in text
    audit = run(TTT, "check", path)
    assert audit.returncode == 0, audit.stdout


def test_an_unwritable_folder_is_a_fault(tmp_path):
    assert host.space("results", tmp_path / "not/there/yet").state == OK
    file = tmp_path / "file"
    file.touch()
    line = host.space("results", file / "results")
    assert line.state == FAULT and "cannot be written" in line.found
    assert line.advice == "choose another folder for results"
    config = load_config("language_bert", "optimized", size="mini", settings=[]).config
    with pytest.raises(UserError, match=r"room for results: .*\(Not a directory\)") as told:
        preflight(config, file / "results", is_forced=False)
    assert "--force" not in str(told.value)
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_without_room_and_little_shared_memory_are_told(tmp_path):
    code = f"""
import pathlib
from common.commands.data import prepare
from common.errors import UserError
from common.machine import host
place = pathlib.Path({str(tmp_path)!r})
print(host.shared_memory("full", place).state, host.shared_memory("mini", place).state)
print(host.shared_memory("mini", place, is_needed=True).state)
(place / "filler").write_bytes(bytes(3 * 2**19))
print(host.space("results", place))
"""
    done = on_a_small_disk(tmp_path, '"$@"', sys.executable, "-c", code)
    full_and_mini, needed, space = done.stdout.splitlines()
    assert (full_and_mini, needed) == ("fault warning", "fault") and "No space left on device" in space
    assert host.shared_memory("full", tmp_path / "none").state == OK


@pytest.mark.slow
def test_few_open_files_are_a_fault_with_what_to_type():
    doctor = ("doctor", "--size", "mini", "--quick", "--json")
    limited = run("sh", "-c", 'ulimit -n 100; exec "$@"', "sh", TTT, *doctor)
    assert limited.returncode == 1, limited.stderr
    found = json.loads(limited.stdout)
    (line,) = [line for line in found["lines"] if line["state"] == FAULT]
    assert line["check"] == "open files" and line["values"]["limit"] == 100
    assert line["advice"] == "ulimit -n 1024, for which the hard limit has to be raised"
    assert found["faults"] == 1
