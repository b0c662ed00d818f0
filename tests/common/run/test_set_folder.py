"""A run set is one recipe: where the runs of a configuration go, and what judges a folder that mixes two."""

import json
import re
import subprocess
import sys

import pytest

from common import repository
from common.evidence.audit import audit_paths
from common.evidence.log import read_log
from common.evidence.recipes import first_difference, mixture, recipe_of
from common.repository import ROOT
from common.run import launch, run_sets, set_folder
from common.study.explore import page_data
from common.training.load import load_config
from tests.command import ttt_here as ttt

HERE = "submission.hardware=here"
PLAIN = "here-mini-optimized"


@pytest.fixture(autouse=True)
def usual_threads(monkeypatch):
    """The tests run with OMP_NUM_THREADS=1, which is no machine's usual way."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def planned(results, *settings, num_ranks=1):
    loaded = load_config("language_bert", "optimized", size="mini", settings=[HERE, *settings])
    return launch.plan_run_set(loaded, results=results, runs="1", seed=None, num_ranks=num_ranks)


def leave_result(run_set, *changes):
    """Write what a run of a set leaves: the real head, and records of a committed log; return the file."""
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
    ("settings", "name"),
    [
        ([], PLAIN),
        (["optimizer.learning_rate=0.002"], PLAIN),  # as it is
        (["checkpoint_every=1ep", "data.directory=/elsewhere", "submission.org=me"], PLAIN),
        (["optimizer.learning_rate=0.1"], f"{PLAIN}+optimizer.learning_rate=0.1"),
        (["global_batch_size=8"], f"{PLAIN}+global_batch_size=8"),
        (["methods.unpad=false"], f"{PLAIN}+methods.unpad=false"),
        (["stop_at_target=false"], f"{PLAIN}+stop_at_target=false"),
        (["micro_batch_size=1", "target=0.1"], f"{PLAIN}+target=0.1+micro_batch_size=1"),
    ],
)
def test_the_name_of_a_folder_says_what_is_changed(settings, name, tmp_path):
    assert planned(tmp_path, *settings).system == name


def test_ranks_and_threads_that_were_asked_for_are_in_the_name(tmp_path, monkeypatch):
    assert planned(tmp_path, num_ranks=2).system.startswith(f"{PLAIN}+ranks=2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert planned(tmp_path).system == f"{PLAIN}+threads=7"


def test_a_long_name_is_shortened_and_unique(tmp_path):
    names = set()
    for rate in ("0.1", "0.2"):
        for milestones in ("[400ba]", "[500ba]"):
            settings = [f"schedule.milestones={milestones}", f"optimizer.learning_rate={rate}"]
            names.add(planned(tmp_path, *settings, "optimizer.weight_decay=0.5").system)
    assert len(names) == 4
    assert all(re.fullmatch(r"here-mini-optimized\+[A-Za-z0-9._+=-]{1,44}", name) for name in names)


def test_runs_of_other_code_get_a_folder_that_is_found_again(tmp_path):
    first = planned(tmp_path)
    leave_result(
        first, (r"(?m)^# code: .*", "# code: 0123456789ab"), (r"(?m)^# commit: .*", "# commit: 0 (clean)")
    )
    second = planned(tmp_path)
    assert re.fullmatch(rf"{PLAIN}\+(commit|code)=[0-9a-f]{{7,12}}", second.system)
    assert second.why_apart.startswith(f"{PLAIN} holds another recipe: code is 0123456789ab in result_0.txt")
    leave_result(second)
    again = planned(tmp_path)
    assert again.directory == second.directory
    assert run_sets.find_missing_runs(again).num_done == 1


def test_a_set_goes_on_after_a_commit_that_changes_no_code(tmp_path):
    leave_result(planned(tmp_path), (r"(?m)^# commit: .*", "# commit: 0 (clean)"))
    assert planned(tmp_path).system == PLAIN


def test_a_set_from_before_logs_stated_their_code_is_of_its_commit(tmp_path):
    leave_result(planned(tmp_path), (r"(?m)^# code: .*\n", ""))
    assert planned(tmp_path).system == PLAIN
    leave_result(planned(tmp_path), (r"(?m)^# code: .*\n", ""), (r"(?m)^# commit: .*", "# commit: 0 (clean)"))
    assert planned(tmp_path).system != PLAIN


def test_another_torch_or_number_of_threads_never_joins(tmp_path, monkeypatch):
    leave_result(planned(tmp_path), (r"torch [0-9.]+", "torch 1.0.0"))
    assert "+torch=" in planned(tmp_path).system
    other = tmp_path / "other"
    leave_result(planned(other), (r"(?m)^# threads: .*", "# threads: 96"))
    assert "+threads=" in planned(other).system


def mixed_folder(results):
    """Put a run with another learning rate, as earlier versions did, into a folder of two plain runs."""
    plain = [leave_result(planned(results)) for _ in range(2)]
    rate = (r"learning_rate: 0\.002", "learning_rate: 0.1")
    event = (r'"opt_base_learning_rate", "value": 0\.002', '"opt_base_learning_rate", "value": 0.1')
    return plain, leave_result(planned(results), rate, event)


def test_a_mixed_folder_has_no_score_and_names_the_key(tmp_path):
    mixed_folder(tmp_path)
    done = ttt("score", tmp_path, "--json")
    (measured,) = [row for row in json.loads(done.stdout)["scores"] if row["hardware"] == "here-mini"]
    assert done.returncode == 1 and measured["minutes"] is None
    assert "optimizer.learning_rate is 0.002 in result_0.txt, 0.1 in result_2.txt" in measured["label"]


def test_a_finding_about_a_set_names_only_what_differs(tmp_path):
    mixed_folder(tmp_path)
    done = ttt("check", tmp_path, "--no-official", "--all")
    lines = [line for line in done.stdout.splitlines() if " S4" in line]
    (recipe,) = [line for line in lines if " S414 error " in line]
    assert "optimizer.learning_rate 0.1, not 0.002 as in " in recipe
    (logged,) = [line for line in lines if " S411 error " in line]
    assert "opt_base_learning_rate 0.1, not 0.002 as in " in logged and "warmup" not in logged
    assert done.returncode == 1


def test_the_explorer_shows_the_recipes_of_a_mixed_folder_apart(tmp_path):
    mixed_folder(tmp_path)
    data = page_data(audit_paths([tmp_path]), [], [], tmp_path)
    assert data["runs"]["cell"] == [0, 0, 1]
    assert "optimizer.learning_rate 0.1" in data["cells"][1]["folder"]


def test_a_changed_baseline_is_compared_with_the_plain_one(tmp_path):
    for settings in ([], ["optimizer.learning_rate=0.1"]):
        leave_result(
            planned(tmp_path, *settings), ('"optimized"', '"baseline"'), ("mini-optimized", "mini-baseline")
        )
    for folder in list(tmp_path.iterdir()):
        folder.rename(folder.with_name(folder.name.replace("optimized", "baseline")))
    done = ttt("score", tmp_path, "--json")
    rows = {
        row["configuration"]: row
        for row in json.loads(done.stdout)["scores"]
        if row["hardware"] == "here-mini"
    }
    assert set(rows) == {"baseline", "baseline+optimizer.learning_rate=0.1"}
    assert rows["baseline"]["speedup"] is None
    assert rows["baseline+optimizer.learning_rate=0.1"]["speedup"]["ratio"] == pytest.approx(1)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a checkout of the code as it is here, all in one commit."""
    folder = tmp_path_factory.mktemp("clone") / "suite"
    folder.mkdir()
    for name in ("common", "language_bert", "image_classification", "README.md"):
        subprocess.run(["cp", "-r", ROOT / name, folder / name], check=True)
    commit(folder, "init")
    return folder


