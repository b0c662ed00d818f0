"""A run set is one recipe: the folder of a configuration's runs, and findings in one that mixes two."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from common import repository
from common.evidence.audit import audit_paths
from common.evidence.log import read_log
from common.evidence.recipes import mixture
from common.evidence.report import render
from common.machine import load
from common.repository import ROOT
from common.run import launch, run_sets, set_folder
from common.study.explore import page_data
from common.training.load import load_config
from tests.command import run
from tests.command import ttt_here as ttt

pytestmark = pytest.mark.usefixtures("usual_threads")
HERE = "submission.hardware=here"
PLAIN = "here-mini-optimized"


def planned(results, *settings, num_ranks=1, configuration="optimized"):
    loaded = load_config("language_bert", configuration, size="mini", settings=[HERE, *settings])
    return launch.plan_run_set(loaded, results=results, runs="1", seed=None, num_ranks=num_ranks)


def leave_result(run_set, *changes):
    """Write the result of a run of a set: the real head, records of a committed log; return the file."""
    source = ROOT / "results/reference-2cpu-mini-optimized/bert/result_0.txt"
    records = "".join(line for line in source.read_text().splitlines(True) if line.startswith(":::MLLOG"))
    threads = f'"num_threads", "value": {set_folder.num_threads(run_set.num_ranks)}'
    records = re.sub(r'"num_threads", "value": \d+', threads, records)
    records = records.replace('"num_ranks", "value": 1', f'"num_ranks", "value": {run_set.num_ranks}')
    text = launch.compose_head(run_set, ["run"]) + records
    for before, after in changes:
        assert re.search(before, text)
        text = re.sub(before, after, text)
    path = launch.reserve(run_set.directory, None)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ([], ""),
        (["optimizer.learning_rate=0.002"], ""),  # as it is
        (["checkpoint_every=1ep", "data.directory=/elsewhere", "submission.org=me"], ""),
        (["optimizer.learning_rate=0.1"], "+optimizer.learning_rate=0.1"),
        (["methods.unpad=false"], "+methods.unpad=false"),
        (["stop_at_target=false"], "+stop_at_target=false"),
        (["micro_batch_size=1", "target=0.1"], "+target=0.1+micro_batch_size=1"),
    ],
)
def test_the_name_of_a_folder_says_what_is_changed(settings, changes, tmp_path):
    assert planned(tmp_path, *settings).system == PLAIN + changes


def test_the_first_method_of_a_configuration_without_any_is_in_the_name(tmp_path):
    run_set = planned(tmp_path, "methods.alibi={}", configuration="baseline")
    assert run_set.system.startswith("here-mini-baseline+methods.alibi+")


def test_ranks_and_threads_that_were_asked_for_are_in_the_name(tmp_path, monkeypatch):
    assert planned(tmp_path, num_ranks=2).system.startswith(f"{PLAIN}+ranks=2")
    usual = load.physical_cores()
    for value, taken in (("7", 7), ("7,1", 7), ("99", usual), ("", usual)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        monkeypatch.setattr(torch, "get_num_threads", lambda taken=taken: taken)
        assert planned(tmp_path).system == PLAIN + (f"+threads={taken}" if taken == 7 else "")


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        *(({name: "1"}, 1) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")),
        ({"MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}, 1),
        ({"OMP_NUM_THREADS": "99"}, None),
        ({"OMP_NUM_THREADS": "1,1"}, 1),
        ({"OMP_NUM_THREADS": "0"}, None),  # OpenMP refuses it
    ],
)
def test_the_head_states_the_threads_that_compute_and_another_number_begins_no_plain_set(variables, threads):
    """torch and OpenMP read a variable when they are loaded, so this needs a process of its own."""
    code = f"""
