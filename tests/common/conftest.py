"""A machine without a record of its speeds, disks, and `ttt` with a fault while it runs."""

import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.cli import main
from common.machine import record
from tests.runs import END_S, HANG_S, open_place


@pytest.fixture
def no_record(monkeypatch, tmp_path):
    """A machine without a record of its speeds; returns the folder of the record."""
    folder = tmp_path / "machine"
    monkeypatch.setattr(record, "FOLDER", folder)
    return folder


@pytest.fixture
def usual_threads(monkeypatch):
    """Unset OMP_NUM_THREADS=1, with which the tests run."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def mount_disk(tmp_path):
    """Return a function that mounts a disk of a size, such as `1m`, and returns its folder."""
    folder = tmp_path / "disk"

    def mount(size):
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
        if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def place(tmp_path):
    with open_place(tmp_path) as opened:
        yield opened


@pytest.fixture
def ttt(place, monkeypatch, capfd):
    """Return `ttt` with its launcher in this process, and a fault in a thread `meanwhile`.

    The runs are processes of their own. Afterwards nothing may be left of them.
    """
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(place.temporary))

    def run(arguments, meanwhile=lambda: None, within_s=HANG_S):
        monkeypatch.setattr(sys, "argv", ["ttt", *arguments])
        capfd.readouterr()
        end = threading.Timer(within_s, lambda: [each.kill() for each in place.processes()])
        end.start()
        with ThreadPoolExecutor(1) as pool:
            place.is_over.clear()
            fault = pool.submit(meanwhile)
            try:
                code = main()
            finally:
                place.is_over.set()
                end.cancel()
            ended = time.monotonic()
            met = fault.result()
        assert met is None or ended - met < END_S
        captured = capfd.readouterr()
        place.check_nothing_left()
        return subprocess.CompletedProcess(arguments, code, captured.out, captured.err)

    return run
