"""Makes the run of a log again, in a temporary folder: with its code, seed, configuration, ranks and threads.

The code is that of this clone where its digest is the one that the log states, else that of the log's commit,
unpacked beside the run.
"""

import importlib.util
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import repository
from common.config.schema import data_command
from common.data import manifest
from common.errors import EXIT_INTERRUPTED, UserError
from common.evidence.log import Log, read_log
from common.evidence.recipes import configuration_of
from common.evidence.records import printable
from common.machine.hardware import count_gpus
from common.repository import DATA, FOLDER, IS_INSTALLED, ROOT, WORKSPACE
from common.run.supervision import supervise, temporary_environment

DRIVER = Path(__file__).with_name("driver.py")
COMMIT = re.compile(r"([0-9a-f]{40}) \((clean|modified)\)")
OTHERS = ("MKL_NUM_THREADS", "OMP_THREAD_LIMIT")  # may set another number of threads than OMP_NUM_THREADS
NEEDED = "common/run/run_sets.py"  # in the code that the driver can call


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of a log that make its run again; `commit` is '' where the code of this clone is its own."""

    log: Log
    configuration: dict[str, Any]
    seed: int
    ranks: int
    threads: int
    num_accelerators: int
    commit: str

    @property
    def code(self) -> str:
        return self.log.header("code")

    @property
    def origin(self) -> str:
        """Say in words what makes the run again."""
        code = f"commit {self.commit[:7]}" if self.commit else "the code here"
        return f"{code}, seed {self.seed}, {self.ranks} rank(s), {self.threads} thread(s)"


def read_recipe(log: Log, threads: int | None = None) -> Recipe:
    """Read what makes a run again, with another number of `threads` if one is given.

    Raises UserError for a log that cannot be replayed on this machine, before anything is trained.
    """
    if not log.is_ours or log.first("run_start") is None:
        raise UserError("is no log of a run of this suite whose clock was started", where=log.path)
    if log.is_resumed:
        what = "the run went on from a checkpoint, which is gone"
        raise UserError(what, where=log.path, hint="replay a run that was made in one piece")
    configuration = configuration_of(log.settings)
    numbers = [log.value(key) for key in ("seed", "num_ranks", "num_threads", "num_accelerators")]
    if configuration is None or not all(type(number) is int and number >= 0 for number in numbers):
        raise UserError("does not state its configuration, seed, ranks and threads", where=log.path)
    seed, ranks, logged_threads, num_accelerators = (int(str(number)) for number in numbers)
    check_torch()
    check_gpus(log, num_accelerators)
    check_data(log, configuration)
    return Recipe(
        log=log,
        configuration=configuration,
        seed=seed,
        ranks=ranks,
        threads=threads or max(1, logged_threads),
        num_accelerators=num_accelerators,
        commit=find_commit(log),
    )


def check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed", hint=repository.install_hint("train"))


def check_gpus(log: Log, num_accelerators: int) -> None:
    if num_accelerators > count_gpus():
        what = f"the run took {num_accelerators} GPU(s), here are {count_gpus()}"
        raise UserError(what, where=log.path, hint="replay it on a machine that has them")


def check_data(log: Log, configuration: dict[str, Any]) -> None:
    """Raise UserError where the prepared data are missing, damaged, or not those of the log."""
    benchmark, size = str(configuration.get("benchmark")), str(configuration.get("size"))
    named = configuration.get("data")
    named = str(named.get("directory")) if isinstance(named, dict) else f"data/{benchmark}/{size}"
    command = data_command("prepare", benchmark, size, str(configuration.get("configuration")), named)
    directory = repository.locate_data(named)
    content = manifest.read_manifest(directory, hint=f"run: {command}")
    there, here = log.text("dataset_fingerprint"), str(content["fingerprint"])
    if there[:64] != here:
        what = f"the run read data with the fingerprint {there or 'unknown'}, here is {here}"
        raise UserError(what, where=printable(named), hint="name the folder of its data with --data DIR")
    if damage := size == "mini" and manifest.list_damage(directory, content):
        raise UserError(damage[0], hint=f"run: {command}")


def find_commit(log: Log) -> str:
    """Return the commit whose code made a log; '' for the code that is here. Raises UserError without any."""
    stated, digest = log.header("commit"), log.header("code")
    state = repository.code_state()
    if digest and digest == state.digest:
        return ""
    if IS_INSTALLED:
        what = f"other code made it ({stated or digest}) than this installation is"
        raise UserError(what, where=log.path, hint="replay it in a clone of this suite")
    match = COMMIT.match(stated)
    if match is None or (match[2] == "modified" and not digest):
        what = f"the code that made it is not known: commit {stated or 'not stated'}"
        raise UserError(what, where=log.path, hint="replay a log that states a commit")
    if state.commit == "unknown":
        what = f"commit {match[1]} made it, and here is no git repository of this suite"
        raise UserError(what, where=log.path, hint="replay it in a clone")
    if not has_object(f"{match[1]}^{{commit}}"):
        what, hint = (
            "which this clone does not have",
            f"git fetch origin {match[1]}, or git fetch --unshallow",
        )
        raise UserError(f"commit {match[1]} made it, {what}", where=log.path, hint=hint)
    if not has_object(f"{match[1]}:{NEEDED}"):
        what = f"commit {match[1]} made it, which is older than {NEEDED} and cannot be called"
        raise UserError(what, where=log.path, hint="replay a result of a later commit")
    return match[1]


def has_object(name: str) -> bool:
    """True if git knows a commit, or a file in one."""
    try:
        repository.git(ROOT, "cat-file", "-e", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def unpack_commit(commit: str, folder: Path) -> Path:
    """Unpack the files of a commit, without its results, beside links to the data; returns their folder."""
    command = ["git", "-C", str(ROOT), "archive", commit, "--", ".", ":!results"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    (folder / "data").symlink_to(repository.data_folder())  # code that knows no TTT_DATA reads there
    return folder


@contextmanager
def remade(recipe: Recipe) -> Iterator[Log]:
    """Make a run again and yield its log, which is gone afterwards.

    Raises KeyboardInterrupt when the run was interrupted, UserError when it could not be made.
    """
    with TemporaryDirectory(prefix="ttt-replay-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        code = unpack_commit(recipe.commit, folder / "code") if recipe.commit else ROOT
        place = [name for name in (recipe.log.system, recipe.log.benchmark) if FOLDER.fullmatch(name)]
        results = folder.joinpath("results", *place)
        order, fault = folder / "order.json", folder / "fault"
        facts = {
            "name": recipe.log.path,
            "code": recipe.code,
            "configuration": recipe.configuration,
            "seed": recipe.seed,
            "ranks": recipe.ranks,
            "directory": str(results),
            "fault": str(fault),
        }
        order.write_text(json.dumps(facts), encoding="utf-8")
        (folder / "temporary").mkdir()
        for name in OTHERS:
            os.environ.pop(name, None)
        environment = temporary_environment(str(folder / "temporary")) | {
            "OMP_NUM_THREADS": str(recipe.threads),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH")))),
            DATA: str(repository.data_folder()),
        }
        if not recipe.num_accelerators:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        work = code if recipe.commit else WORKSPACE
        ended = supervise(["-P", str(DRIVER), str(order)], [environment], folder=work).code
        if ended == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        result = results / "result_0.txt"
        if fault.exists() or not result.exists():
            what = fault.read_text(encoding="utf-8") if fault.exists() else "no run was made; see above"
            raise UserError(what, where=recipe.log.path)
        yield read_log(result)
