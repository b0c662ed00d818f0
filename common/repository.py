"""The state of the code: its commit, uncommitted changes, a digest of the files that a run can load.

Also the benchmarks and configurations in the repository, and its paths relative to the working folder.

In a clone, code, results and committed files lie in one folder. The code of a wheel lies among Python's
packages; results, systems and data then lie in the working folder of a command.
"""

import errno
import hashlib
import importlib
import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from common.errors import UserError, list_some, nearest

ROOT = Path(__file__).resolve().parents[1]  # of the code
BUILT = Path("common", "built")  # in a wheel alone, below ROOT: what setup.py keeps of the clone
STATE = BUILT / "state.json"
IS_INSTALLED = (ROOT / STATE).is_file()
WORKSPACE = Path.cwd() if IS_INSTALLED else ROOT  # of results/, systems/, data/ and report/
COMMITTED = ROOT / BUILT / "repository" if IS_INSTALLED else ROOT  # of committed files beside the packages
BESIDE = ("LICENSE", "pyproject.toml", "setup.py", "run_all.sh", ".ci/constraints.txt", ".ci/setup.sh")
FIGURES = "results/compiled"  # a wheel keeps these, too: predictions for GPUs read them
MODULE = ("-P", "-m") if IS_INSTALLED else ("-m",)  # Python's options: a person's folder may hold a `common`
DATA = "TTT_DATA"  # names the folder of prepared data; `--data` sets it
ELSEWHERE = re.compile(
    r"(?:(?<![\w./~<+])(?<![A-Za-z]>)|(?<=\W-[IL]))/(?!(?:dev|proc|sys|usr)(?![\w.-]))"
    r"(?:(?:[\w.~+=@-]+/)+(?=[\w.~+=@-])|(?<![^\s\"'=:>(,[IL]/)(?=[A-Za-z_]{3}))"
)  # an absolute path up to its last name; programs and devices are the same on every machine
SIZES = ("full", "mini")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_NAME, DIGEST_LENGTH = 64, 8  # characters of a folder's name, and of the digest of a cut one
FOLDER = re.compile(r"[A-Za-z0-9._+=-]{1,64}")  # of a system's results: a name, and what is changed
NOT_CONFIGURATIONS = ("mini", "reported", "first_steps")

PATTERNS = ("*.py", "*.yaml")
NO_RUN_LOADS = ("built", "commands", "doctor", "measure", "study")  # rooms of common/
NAMED = 5  # untracked files in a log's head
# of the packages in the extra `train` of pyproject.toml
TRAIN = ("torch", "torchvision", "transformers", "tokenizers", "safetensors", "google_crc32c", "sklearn")
OF_MACHINE = (  # errors that no code can avoid
    *(errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE),
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG),
)


class CodeState(NamedTuple):
    """`commit` as a log states it; `untracked` files that Python or a configuration could load.

    `digest` is over the files that a run can load, at any commit: a change to a page, a test or a report does
    not change it. `short` names the code in a folder: the last commit that changed those files; the digest
    where there are uncommitted changes, or no git.
    """

    commit: str
    untracked: tuple[str, ...]
    digest: str
    short: str


def code_state(root: Path = ROOT) -> CodeState:
    """Determine the state of the code now; each run is a process of its own, which loads the code anew."""
    files = sorted(loadable(root))
    digest = hashlib.sha256()
    for file in files:
        if not file.is_relative_to(root / "common") or file.relative_to(root).parts[1] not in NO_RUN_LOADS:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    code = digest.hexdigest()[:12]
    if (root / STATE).is_file():
        return CodeState(describe_installed(root, code), (), code, f"code={code[:7]}")
    unknown = CodeState("unknown", (), code, f"code={code[:7]}")
    try:
        tracked = set(git(root, "ls-files", "-z").split("\0"))
        if "common/repository.py" not in tracked:  # a copy inside of another repository
            return unknown
        untracked = tuple(
            name for name in (str(file.relative_to(root)) for file in files) if name not in tracked
        )
        outside = [":!results", ":!systems"]
        changed = git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *outside)
        is_clean = not changed and not untracked
        commit = f"{git(root, 'rev-parse', 'HEAD')} ({'clean' if is_clean else 'modified'})"
        folders = ["common", *benchmarks()]
        paths = [f":(glob){folder}/**/{pattern}" for folder in folders for pattern in PATTERNS]
        paths += [":(glob)*.py", ":!setup.py", *(f":!common/{room}" for room in NO_RUN_LOADS)]
        last = git(root, "log", "-1", "--format=%h", "--abbrev=7", "--", *paths)
    except (OSError, subprocess.CalledProcessError):  # not a checkout, or no git
        return unknown
    return CodeState(commit, untracked, code, f"commit={last}" if is_clean and last else f"code={code[:7]}")


