"""Make the runs of logs again in a temporary folder, each with its code, seed and settings, and compare.

The code in this clone makes a run if its digest equals the log's. Otherwise the code of the log's commit
does, which is unpacked into the temporary folder.
"""

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import repository
from common.config.schema import prepare_hint
from common.data import manifest
from common.errors import EXIT_INTERRUPTED, UserError
from common.evidence.compare.replayed import (
    Replayed,
    compare,
    describe_processor,
    differing_versions,
    stated_processor,
    verdict_lines,
)
from common.evidence.log import Log, read_log
from common.evidence.paths import find_sets, label, result_name
from common.evidence.recipes import configuration_of
from common.evidence.records import counted, printable
from common.evidence.sealed import seal
from common.evidence.sealed.seal import BEACON, RUNS, SEAL
from common.files import check_writable, explain_os_error, temporary_folder, write_whole
from common.machine import hardware, system
from common.repository import DATA, FOLDER, IS_INSTALLED, ROOT, WORKSPACE
from common.run.supervision import supervise, temporary_environment

DRIVER = Path(__file__).with_name("driver.py")
COMMIT = re.compile(r"([0-9a-f]{40}) \((clean|modified)\)")
OTHERS = ("MKL_NUM_THREADS", "OMP_THREAD_LIMIT")  # may set another number of threads than OMP_NUM_THREADS
NEEDED = "common/run/run_sets.py"  # the driver calls it
NO_ROOM = "cannot write the files of the new run"
FREE_ROOM = "free space there, or set TMPDIR to another folder"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The facts to make a log's run again; `commit` is '' if the code in this clone made it."""

    log: Log
    configuration: dict[str, Any]
    seed: int
    ranks: int
    threads: int
    num_accelerators: int
    commit: str

    @property
    def origin(self) -> str:
        code = f"commit {self.commit[:7]}" if self.commit else "the code here"
        return f"{code}, seed {self.seed}, {counted(self.ranks, 'rank')}, {counted(self.threads, 'thread')}"


def read_recipe(log: Log, threads: int | None = None) -> Recipe:
    """Read from a log how to make its run again; `threads` replaces the log's number of threads.

    Raises UserError for a log that cannot be replayed on this machine.
    """
    if not log.is_readable:
        raise UserError(f"cannot be read: {log.problems[0]}", where=log.path)
    if not log.is_ours or log.first("run_start") is None:
        raise UserError("is no log of this suite, or its run ended before the clock started", where=log.path)
    if log.is_resumed:
        what = "the run was resumed from a checkpoint, which is gone"
        raise UserError(what, where=log.path, hint="replay a run that was not resumed")
    configuration = configuration_of(log.settings) or {}
    numbers = [log.value(key) for key in ("seed", "num_ranks", "num_threads", "num_accelerators")]
    is_known = configuration.get("benchmark") in repository.benchmarks()
    if not is_known or not all(type(number) is int and number >= 0 for number in numbers):
        raise UserError("does not state its configuration, seed, ranks and threads", where=log.path)
    seed, ranks, logged_threads, num_accelerators = (int(str(number)) for number in numbers)
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed", hint=repository.install_hint("train"))
    if num_accelerators > (num_here := hardware.count_gpus()):
        what = f"the run used {counted(num_accelerators, 'GPU')}, this machine has {num_here}"
        raise UserError(what, where=log.path, hint="replay it on a machine with as many GPUs")
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


def check_data(log: Log, configuration: dict[str, Any]) -> None:
    """Raise UserError where the prepared data are missing, damaged, or not those of the log."""
    benchmark, size = str(configuration.get("benchmark")), str(configuration.get("size"))
    named = configuration.get("data")
    named = str(named.get("directory")) if isinstance(named, dict) else f"data/{benchmark}/{size}"
    hint = prepare_hint(benchmark, size, str(configuration.get("configuration")), named)
    directory = repository.locate_data(named)
    content = manifest.read_manifest(directory, hint=hint)
    there, here = log.text("dataset_fingerprint"), str(content["fingerprint"])
    if there[:64] != here:
        what = f"the run read data with the fingerprint {there or 'unknown'}; these data have {here}"
        raise UserError(what, where=printable(named), hint="name the folder of its data with --data DIR")
    if damage := size == "mini" and manifest.list_damage(directory, content):
        raise UserError(damage[0], hint=hint)


def find_commit(log: Log) -> str:
    """Return the commit whose code made a log, '' for the code in this clone; UserError if it is not here."""
    stated, digest = log.header("commit"), log.header("code")
    state = repository.code_state()
    if digest and digest == state.digest:
        return ""
    match = COMMIT.match(stated)
    if IS_INSTALLED:
        what = f"this installation has other code than the run ({stated or digest})"
        hint = "replay it in a clone of this suite"
    elif match is None or (match[2] == "modified" and not digest):
        what = f"the code of the run is not known: commit {stated or 'not stated'}"
        hint = "replay a log that states a commit"
    elif state.commit == "unknown":
        what = f"commit {match[1]} made it, and this folder is no git clone of this suite"
        hint = "replay it in a clone"
    elif not has_commit(match[1]):
        what = f"commit {match[1]} made it, which this clone does not have"
        hint = f"type git fetch origin {match[1]}, or in a shallow clone git fetch --unshallow"
    elif not read_commit(match[1], "ls-tree", match[1], "--", NEEDED):
        what = f"commit {match[1]} made it, which is older than {NEEDED} and cannot be called"
        hint = "replay a result of a later commit"
    else:
        return match[1]
    raise UserError(what, where=log.path, hint=hint)