import torch
from pathlib import Path
from common.run import launch, set_folder
from common.training.load import load_config
loaded = load_config("language_bert", "optimized", size="mini", settings=["{HERE}"])
run_set = launch.plan_run_set(loaded, results=Path("nowhere"), runs="1", seed=None)
(head,) = [line for line in launch.compose_head(run_set, []).splitlines() if "threads" in line]
print(run_set.system, head, set_folder.num_threads(2), torch.get_num_threads(), sep="|")
"""
    environment = {name: value for name, value in os.environ.items() if name not in load.THREADS}
    done = run(sys.executable, "-c", code, env=environment | variables)
    usual = load.physical_cores()
    number, changes = threads or usual, f"+threads={threads}" if threads not in (None, usual) else ""
    of_torch = usual if "OMP_THREAD_LIMIT" in variables else number  # which torch does not know
    assert done.stdout == f"{PLAIN}{changes}|# threads: {number}|{number}|{of_torch}\n", done.stderr


def test_two_hyperthreads_are_one_core(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "CPUS", tmp_path)
    monkeypatch.setattr(load, "affinity", lambda: {0, 1, 4, 5})
    assert load.physical_cores() == 4  # the system does not say
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (4, "0,4"), (5, "1,5")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    assert load.physical_cores() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(load, "usable_cores", lambda: 4.0)
    assert set_folder.num_threads(1, is_asked=False) == 2  # as torch, where no variable is set


def test_the_threads_that_the_launcher_takes_on_a_busy_machine_are_no_other_set(tmp_path, monkeypatch):
    leave_result(planned(tmp_path))
    monkeypatch.setattr(load, "look", lambda: load.Load(cores=4, others=3.0, steal=0.0))
    number, why = load.most_threads(1)
    assert number == 1 and "other programs" in why
    assert planned(tmp_path).system == PLAIN
    leave_result(planned(tmp_path), ('"num_threads", "value": [0-9]+', '"num_threads", "value": 1'))
    logs = [read_log(path) for path in sorted(planned(tmp_path).directory.iterdir())]
    assert len(logs) == 2 and mixture(logs) == ""


def test_a_long_name_is_shortened_and_unique(tmp_path):
    names = set()
    for rate in ("0.1", "0.2"):
        for milestones in ("[400ba]", "[500ba]"):
            settings = [f"schedule.milestones={milestones}", f"optimizer.learning_rate={rate}"]
            names.add(planned(tmp_path, *settings, "optimizer.weight_decay=0.5").system)
    assert len(names) == 4
    assert all(re.fullmatch(r"here-mini-optimized\+[A-Za-z0-9._+=-]{1,44}", name) for name in names)


OTHER_COMMIT = (r"(?m)^# commit: .*", "# commit: 0 (clean)")
NO_CODE = (r"(?m)^# code: .*\n", "")  # as before logs stated it


def test_runs_of_other_code_get_a_folder_that_is_found_again(tmp_path):
    leave_result(planned(tmp_path), (r"(?m)^# code: .*", "# code: 0123456789ab"), OTHER_COMMIT)
    second = planned(tmp_path)
    assert re.fullmatch(rf"{PLAIN}\+(commit|code)=[0-9a-f]{{7,12}}", second.system)
    assert second.why_apart.startswith(f"{PLAIN} holds another recipe: code is 0123456789ab in result_0.txt")
    leave_result(second)
    again = planned(tmp_path)
    assert again.directory == second.directory
    assert run_sets.find_missing_runs(again).num_done == 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([OTHER_COMMIT], ""),  # that changed no code
        ([NO_CODE], ""),
        ([NO_CODE, OTHER_COMMIT], r"\+(commit|code)=\w+"),
        ([(r"torch [0-9.]+", "torch 1.0.0")], r"\+torch=.+"),
        ([(r"(?m)^# threads: .*", "# threads: 96")], r"\+threads=\d+"),
    ],
)
def test_a_set_goes_on_with_the_same_code_versions_and_threads_alone(changes, name, tmp_path):
    leave_result(planned(tmp_path), *changes)
    assert re.fullmatch(PLAIN + name, planned(tmp_path).system)


@pytest.fixture
def mixed(tmp_path):
    """A folder of two plain runs and one with another learning rate, as earlier versions mixed them."""
    rate = (r"learning_rate: 0\.002", "learning_rate: 0.1")
    event = (r'"opt_base_learning_rate", "value": 0\.002', '"opt_base_learning_rate", "value": 0.1')
    for changes in ([], [], [rate, event]):
        leave_result(planned(tmp_path), *changes)
    return tmp_path


def scores(folder):
    done = ttt("score", folder, "--json")
    rows = [row for row in json.loads(done.stdout)["scores"] if row["hardware"] == "here-mini"]
    return done.returncode, {row["configuration"]: row for row in rows}


def test_a_mixed_folder_has_no_score_one_finding_of_each_kind_and_two_cells_in_the_explorer(mixed):
    code, rows = scores(mixed)
    (measured,) = rows.values()
    assert code == 1 and measured["minutes"] is None
    assert "optimizer.learning_rate is 0.002 in result_0.txt, 0.1 in result_2.txt" in measured["label"]
    done = ttt("check", mixed, "--no-official", "--all")
    lines = [line for line in done.stdout.splitlines() if re.search(" S41[14] error ", line)]
    findings = {line.split()[1]: line for line in lines}
    assert done.returncode == 1 and len(lines) == len(findings) == 2
    assert "optimizer.learning_rate 0.1, not 0.002 as in " in findings["S414"]
    assert "opt_base_learning_rate 0.1, not 0.002 as in " in findings["S411"]
    assert "warmup" not in findings["S411"]  # what does not differ
    audited = audit_paths([mixed])
    assert "optimizer.learning_rate is 0.002 in result_0.txt" in render(audited, {}, mixed / "report")
    data = page_data(audited, [], [], mixed)
    assert data["runs"]["cell"] == [0, 0, 1]
    assert "optimizer.learning_rate 0.1" in data["cells"][1]["folder"]


def test_a_changed_baseline_is_compared_with_the_plain_one(tmp_path):
    is_baseline = ('"optimized"', '"baseline"'), ("mini-optimized", "mini-baseline")
    for settings in ([], ["optimizer.learning_rate=0.1"]):
        leave_result(planned(tmp_path, *settings), *is_baseline)
    for folder in list(tmp_path.iterdir()):
        folder.rename(folder.with_name(folder.name.replace("optimized", "baseline")))
    _, rows = scores(tmp_path)
    assert sorted(rows) == ["baseline", "baseline+optimizer.learning_rate=0.1"]
    plain, changed = (rows[name] for name in sorted(rows))
    assert plain["speedup"] is None and changed["speedup"]["ratio"] == pytest.approx(1)


def commit(folder):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", folder, *arguments], check=True)


def change(folder, *names):
    for name in names:
        with (folder / name).open("a") as file:
            file.write("\n# more\n")


def test_the_state_of_the_code_is_that_of_what_a_run_can_load(tmp_path):
    for name in ("common", "language_bert", "image_classification", "README.md"):
        subprocess.run(["cp", "-r", ROOT / name, tmp_path / name], check=True)
    commit(tmp_path)
    before = repository.code_state(tmp_path)
    assert before.commit.endswith(" (clean)") and before.untracked == ()
    change(tmp_path, "notes.txt", "facts.yaml")  # in the root only Python's files can be loaded
    assert repository.code_state(tmp_path) == before
    new = "common/methods/lion.py", "language_bert/own.yaml", "numpy.py"
    change(tmp_path, *new)
    state = repository.code_state(tmp_path)
    assert state.commit.endswith(" (modified)") and state.digest != before.digest
    assert set(state.untracked) == set(new)
    for name in new:
        (tmp_path / name).unlink()
    assert repository.code_state(tmp_path) == before
    change(tmp_path, "README.md", "common/README.md", "common/commands/report.py")
    commit(tmp_path)
    after = repository.code_state(tmp_path)
    assert after.commit != before.commit and (after.digest, after.short) == (before.digest, before.short)
    change(tmp_path, "language_bert/baseline.yaml")
    commit(tmp_path)
    changed = repository.code_state(tmp_path)
    assert changed.digest != before.digest and changed.short != before.short
    assert changed.short.removeprefix("commit=") == changed.commit[:7]


@pytest.mark.slow
def test_a_run_loads_nothing_of_the_rooms_that_are_left_out():
    code = """
import sys, importlib, common.run.loop
from common import repository
for name in repository.benchmarks():
    for module in [f"{name}.benchmark", *repository.available_methods(name).values()]:
        importlib.import_module(module)
rooms = tuple(f"common.{room}" for room in repository.NO_RUN_LOADS)
print([module for module in sys.modules if module.startswith(rooms)])
"""
    done = run(sys.executable, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_copy_inside_of_another_repository_is_not_its_commit(tmp_path):
    (tmp_path / "notes.txt").touch()
    commit(tmp_path)
    for name in ("common", "language_bert", "image_classification"):
        subprocess.run(["cp", "-r", ROOT / name, tmp_path / name], check=True)
    state = repository.code_state(tmp_path)
    assert state.commit == "unknown" and state.short == f"code={state.digest[:7]}"