def describe_installed(root: Path, digest: str) -> str:
    """Name the commit that a wheel was built from; `modified` where the files are no longer those."""
    built = read_built(root)
    commit = str(built["commit"])
    if built["code"] != digest:
        commit = commit.replace("(clean)", "(modified)")
    return f"{commit}, installed as version {built['version']}"


def read_built(root: Path = ROOT) -> dict[str, Any]:
    """Read what a wheel knows of its build: `version`, `commit`, `code`, and the names of its `files`."""
    state: dict[str, Any] = json.loads((root / STATE).read_text(encoding="utf-8"))
    return state


def version() -> str:
    if IS_INSTALLED:
        return str(read_built()["version"])
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def loadable(root: Path) -> Iterator[Path]:
    """Yield the files of the suite and its benchmarks that a command can load, tracked or not."""
    if not (root / STATE).is_file():  # the working folder of a run comes first on Python's path
        yield from (path for path in root.glob("*.py") if path.name != "setup.py")
    for folder in ("common", *benchmarks()):
        for pattern in PATTERNS:
            yield from (root / folder).rglob(pattern)


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    return code_state().commit


def head_lines() -> list[str]:
    state = code_state()
    named = [f"untracked: {list_some(state.untracked, NAMED)}"] if state.untracked else []
    return [f"commit: {state.commit}", *named, f"code: {state.digest}"]


def relative_path(path: Path) -> str:
    """Make a path relative to the working folder; one outside the workspace stays as it is."""
    forms = (Path(os.path.abspath(path)), path.resolve())  # data/ may be a link to another disk
    return os.path.relpath(path) if any(form.is_relative_to(WORKSPACE) for form in forms) else str(path)


def relative_paths_in(text: str) -> str:
    """Make the workspace's paths in a message relative to the working folder."""
    return text.replace(f"{WORKSPACE}/", "" if Path.cwd() == WORKSPACE else f"{relative_path(WORKSPACE)}/")


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this suite, which is on no index of packages."""
    return f"in a clone of this suite: pip install {'' if IS_INSTALLED else '-e '}'.[{extra}]'"


def explain_machine_fault(error: Exception) -> UserError | None:
    """Say what to do about an error of this machine: what it lacks (a package, memory, room), a disk, a path.

    Returns None for any other error.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in TRAIN:
        return UserError(f"{error.name} is not installed", hint=install_hint("train"))
    if isinstance(error, ImportError) and "shared object" in str(error):
        hint = "a limit of memory (ulimit -v), a folder mounted noexec, or a build for another machine"
        return UserError(f"a library cannot be loaded ({error})", hint=f"the usual causes: {hint}")
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return UserError("no folder can hold temporary files", where="TMPDIR", hint="name a writable one")
    if isinstance(error, OSError) and error.errno in OF_MACHINE:
        return UserError(str(error.strerror), where=str(error.filename or ""))
    return None


def data_folder() -> Path:
    """Return the folder of prepared data: what --data or TTT_DATA names, else data/ of the repository."""
    return Path(os.path.abspath(os.environ.get(DATA) or WORKSPACE / "data"))


def data_option() -> str:
    """Return ` --data DIR` for a command to type, nothing where prepared data lie in the repository."""
    return "" if data_folder() == WORKSPACE / "data" else f" --data {shlex.quote(str(data_folder()))}"


def set_data_folder(folder: Path | None) -> None:
    """Take prepared data from `folder`, else from TTT_DATA, here and in the processes that this one starts.

    Raises UserError for a file.
    """
    if named := str(folder or "") or os.environ.get(DATA):
        os.environ[DATA] = os.path.abspath(named)
        refuse_file(named, DATA if folder is None else "--data")


def refuse_file(named: str | Path, option: str) -> None:
    """Raise UserError for a file where an option or variable names a folder, which need not be there yet."""
    if os.path.exists(named) and not os.path.isdir(named):
        raise UserError("is not a folder", where=f"{option} {named}")


def locate_data(directory: str) -> Path:
    """Return the folder that `data.directory` names: `data/...` is in the folder of prepared data.

    Another relative path begins in the repository.
    """
    first, *others = (*Path(directory).parts, "")
    return data_folder().joinpath(*others) if first == "data" else WORKSPACE / directory


def stated_folders() -> tuple[tuple[Path, str], ...]:
    """Pair each folder of this machine with its name in logs."""
    return (data_folder(), "data"), (ROOT, ""), (WORKSPACE, "")


