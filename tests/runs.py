"""Runs that train until a test disturbs them, and checks that they leave nothing behind."""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from common.evidence.sealed.chain import read_chain
from common.evidence.sealed.seal import RUNS, SEAL
from common.repository import benchmark_module, hide_folders
from common.training.load import load_config
from tests.command import start

END_S = 15  # in which a fault ends everything
HANG_S = 120  # after which a test ends what hangs
SMALL = (  # runs that train for ever
    "target=0.99",
    "max_duration=90000ba",
    "evaluate_every=30ba",
    "evaluate_from=30ba",
    "schedule.warmup=5ba",
)
SHORT = (  # a run that reaches its target
    "target=0.01",
    "max_duration=40ba",
    "evaluate_every=20ba",
    "evaluate_from=20ba",
    "schedule.warmup=5ba",
)
BERT = ("language_bert", "optimized", *SMALL, "global_batch_size=4", "evaluation_batch_size=16")
SMALL_IMAGES = ("data.train_crop_px=32", "data.evaluation_resize_px=32", "data.evaluation_crop_px=32")
RESNET = ("image_classification", "baseline", *SMALL, "global_batch_size=4", *SMALL_IMAGES)
WHEN = "(after step [0-9]+|before the first step)"  # a run failed


def until(condition, seconds=HANG_S):
    """Wait for something that is true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    return found


def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Place:
    """Where a test's runs leave their results, and how their processes are found: by a mark."""

    def __init__(self, folder):
        self.folder, self.mark = folder, secrets.token_hex(8)
        self.results_folder, self.is_over = folder / "results", threading.Event()
        self.expected_files = set()  # beside the results
        self.kernels = Path(tempfile.gettempdir(), f"ttt-kernels-{os.getuid()}")
        self.temporary = Path(tempfile.mkdtemp(prefix="ttt-"))  # short, for the sockets of worker processes

    def arguments(self, settings, *more):
        benchmark, configuration, *values = settings
        sets = [part for value in values for part in ("--set", value)]
        where = ["--results", self.results_folder, "--systems", self.folder / "systems"]
        return [
            str(each) for each in ("run", benchmark, configuration, "--size", "mini", *where, *sets, *more)
        ]

    @property
    def environment(self):
        return {
            "TTT_TEST": self.mark,
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self.kernels),  # torch makes it when it is imported, and keeps it
        }

    def start(self, *arguments, shell='exec "$@"', **environment):
        """Start a launcher as a process of its own, by a line of a shell."""
        command = ["sh", "-c", shell, "sh", sys.executable, "-m", "common.cli", *arguments]
        return start(*command, env=os.environ | self.environment | environment, start_new_session=True)

    def processes(self, module=""):
        """Return the living processes of the runs, orphans too, that execute a module."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                is_ours = each.environ().get("TTT_TEST") == self.mark and each.pid != os.getpid()
                if is_ours and module in " ".join(each.cmdline()):
                    found.append(each)
        return found

    def rank(self, number=0):
        """Return the process of a rank."""
        ranks = self.processes("common.run.worker")
        return next(each for each in ranks if each.environ().get("RANK", "0") == str(number))

    def results(self):
        found = self.results_folder.glob("*/*/result_*.txt")  # rglob fails where a draft vanishes meanwhile
        return sorted(found, key=lambda path: int(path.stem.split("_")[1]))

    def until_logged(self, text, index=0, times=1):
        """Wait until a text stands so often in the log of a result; returns the log's path."""

        def find_log():
            is_over = self.is_over.is_set()
            paths = [path for path in self.results() if path.stem == f"result_{index}"]
            is_there = paths and paths[0].read_text().count(text) >= times
            assert is_there or not is_over, "the command ended before the fault"
            return is_there and paths[0]

        return until(find_log)

    def check_nothing_left(self):
        """Assert that no process, temporary file or lock has stayed, and that each log is a whole chain."""
        for path in self.results():
            assert read_chain(path.read_bytes()).breaks == (), path
        until(lambda: not self.processes(), END_S)
        left = list(self.temporary.rglob("*"))
        assert left == [], left
        if self.results_folder.is_dir():
            names = {path.name for path in self.results_folder.rglob("*") if path.is_file()}
            names -= {SEAL, RUNS} | self.expected_files
            assert all(re.fullmatch(r"result_[0-9]+\.txt", name) for name in names), names


@contextlib.contextmanager
def open_place(folder):
    """Open a place in a folder; processes that a failed test has left end with the block."""
    place = Place(folder)
    try:
        yield place
    finally:
        for process in place.processes():
            process.kill()
        shutil.rmtree(place.temporary)


def records(path):
    """Return the records of a log."""
    lines = path.read_text().splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines if line.startswith(":::MLLOG ")]


def reason_of_abort(path):
    """Return the reason in the last record of the log of a run that failed."""
    last = records(path)[-1]
    assert last["key"] == "run_stop" and last["metadata"]["status"] == "aborted"
    return last["metadata"]["reason"]


def failure_in(done, path, code=1):
    """Assert that one line says who failed, when and why, as the log does without folders; returns that."""
    assert done.returncode == code
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("  aborted: ")]
    why = reason_of_abort(path)
    cause, _, kept = line.removeprefix("  aborted: ").partition("; the log is kept: ")
    assert (hide_folders(cause), kept) == (why, os.path.relpath(path))
    return why


def make_benchmark(name, configuration, *settings, size="mini"):
    """A benchmark of a configuration with these settings, on one rank."""
    config = load_config(name, configuration, size=size, settings=list(settings)).config
    return benchmark_module(name).Benchmark(config, seed=0)
