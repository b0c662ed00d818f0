"""`ttt check --replay`: runs made again, logs that cannot be, and the run that a public value draws."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile

import pytest

from common.data.preparation import data_fingerprint
from common.errors import EXIT_INTERRUPTED, UserError
from common.evidence.log import read_log
from common.evidence.sealed import seal
from common.repository import DATA, ROOT, data_folder
from common.study.replay import replay
from common.training.load import load_config
from tests.command import one_line, run, start, ttt_here
from tests.committed import committed_results
from tests.common.evidence.sealed.sealed_sets import numbered, seal_logs, write_files
from tests.runs import SMALL_IMAGES, until

BERT = committed_results() / "reference-2cpu-mini-optimized" / "bert" / "result_0.txt"
FEW_STEPS = ("target=0.99", "max_duration=8ba", "evaluate_every=4ba", "schedule.warmup=2ba")
RUNS = {
    "language_bert": ("optimized", "evaluation_batch_size=16"),
    "image_classification": ("baseline", "precision=fp32", "evaluation_precision=fp32", *SMALL_IMAGES),
}


def copy_of(folder, *edits):
    """Copy a committed log as if of the data here, with some replacements, each of which must change it.

    The text of these data, Python's documentation, is that of the Python here.
    """
    config = load_config("language_bert", "optimized", size="mini", settings=[]).config
    here = rf"\g<1>{data_fingerprint(config)}"
    text = re.sub(f"({DATA_OF_LOG})[0-9a-f]+", here, BERT.read_text())
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    path = folder / BERT.name
    path.write_text(text)
    return path


COMMIT, NO_CODE = "d4c47c7ab2be695df366b5480dbd0fabdeb70d4a", ("# code: 17f638fd3522\n", "")
OLD = "cdcf05f754b95e42cfec702d75802a36b8c71112"
DATA_OF_LOG, GPUS = '"dataset_fingerprint", "value": "', '"num_accelerators", "value": '
REFUSED = {  # what is wrong with a log -> a word of the line, and edits
    "a commit that is not here": ("git fetch", (COMMIT, "0" * 40)),
    "a commit without replay's entry": ("is older than", (COMMIT, OLD), NO_CODE),
    "changes that no commit holds": ("not known", (f"{COMMIT} (clean)", f"{COMMIT} (modified)"), NO_CODE),
    "no commit": ("not known", (f"# commit: {COMMIT} (clean)\n", "")),
    "an option of git as a commit": ("not known", (COMMIT, f"--output={'x' * 31}")),
    "no configuration": ("configuration", ("# --- configuration", "# --- others")),
    "no benchmark": ("configuration", ("#   benchmark: language_bert\n", "")),
    "other data": ("--data", (DATA_OF_LOG, f"{DATA_OF_LOG}0")),
    "no data": ("ttt data prepare", ("directory: data/language_bert/mini", "directory: data/nowhere")),
    "more GPUs than here": ("99 GPU", (f"{GPUS}0", f"{GPUS}99")),
    "a checkpoint": ("checkpoint", ('"key": "optimizer_class"', '"key": "resumed"')),
    "no start": ("clock", ('"key": "run_start"', '"key": "walk_start"')),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_log_that_cannot_be_replayed_is_refused_in_one_line_before_anything_is_trained(name, tmp_path):
    word, *edits = REFUSED[name]
    assert word in one_line(ttt_here("check", "--replay", copy_of(tmp_path, *edits)))


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_without_room_for_temporary_files_one_line_names_the_folder(fault, mount_disk, monkeypatch, tmp_path):
    """The files of a commit take more than 1 MiB."""
    folder = mount_disk("1m")
    if fault == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    log = copy_of(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    line = one_line(ttt_here("check", "--replay", log))
    assert f"{folder}: " in line and "TMPDIR" in line
    assert list(folder.iterdir()) == []


def test_without_any_folder_for_temporary_files_the_error_names_all_that_were_tried(monkeypatch, tmp_path):
    """A file may have no bytes: Python finds no folder that it can write."""
    recipe = replay.read_recipe(read_log(copy_of(tmp_path)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(tempfile, "tempdir", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UserError, match="temporary files: .*/var/tmp.*TMPDIR"), replay.make_again(recipe):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_result_that_was_kept_is_compared_and_not_made_again(tmp_path):
    """Its first loss was edited: a new run would not have it."""
    kept, results = (tmp_path / name / BERT.parent.parent.name / "bert" for name in ("kept", "results"))
    kept.mkdir(parents=True)
    results.mkdir(parents=True)
    path = copy_of(kept, ('"key": "train_loss", "value": 4.78', '"key": "train_loss", "value": 5.78'))
    before = path.read_bytes()
    done = ttt_here("check", "--replay", copy_of(results), "--keep", tmp_path / "kept")
    assert done.returncode == 1 and "14,400 samples: 4.788890838623047 there, 5.78" in done.stdout
    assert path.read_bytes() == before


@pytest.mark.parametrize("left_out", ["blob:none", "tree:0"])
def test_a_clone_that_lacks_the_files_of_the_commit_is_refused_in_one_line(left_out, tmp_path, monkeypatch):
    """A partial clone fetches files when git reads them: here from a repository that is gone."""
    serve = "git -c uploadpack.allowFilter=true -c uploadpack.allowAnySHA1InWant=true upload-pack"
    words = ("--quiet", "--bare", f"--filter={left_out}", f"--upload-pack={serve}")
    git("clone", *words, f"file://{ROOT}", tmp_path / "clone")
    git("-C", tmp_path / "clone", "config", "remote.origin.url", tmp_path / "gone")
    monkeypatch.setattr(replay, "ROOT", tmp_path / "clone")
    line = one_line(ttt_here("check", "--replay", copy_of(tmp_path)))
    assert COMMIT in line and "git fetch --refetch" in line and "older" not in line


def test_what_is_no_log_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("a sentence")
    (tmp_path / "result_0.txt").write_bytes(b"\0")
    assert "cannot be read: binary" in one_line(ttt_here("check", "--replay", tmp_path / "result_0.txt"))
    assert "is no log" in one_line(ttt_here("check", "--replay", tmp_path / "notes.txt"))
    assert "no such file" in one_line(ttt_here("check", "--replay", tmp_path / "result_9.txt"))


def sealed_set(folder):
    """Write a sealed set of seven runs."""
    return write_files(seal_logs(numbered([BERT.read_text().splitlines()] * 7)), folder / "set")


def test_a_public_value_draws_one_run_of_a_sealed_set(tmp_path):
    folder = sealed_set(tmp_path)
    drawn = {replay.choose([folder], f"beacon:{value}")[0].name for value in range(60)}
    assert drawn == {f"result_{number}.txt" for number in range(7)}
    assert replay.choose([folder], "beacon:a") == replay.choose([folder], "beacon:a")
    assert len(replay.choose([folder], None)) == 7


def test_a_draw_is_refused_where_a_run_could_have_been_left_out(tmp_path):
    draw = ("--draw", "beacon:1f2e")
    unsealed = committed_results() / "rehearsal-2cpu-mini-closed" / "bert"
    assert "not sealed" in one_line(ttt_here("check", "--replay", unsealed, *draw))
    folder = sealed_set(tmp_path)
    assert "beacon:VALUE" in one_line(ttt_here("check", "--replay", folder, "--draw", "1f2e"))
    assert "one set" in one_line(ttt_here("check", "--replay", folder / "result_0.txt", *draw))
    (folder / "result_3.txt").unlink()
    assert "result_3.txt" in one_line(ttt_here("check", "--replay", folder, *draw))
    lines = (folder / seal.RUNS).read_text().splitlines(keepends=True)
    (folder / seal.RUNS).write_text("".join(lines[:6] + lines[8:]))
    assert f"{seal.RUNS}:7" in one_line(ttt_here("check", "--replay", folder, *draw))


@pytest.fixture
def clone(tmp_path):
    """A clone of the repository, in which commands run with its own code."""
    folder = tmp_path / "clone"
    git("clone", "--quiet", ROOT, folder)

    def ttt(*words):
        environment = os.environ | {"PYTHONPATH": str(folder), DATA: str(data_folder())}
        return run(sys.executable, "-m", "common.cli", *words, cwd=folder, env=environment)

    ttt.folder = folder
    return ttt


def git(*words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *words], check=True)


@pytest.mark.slow
def test_runs_repeat_to_the_last_bit_with_the_code_here_and_that_of_an_older_commit(clone, tmp_path):
    """Code is added that would end each run; then a loss is edited."""
    results, kept = tmp_path / "results", tmp_path / "kept"
    for benchmark, (configuration, *settings) in RUNS.items():
        few = (*FEW_STEPS, "evaluate_from=4ba", "global_batch_size=4")
        sets = [f"--set={setting}" for setting in (*few, *settings)]
        made = clone("run", benchmark, configuration, "--size", "mini", "--results", results, *sets)
        assert made.returncode == 1, made.stderr  # the target is not reached
    bert, resnet = (next(results.glob(f"*/{name}/result_0.txt")) for name in ("bert", "resnet"))
    here = clone("check", "--replay", resnet)
    assert here.returncode == 0 and "to the last bit: 2 losses, 2 accuracies" in here.stdout, here.stdout
    with (clone.folder / "common" / "run" / "loop.py").open("a") as file:
        file.write("\nraise RuntimeError('another code')\n")
    git("-C", clone.folder, "commit", "--quiet", "-am", "loop: end")
    older = clone("check", "--replay", bert, "--keep", kept, "--json")
    (entry,) = json.loads(older.stdout)["replays"]
    assert older.returncode == 0 and entry["repeats"] and len(entry["losses"]) == 2, older.stderr
    loss = entry["losses"][1][1]
    bert.write_text(bert.read_text().replace(f'"value": {loss!r}', f'"value": {loss + 1e-6!r}'))
    done = clone("check", "--replay", bert, "--keep", kept)
    line = next(line for line in done.stdout.splitlines() if "train_loss" in line)
    assert done.returncode == 1 and f"{loss + 1e-6!r} there, {loss!r} now" in line


@pytest.mark.slow
def test_an_interruption_leaves_nothing_behind(tmp_path, tmp_path_factory):
    """A run with the code of an older commit is interrupted when it has begun."""
    logs = tmp_path_factory.mktemp("logs")
    kernels = tempfile.gettempdir()  # of torch, which makes a folder for them when it is imported
    environment = os.environ | {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": kernels}
    words = [sys.executable, "-m", "common.cli", "check", "--replay", copy_of(logs)]
    process = start(*map(str, words), env=environment, start_new_session=True)
    try:
        until(lambda: ", run 1/1" in process.stdout.readline())
        assert list(tmp_path.iterdir()) != []
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == EXIT_INTERRUPTED and errors.strip().endswith("error: interrupted")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_keep_a_result_is_named_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "make_again", lambda recipe: pytest.fail("the run was made"))
    line = one_line(ttt_here("check", "--replay", copy_of(tmp_path), "--keep", __file__))
    assert "cannot keep the result" in line