def commit(folder, *first):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in ([*first] and ["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "x"]):
        if arguments:
            subprocess.run(["git", "-C", folder, *arguments], check=True)


def test_untracked_code_is_modified_and_named(clone):
    before = repository.code_state(clone)
    assert before.commit.endswith(" (clean)") and before.untracked == ()
    for name in ("common/methods/lion.py", "language_bert/own.yaml"):
        (clone / name).write_text("# new\n")
    (clone / "notes.txt").write_text("no code")
    state = repository.code_state(clone)
    assert state.commit.endswith(" (modified)") and state.digest != before.digest
    assert set(state.untracked) == {"common/methods/lion.py", "language_bert/own.yaml"}
    for name in ("common/methods/lion.py", "language_bert/own.yaml"):
        (clone / name).unlink()
    assert repository.code_state(clone) == before


def test_a_commit_to_a_page_or_a_report_is_no_other_code(clone):
    before = repository.code_state(clone)
    for name in ("README.md", "common/README.md", "common/commands/report.py"):
        with (clone / name).open("a") as file:
            file.write("\n# more\n")
    commit(clone)
    after = repository.code_state(clone)
    assert after.commit != before.commit and (after.digest, after.short) == (before.digest, before.short)
    with (clone / "language_bert/baseline.yaml").open("a") as file:
        file.write("\n# more\n")
    commit(clone)
    changed = repository.code_state(clone)
    assert changed.digest != before.digest and changed.short != before.short
    assert changed.short.removeprefix("commit=") == changed.commit[:7]


@pytest.mark.slow
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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_tutorials_changed_run_leaves_the_plain_set_alone(tmp_path):
    settings = ("target: 0.01", "max_duration: 20ba", "evaluate_every: 20ba", "evaluate_from: 20ba")
    own = tmp_path / "tiny.yaml"
    own.write_text("\n".join(["extends: optimized", *settings, "schedule: {warmup: 5ba}"]))
    where = [
        "--results",
        tmp_path / "results",
        "--systems",
        tmp_path / "systems",
        "--size",
        "mini",
        "--set",
        HERE,
    ]
    for changes in ([], ["--set", "optimizer.learning_rate=0.1"], []):
        done = ttt("run", "language_bert", own, *where, *changes)
        assert done.returncode == 0, done.stderr
    folders = {path.parent.parent.name for path in (tmp_path / "results").rglob("result_*.txt")}
    assert folders == {"here-mini-tiny", "here-mini-tiny+optimizer.learning_rate=0.1"}
    assert {path.stem for path in (tmp_path / "systems").iterdir()} == folders
    assert ttt("check", tmp_path / "results").returncode == 0
    logs = [read_log(path) for path in sorted((tmp_path / "results/here-mini-tiny/bert").iterdir())]
    assert len(logs) == 2 and mixture(logs) == ""
    (odd,) = (tmp_path / "results").glob("*+*/bert/result_0.txt")
    difference = first_difference(recipe_of(logs[0]), recipe_of(read_log(odd)))
    assert difference and difference.key == "optimizer.learning_rate"