def has_commit(commit: str) -> bool:
    command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def read_commit(commit: str, *words: str) -> bytes:
    """Run a git command that reads a commit; UserError where it cannot, as in a partial clone."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        hint = "if this clone is partial, type git fetch --refetch --no-filter origin"
        raise UserError(f"cannot be read by git ({reason})", where=f"the files of commit {commit}", hint=hint)
    return done.stdout


def unpack_commit(commit: str, folder: Path) -> Path:
    """Unpack the files of a commit, without its results, and link the data beside them; returns `folder`."""
    archive = read_commit(commit, "archive", "--format=zip", "-0", commit, "--", ".", ":!results")
    # Python 3.11.0 to 3.11.3 lack the safe form of tarfile's `extractall`.
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        files.extractall(folder)
    (folder / "data").symlink_to(repository.data_folder())  # code that knows no TTT_DATA reads there
    return folder


@contextmanager
def make_again(recipe: Recipe) -> Iterator[Log]:
    """Make a run again and yield its log, whose file is removed afterwards.

    Raises KeyboardInterrupt when the run was interrupted, UserError when it could not be made.
    """
    with ExitStack() as stack:
        with explain_os_error(NO_ROOM, "temporary files", hint=FREE_ROOM):
            place = tempfile.gettempdir()
        with explain_os_error(NO_ROOM, place, hint=FREE_ROOM):
            folder = stack.enter_context(temporary_folder())
            code = unpack_commit(recipe.commit, folder / "code") if recipe.commit else ROOT
            names = filter(FOLDER.fullmatch, (recipe.log.system, recipe.log.benchmark))
            results = folder.joinpath("results", *names)
            order, fault = folder / "order.json", folder / "fault"
            facts = {
                "name": recipe.log.path,
                "code": recipe.log.header("code"),
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
        environment = temporary_environment(folder / "temporary") | {
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


def choose(paths: Sequence[Path], drawn_by: str | None) -> list[Path]:
    """Return the result files that `paths` name, or the one that `drawn_by` (beacon:VALUE) draws from a set.

    Raises UserError for a draw from a set that is not sealed, or of which no run has ended.
    """
    folders = find_sets(paths)
    files = [file for group in folders.values() for file in group]
    if drawn_by is None:
        return files
    value = drawn_by.removeprefix(BEACON)
    if value == drawn_by or not value:
        raise UserError(f"expected {BEACON}VALUE", where=f"--draw {drawn_by}")
    if not all(path.is_dir() for path in paths) or len(folders) > 1:
        raise UserError("expected the folder of one set to draw from", where=f"--draw {drawn_by}")
    folder = next(iter(folders))
    sealed = seal.read_sealed(folder)
    if sealed is None or sealed.seal is None:
        what = f"is not sealed: without {SEAL} no run can be drawn"
        raise UserError(what, where=label(folder), hint="leave out --draw to replay all its runs")
    if sealed.faults:
        fault = sealed.faults[0]
        where = f"{label(folder / fault.file)}:{fault.line}"
        raise UserError(fault.text, where=where, hint="nothing is drawn from a list that was changed")
    ended = {event.result for _, event in sealed.events if event.event == "ended" and event.head}
    if missing := sorted(ended - set(map(result_name, files))):
        raise UserError(f"{RUNS} names it, and it is not here", where=label(folder / missing[0]))
    if not ended:
        raise UserError("no run has ended", where=label(folder / RUNS))
    drawn = seal.draw(sealed.tip, value, sorted(ended))
    return [file for file in files if result_name(file) == drawn]


def replay_all(files: Sequence[Path], *, threads: int | None, keep: Path | None) -> list[Replayed]:
    """Replay results in turn, and print a verdict after each; with `keep`, keep the new results in a folder.

    Raises UserError for a log that cannot be replayed, before the first run.
    """
    recipes = [read_recipe(read_log(file), threads) for file in files]
    here = describe_processor(hardware.host(WORKSPACE))
    replayed = []
    for number, recipe in enumerate(recipes, 1):
        log = recipe.log
        kept = keep.joinpath(*filter(FOLDER.fullmatch, log.folders), Path(log.path).name) if keep else None
        print(f"{number} of {len(recipes)}: {log.path}, {recipe.origin}", flush=True)
        if others := differing_versions(log.header("versions"), system.versions_line()):
            print(f"  may not repeat to the last bit: {'; '.join(others)}", flush=True)
        if kept and kept.exists():
            again = read_log(kept)
        else:
            if kept:
                with explain_os_error("cannot keep the result", kept):
                    check_writable(kept.parent)
            with make_again(recipe) as again:
                if kept and again.file:
                    with explain_os_error("cannot keep the result", kept), write_whole(kept) as draft:
                        shutil.copyfile(again.file, draft)
        processors = stated_processor(log), stated_processor(again) or here
        replayed.append(compare(log, again, processors))
        print(*verdict_lines(replayed[-1]), sep="\n", flush=True)
    return replayed