def name_data(directory: str) -> str:
    """Return `data.directory` as logs state it, without folders of this machine.

    A folder elsewhere becomes data/NAME, and is found again with `--data` and its parent.
    """
    path = Path(os.path.normpath(locate_data(directory)))
    for folder, name in stated_folders():
        if path.is_relative_to(folder):
            return (name / path.relative_to(folder)).as_posix()
    return f"data/{path.name}"


def hide_folders(text: str) -> str:
    """Write the paths in a text as logs state them: from the repository, as data/... or as .../NAME."""
    for folder, name in stated_folders():
        begin = rf"(?<![\w.]){re.escape(str(folder))}"
        text = re.sub(rf"{begin}/(?=[\w.~])", f"{name}/".lstrip("/"), text)
        text = re.sub(rf"{begin}(?![\w.-])", name or ".", text)
    return ELSEWHERE.sub(".../", text)


def systems_beside(results: Path) -> Path:
    """Return the folder of system descriptions that belongs to a folder of results: beside it, or inside."""
    results = Path(os.path.abspath(results))
    return (results.parent if results.name == "results" else results) / "systems"


def benchmarks() -> list[str]:
    """List the benchmarks: the folders that hold a benchmark.py and a baseline.yaml."""
    return sorted(
        path.parent.name for path in ROOT.glob("*/benchmark.py") if (path.parent / "baseline.yaml").is_file()
    )


def configurations(benchmark: str) -> list[str]:
    """List the configurations of a benchmark: its YAML files without sizes and reported numbers."""
    return sorted(
        path.stem for path in (ROOT / benchmark).glob("*.yaml") if path.stem not in NOT_CONFIGURATIONS
    )


def read_title(benchmark: str, file: str) -> str:
    """Return the title of a file: its first line, a comment or a docstring of one line."""
    try:
        with (ROOT / benchmark / file).open(encoding="utf-8") as stream:
            return stream.readline().strip('#"\n ').removesuffix(".")
    except FileNotFoundError:
        raise lacks(benchmark, file) from None


def lacks(benchmark: str, file: str) -> UserError:
    hint = "CONTRIBUTING.md lists the files of a benchmark"
    return UserError("no such file", where=f"{benchmark}/{file}", hint=hint)


def benchmark_module(benchmark: str, part: str = "benchmark") -> ModuleType:
    """Import a file of a benchmark. Raises UserError with the nearest name."""
    if benchmark not in benchmarks():
        raise UserError(f"unknown benchmark '{benchmark}'", hint=nearest(benchmark, benchmarks()))
    try:
        return importlib.import_module(f"{benchmark}.{part}")
    except ModuleNotFoundError as error:
        if not f"{benchmark}.{part}.".startswith(f"{error.name}."):  # what the file imports
            raise
        raise lacks(benchmark, f"{part.replace('.', '/')}.py") from None


def config_class(benchmark: str) -> Any:
    """Return the class of a benchmark's configurations, without importing torch."""
    return benchmark_module(benchmark, "config").Config


def mlperf_name(benchmark: str) -> str:
    """Return MLPerf's name of a benchmark, which names the folders of its results."""
    return str(benchmark_module(benchmark).Benchmark.names.mlperf)


def build_probes(config: Any) -> Any:
    """Return the `Probes` of a configuration on one device. Imports torch."""
    benchmark = benchmark_module(config.benchmark).Benchmark(config, seed=0)
    return benchmark_module(config.benchmark, "probes").Probes(benchmark)


def available_methods(benchmark: str) -> dict[str, str]:
    """Map the name to the module of each method that a benchmark can use: its own and the common ones."""
    modules: dict[str, str] = {}
    for package in ("common", benchmark):
        for path in sorted((ROOT / package / "methods").glob("[a-z]*.py")):
            if path.stem in modules:
                what = f"common/methods/{path.name} has this name, too: rename one of them"
                raise UserError(what, where=f"{package}/methods/{path.name}")
            modules[path.stem] = f"{package}.methods.{path.stem}"
    return modules


def module_file(module: str) -> str:
    """The file of a module of this project, below ROOT."""
    return f"{module.replace('.', '/')}.py"


def shorten_name(name: str, most: int = MAX_NAME, *, whole: str = "") -> str:
    """Cut a name to `most` characters; it then ends with a digest of `whole`, or of the whole name."""
    if len(name) <= most:
        return name
    return f"{name[: most - DIGEST_LENGTH - 1]}-{digest_text(whole or name)}"


def digest_text(text: str, length: int = DIGEST_LENGTH) -> str:
    """Return the first hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]
