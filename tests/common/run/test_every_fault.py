"""The n-th write, fsync, rename or allocation of a run fails: one line says so, and nothing is lost or torn.

`EVERY_FAULT=1/1 tests/run.sh -m slow -s tests/common/run/test_every_fault.py` tries all of some 1,200 n, in
hours, `EVERY_FAULT=3/12` the third of twelve parts; else a few are tried. Where torch's libraries die of a
failed allocation, the line names the signal.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from unittest.mock import patch

import numpy as np
import pytest
from safetensors import safe_open

from common.evidence.log import read_log
from common.evidence.sealed.seal import RUNS, read_sealed
from common.repository import ROOT
from common.training.checkpoint_header import read_facts
from tests.command import run, ttt_here
from tests.runs import HANG_S

SOURCE = ROOT / "tests/common/run/faulty_system.c"
SETTINGS = (
    *("target=0.001", "max_duration=4ba", "evaluate_every=2ba", "evaluate_from=2ba", "schedule.warmup=1ba"),
    *("checkpoint_every=1ba", "global_batch_size=4", "evaluation_batch_size=96"),
)
FAULTS = {  # kind, in the order of faulty_system.c -> errors, and whether all later calls fail, too
    "write": ((errno.ENOSPC, True), (errno.EIO, False)),
    "fsync": ((errno.EIO, False),),
    "rename": ((errno.EIO, False),),
    "allocate": ((errno.ENOMEM, False),),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library that lets calls fail."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    path = tmp_path_factory.mktemp("library") / "faulty_system.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, SOURCE, "-ldl"], check=True)
    return path


class Machine:
    """A folder with an earlier result, in which runs meet a fault."""

    def __init__(self, folder, library):
        self.folder, self.library, self.disk = folder, library, folder / "disk"
        (folder / "temporary").mkdir(parents=True)
        self.seed = 0  # of the last run: a set refuses a seed that it has had
        self.disk.mkdir()
        assert self.run("allocate", 0).returncode == 0  # no call has the number 0: no fault
        assert self.run("none", 0).returncode == 0
        counted = np.fromfile(folder / "count", np.int64)
        self.counts = dict(zip(FAULTS, counted.tolist(), strict=True))
        assert all(self.counts.values()), self.counts  # a kind that is never called is never tried
        self.before = {path: path.read_bytes() for path in self.disk.rglob("*") if path.is_file()}

    def run(self, kind, number, error=0, lasts=False):
        """Run `ttt` with a fault of call `number`; the file `told` then exists if that call was reached.

        Only a rank's allocations fail: its launcher is this process then, which saves seconds of 1,100 runs.
        """
        (self.folder / "count").write_bytes(bytes(8 * len(FAULTS)))
        self.told = self.folder / "told"
        self.told.unlink(missing_ok=True)
        environment = {
            "LD_PRELOAD": str(self.library),
            "FAULT_KIND": kind,
            "FAULT_AT": str(number),
            "FAULT_ERRNO": str(error),
            "FAULT_LASTS": str(int(lasts)),
            "FAULT_COUNT": str(self.folder / "count"),
            "FAULT_BELOW": str(self.disk),
            "FAULT_TOLD": str(self.told),
            "TMPDIR": str(self.folder / "temporary"),
            "PYTHONPATH": str(ROOT),
        }
        where = ["--results", self.disk / "results", "--systems", self.disk / "systems"]
        self.seed += 1
        command = ["run", "language_bert", "optimized", "--size", "mini", "--seed", str(self.seed), *where]
        command += ["--set", *SETTINGS]
        if kind != "allocate":
            command = [sys.executable, "-m", "common.cli", *command]
            return run(*command, env=os.environ | environment, timeout=HANG_S)
        with patch.dict(os.environ, environment):
            return run_here(*command)

    def check(self, done, lasts=False):
        """Assert that a fault left one line and nothing torn, and that nothing earlier has changed.

        One that `lasts` lets no log be closed, as a line says.
        """
        told = f"{done.stdout}{done.stderr}"
        assert self.told.exists(), told
        assert done.returncode in (0, 1, 2), told
        assert "Traceback" not in told, told
        for path, content in self.before.items():
            if path.name == RUNS:  # grows by whole lines
                assert path.read_bytes().startswith(content) and not read_sealed(path.parent).faults
                path.write_bytes(content)
            assert path.read_bytes() == content, path
        new = [path for path in self.disk.rglob("*") if path.is_file() and path not in self.before]
        (*_, converged) = [read_log(path).is_converged for path in new if path.suffix == ".txt"] or [False]
        lines = re.findall(r"^(?:error|  aborted|  warning): .*", done.stderr, re.MULTILINE)
        lines = [line for line in lines if "disturbed in" not in line]  # by other programs
        if converged:
            assert len(lines) == 1 or "no checkpoint before step" in done.stdout, told
        else:
            unwritten = ("could not be closed", "is not in the list of runs")
            assert done.returncode and len(lines) == 1 + lasts * sum(text in told for text in unwritten), told
        for path in new:
            assert re.fullmatch(r"result_\d+\.(txt|safetensors)", path.name), path
            if path.suffix == ".txt":
                log = read_log(path)
                assert not log.problems and path.read_bytes().endswith(b"\n")
                assert log.first("run_start") and (log.last("run_stop") or lasts), path.read_text()[-500:]
            else:
                assert read_facts(path).step >= 1
                with safe_open(path, framework="pt") as file:
                    assert all(file.get_tensor(name) is not None for name in file.keys())  # noqa: SIM118
        assert not list((self.folder / "temporary").glob("ttt-*"))
        for path in new:
            path.unlink()


def run_here(*command):
    """Run `ttt` in this process, and keep what its ranks print, too."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        kept = {number: os.dup(number) for number in (1, 2)}
        try:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            done = ttt_here(*command)
        finally:
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
        for file, attribute in ((out, "stdout"), (err, "stderr")):
            file.seek(0)
            setattr(done, attribute, getattr(done, attribute) + file.read())
    return done


def chosen(total, num_errors):
    """Return the numbers of the calls that are to fail: one for each error, or a part of all."""
    if "EVERY_FAULT" in os.environ:
        part, num_parts = map(int, os.environ["EVERY_FAULT"].split("/"))
        return range(part, total + 1, num_parts)
    num_tried = min(num_errors, total)
    return [1 + (2 * place + 1) * total // (2 * num_tried) for place in range(num_tried)]


@pytest.fixture(scope="module")
def machine(library, prepared_data, tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"), library)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_the_nth_call_of_a_kind_fails_and_nothing_is_lost(machine, kind):
    total = machine.counts[kind]
    for place, number in enumerate(chosen(total, len(FAULTS[kind]))):
        error, lasts = FAULTS[kind][place % len(FAULTS[kind])]
        print(f"{kind} {number} of {total}: {os.strerror(error)}{', from then on' if lasts else ''}")
        machine.check(machine.run(kind, number, error, lasts), lasts)
