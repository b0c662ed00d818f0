"""On a laptop without torch every command works, or says in one line what to install."""

import ast
import re
import sys
import tomllib
from importlib import metadata

from common.cli import COMMANDS, PARTS, find_part
from common.repository import ROOT, TRAIN, benchmarks, install_hint
from tests.command import one_line
from tests.committed import committed_results, tracked
from tests.verbs import READERS, run_all

SETS = [f"{committed_results()}/reference-2cpu-mini-{name}" for name in ("baseline", "optimized")]
TORCH = ("torch", "torchvision", "triton")
NEED_TORCH = f"""
run --all --size mini --runs 1
run bert baseline --size mini
bench bert --size mini
inspect startup bert baseline --size mini
inspect compile bert baseline --for sm_90
inspect profile bert baseline --size mini
inspect graphs bert optimized --size mini
inspect kernels bert optimized --size mini
inspect neighbour bert optimized --size mini
accept --size mini
doctor --size mini --store-bands 3
estimate bert baseline --size mini
estimate bert baseline --scaling --measured 70@56
ablate bert optimized --size mini --dry-run
compare bert baseline optimized --size mini --dry-run
sweep bert baseline optimized --size mini --dry-run
list methods --measure mini
check --replay {SETS[0]}/bert/result_0.txt
""".strip().splitlines()


def work_without_torch(folder):
    """Map commands to what they print."""
    logs, rehearsal = " ".join(SETS), "--submitter Example --rehearsal --commit HEAD --list"
    return {
        "--version": "commit ",
        f"check {logs} --no-official": "0 errors",
        f"score {logs}": "optimized",
        f"report {logs} --no-official --out {folder}/report": "index.html",
        f"export --to submission {logs} {rehearsal} --systems {ROOT}/systems": "nothing was written",
        f"report --explore {logs} -o {folder}/explore.html": f"wrote {folder}/explore.html",
        "data status": "language_bert",
        f"estimate --score --results {committed_results()}": "optimized",
        **READERS,
    }


def test_what_reads_logs_data_and_figures_needs_no_extra(tmp_path):
    expected = work_without_torch(tmp_path)
    for done, words in zip(run_all(expected, hidden=TRAIN), expected.values(), strict=True):
        assert done.returncode == 0 and words in done.stdout, (done.args, done.stdout, done.stderr)


def test_every_other_command_names_the_extra_in_one_line():
    for hidden in (TORCH, TRAIN):
        for done in run_all(NEED_TORCH, hidden=hidden):
            line = one_line(done)
            assert " is not installed" in line and install_hint("train") in line, done.args
    both = [line.split() for line in (*NEED_TORCH, *work_without_torch(ROOT))]
    assert set(COMMANDS) <= {words[0] for words in both}
    forms = {(verb, find_part(verb, words)[0]) for verb, *words in both}
    tested_elsewhere = {("data", "fetch"), ("data", "prepare")}
    assert {(verb, part) for verb, parts in PARTS.items() for part in parts} - forms == tested_elsewhere


def test_data_are_prepared_and_verified_without_torch(tmp_path):
    for benchmark in ("bert", "resnet"):
        where = f"{benchmark} --size mini --set data.directory={tmp_path / benchmark}"
        prepared, verified = run_all([f"data {verb} {where}" for verb in ("prepare", "verify")], hidden=TORCH)
        assert prepared.returncode == 0, prepared.stderr
        assert verified.returncode == 0 and "intact" in verified.stdout
        (done,) = run_all([f"data prepare {where}-2"], hidden=TRAIN)
        assert install_hint("train") in one_line(done)


def test_the_doctor_checks_what_needs_no_torch_and_says_how_to_install_it():
    (done,) = run_all(["doctor --size mini"], hidden=TRAIN)
    faults = [line for line in done.stdout.splitlines() if line.startswith("fault")]
    assert done.returncode == 1 and len(faults) == 1 and done.stderr == ""
    assert "no torch; " in faults[0] and "pip install" in faults[0]
    assert "room for results" in done.stdout


def test_every_extra_that_advice_names_is_declared_and_no_index_is_asked_for_our_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"train", "dali", "dali-cu12", "flash", "dev"}
    assert extras <= set(project["optional-dependencies"])
    names = {re.match(r"[\w-]+", entry)[0] for entry in project["optional-dependencies"]["train"]}
    modules = {"scikit-learn": "sklearn", "google-crc32c": "google_crc32c"}
    assert {modules.get(name, name) for name in names} == set(TRAIN)
    asked = re.compile(r"pip3? install [^\n]*time[-_]to[-_]train")
    texts = {path: path.read_text(errors="replace") for path in tracked() if path.suffix != ".svg"}
    assert [path for path, text in texts.items() if asked.search(text)] == []


def test_every_package_that_the_code_imports_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    declared = {re.match(r"[\w-]+", entry)[0].lower() for entry in entries}
    files = [path for package in ("common", *benchmarks()) for path in (ROOT / package).rglob("*.py")]
    modules = {name for path in files for name in imported(ast.parse(path.read_text()))}
    modules -= {"common", *benchmarks(), *sys.stdlib_module_names}
    modules -= {"triton", "cycler"}  # which come with torch and matplotlib
    modules -= {"nvidia", "flash_attn_interface", "apex"}  # of either DALI; the others are built from source
    packages = metadata.packages_distributions()
    names = {module: packages.get(module, [module])[0].lower().replace("_", "-") for module in modules}
    assert {module for module, name in names.items() if name not in declared} == set()
    assert {"numpy", "PIL", "markupsafe", "yaml", "pynvml"} <= modules


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]
