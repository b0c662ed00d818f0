"""The wheel, in an environment of its own and from an empty folder: nothing of the clone is at hand."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from types import SimpleNamespace

import pytest

from common.repository import BESIDE, FIGURES, ROOT, benchmarks
from tests.command import run
from tests.committed import committed_results
from tests.common.evidence.conftest import good_set, write_set
from tests.common.evidence.submission import packages
from tests.runs import SHORT
from tests.verbs import READERS, run_all

pytestmark = pytest.mark.on_demand
MINI = ("--size", "mini")
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]


def git(folder, *arguments):
    done = subprocess.run([*GIT, "-C", folder, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = run(*command, "--wheel-dir", folder, clone, cwd=folder, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def environment(home):
    """Return the variables of a user of this machine, without a path to a clone."""
    names = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TTT_DATA")}
    return names | {"HOME": str(home), "XDG_STATE_HOME": str(home), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory):
    """Install the wheel in another repository, beside the packages that are here; return an empty folder.

    The folder holds a `common` of the person's own.
    """
    root = tmp_path_factory.mktemp("elsewhere")
    git(root, "init", "-q")
    git(root, "commit", "-q", "--allow-empty", "-m", "another repository")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    python = root / "venv/bin/python"
    packages_here = next((root / "venv/lib").glob("python*/site-packages"))
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages_here / "others.pth").write_text("\n".join(paths))  # without their own .pth files
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-warn-script-location"]
    pip = (sys.executable, "-m", "pip", "--python", python)
    done = run(*pip, *install, wheel, cwd=root, env=environment(root))
    assert done.returncode == 0, done.stderr
    folder = root / "work"
    folder.mkdir()
    (folder / "common.py").write_text("raise RuntimeError('a file of the person is imported')\n")
    options = {"cwd": folder, "env": environment(root)}

    def ttt(*words):
        return run(root / "venv/bin/ttt", *words, **options)

    prepared = ttt("data", "prepare", "bert", *MINI)
    assert prepared.returncode == 0, prepared.stderr
    return SimpleNamespace(
        folder=folder, ttt=ttt, options=options, python=(python, "-P"), packages=packages_here
    )


def test_the_wheel_holds_what_git_does_and_the_files_that_commands_read(wheel, clone):
    packages = ("common", *benchmarks())
    tracked = set(git(clone, "ls-files", *packages).splitlines())
    figures = {path.relative_to(clone).as_posix() for path in (clone / FIGURES).rglob("*.json")}
    kept = {f"common/built/repository/{name}" for name in (*BESIDE, *figures)} | {"common/built/state.json"}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        state = json.loads(archive.read("common/built/state.json"))
    assert names == tracked | kept and figures
    assert state["commit"] == f"{git(clone, 'rev-parse', 'HEAD')} (clean)" and set(state["files"]) == tracked


def test_a_run_and_all_that_follows_it(place, clone):
    where = ["--results", "R", "--systems", "S"]
    done = place.ttt("run", "bert", "optimized", *MINI, "--runs", 1, *where, "--set", *SHORT)
    assert done.returncode == 0, done.stderr
    (log,) = (place.folder / "R").rglob("result_0.txt")
    text = log.read_text()
    head = git(clone, "rev-parse", "HEAD")
    assert f"# commit: {head} (clean), installed as version " in text
    assert str(place.folder) not in text and str(place.packages) not in text
    (described,) = (place.folder / "S").glob("*.json")
    assert described.stem == log.parts[-3]
    package = "export --to submission R --submitter Example --systems S --rehearsal --list"
    commands = [
        ("check R", 0, "0 errors"),
        ("score R", 0, "optimized"),
        ("report --explore R -o explore.html", 0, "1 run,"),
        ("report R --no-official", 0, "wrote report/index.html"),
        (package, 1, "1 run, and bert has exactly 10"),
    ]
    check_all(place, commands)
    assert {path.name for path in place.folder.iterdir()} >= {"explore.html", "report", "data", "R", "S"}


def check_all(place, commands):
    """Assert of each command its exit code and what it prints."""
    ended = run_all([line for line, _, _ in commands], python=place.python, **place.options)
    for done, (_, code, text) in zip(ended, commands, strict=True):
        assert done.returncode == code and text in done.stdout + done.stderr, done
        assert "Traceback" not in done.stderr


def test_every_other_command_works_from_an_empty_folder(place):
    bert, logs = "bert optimized --size mini", committed_results()
    baseline = logs / "reference-2cpu-mini-baseline"
    package = f"export --to submission {baseline} --submitter Example --rehearsal --list"
    commands = [
        *((line, 0, text) for line, text in READERS.items()),
        (f"run {bert} --dry-run", 0, "language_bert/mini.yaml:"),
        (f"reproduce {logs}", 1, "proxy"),
        (f"report {baseline} --no-official", 0, "index.html"),
        (f"report --explore {logs}", 0, "wrote report/explore.html"),
        (f"estimate {bert} --samples 9 --measured 1000@16", 0, "-> results/estimates/"),
        (f"bench {bert} --batch-size 4 --seconds 0.05 --no-parts", 0, "results/throughput/"),
        (f"inspect profile {bert} --batch-size 4 --turns 2", 0, "-> results/profile/"),
        ("sweep bert baseline optimized --size mini --dry-run", 0, ""),
        (f"ablate {bert} --dry-run", 0, ""),
        ("compare bert baseline optimized --size mini --dry-run", 0, ""),
        ("doctor --quick --size mini --benchmarks bert", 0, "0 faults"),
        ("doctor --store-bands 3", 2, "in a clone"),
        (package, 1, "package them in a clone"),
    ]
    check_all(place, commands)
    assert (place.folder / "results/throughput").is_dir()


def test_a_package_from_the_wheel_is_the_one_of_the_clone(place, clone, tmp_path):
    version = re.search(r"commit (.+), code (\w+)", place.ttt("--version").stdout)
    clean = version[1].partition(",")[0]
    root = packages.prepare(SimpleNamespace(set=good_set, write=write_set), tmp_path, "bert")
    for log in root.rglob("result_*.txt"):
        text = log.read_text().replace("# commit: 0123abc", f"# commit: {version[1]}\n# code: {version[2]}")
        log.write_text(text)
    folder = root / "results/8xA100-optimized/bert"
    words = ["export", "--to", "submission", folder, "--submitter", "Example"]
    done = place.ttt(*words, "--out", tmp_path / "wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    here = os.environ | {"PYTHONPATH": str(clone)}
    done = run(sys.executable, "-m", "common.cli", *words, "--out", tmp_path / "clone", cwd=clone, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    sums = [(tmp_path / name / "Example.sha256").read_text() for name in ("wheel", "clone")]
    assert sums[0] == sums[1] and clean.endswith("(clean)")


def test_a_changed_file_of_the_installation_is_no_clean_commit(place):
    path = place.packages / "common/run/loop.py"
    before = path.read_bytes()
    path.write_bytes(before + b"# more\n")
    try:
        assert " (modified), installed as version " in place.ttt("--version").stdout
    finally:
        path.write_bytes(before)
