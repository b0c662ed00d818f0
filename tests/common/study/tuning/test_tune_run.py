"""`ttt run -O0`, `-O1`, `-O2` as a person types them, and configurations that are run by their path."""

import os
from argparse import Namespace

import pytest
import torch
import yaml

from common.config.merge import extend, to_yaml
from common.evidence.log import read_log
from common.run import launch
from common.study.tuning import tune_command
from common.study.tuning.tune_runs import Tuner, candidates
from common.training.load import load_config
from tests.command import one_line, ttt, ttt_here

pytestmark = pytest.mark.usefixtures("prepared_data")

RUN = ("run", "language_bert", "baseline", "--size", "mini")
BENCHMARKS = ("image_classification", "language_bert")
SHORT = ("max_duration=8ba", "evaluate_every=4ba", "evaluate_from=4ba", "schedule.warmup=2ba", "target=0.9")
SMALL = {
    "image_classification": ("data.train_crop_px=32", "global_batch_size=4"),
    "language_bert": ("model.hidden_size=16", "model.intermediate_size=16", "global_batch_size=4"),
}


def places(folder):
    return ["--results", folder / "results", "--systems", folder / "systems"]


def tuner(benchmark, configuration, *settings):
    loaded = load_config(benchmark, configuration, size="mini", settings=list(settings))
    return Tuner(loaded=loaded, settings=settings, seed=0, num_ranks=1)


def tried(level, benchmark, *settings):
    """Return the changes of a baseline that a level tries, by their names."""
    changes = candidates(tuner(benchmark, "baseline", *settings), level)
    return {change.name: change for change in changes}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("methods: {}", "extends: NAME"),
        ("extends: nothing", "unknown configuration 'nothing'"),
        ("extends: [", "not YAML"),
        (None, "no such file"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, what):
    path = tmp_path / "mine.yaml"
    if text:
        path.write_text(text)
    assert what in one_line(ttt_here("run", "language_bert", path))


def test_o1_tries_what_declares_to_keep_the_mathematics_with_the_settings_of_the_configurations():
    found = tried(1, "language_bert")
    names = list(found)
    methods = ["unpad", "fused_qkv", "sparse_head", "last_layer_subset", "compile_layers"]
    order = [*methods, "model.attention=eager"]
    assert [name for name in names if name in order] == order
    assert names[:2] == ["fused adamw", "unpad"] and found["fused adamw"].missing  # the one that pays first
    assert {"model.attention=eager", "reuse_memory", "channels_last", "fused adamw"} <= found.keys()
    assert "model.attention=sdpa" not in found and "ema" not in found
    assert found["unpad"].adds == ("methods.unpad={round_to: 64}",)  # of size mini
    assert found["compile_layers"].adds == ("methods.compile_layers={}",)  # which size mini switches off
    assert all(change.is_exact for change in found.values())


def test_o1_also_tries_without_what_is_on_and_leaves_alone_what_a_person_set():
    found = tried(1, "image_classification")
    assert found["without channels_last"].adds == ("methods.channels_last=false",)
    assert "without label_smoothing" not in found
    assert "without channels_last" not in tried(1, "image_classification", "methods.channels_last={}")


def test_o2_adds_the_methods_of_the_other_configurations_marked_and_apart_from_alternatives():
    found = tried(2, "image_classification")
    assert not found["ema"].is_exact and "average" in found["ema"].evidence
    assert found["progressive_resizing"].evidence == ""  # its card promises time: it has to gain some
    assert found["scale_schedule"].adds == ("methods.scale_schedule={ratio: 0.5}",)
    assert "progressive_resizing" in found["progressive_crops"].conflicts_with
    assert "ema" not in found["blurpool"].conflicts_with
    assert "swa" not in found  # in no configuration


def test_the_file_states_only_differences_and_gives_the_same_configuration(tmp_path):
    own = tuner("language_bert", "baseline", "global_batch_size=8")
    state = ("methods.unpad={round_to: 64}", "model.attention=eager", "methods.unpad=false")
    text = extend(own.loaded.source, [*own.settings, *state], "# Found by: a command")
    assert text.startswith("# Found by: a command\nextends: ")
    stated = {"extends": "baseline", "global_batch_size": 8, "methods": {"unpad": False}}
    assert yaml.safe_load(text) == stated | {"model": {"attention": "eager"}}
    path = tmp_path / "baseline-O1.yaml"
    path.write_text(text)
    read = load_config("language_bert", str(path), size="mini", settings=[]).config
    assert read == own.config(state).replaced(configuration="baseline-O1")


def test_o0_changes_nothing_and_says_so():
    plain, zero = ttt_here(*RUN, "--dry-run"), ttt_here(*RUN, "-O0", "--dry-run")
    assert zero.returncode == 0
    assert zero.stdout == "-O0: nothing is tried, nothing is changed\n" + plain.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-O3"], "invalid choice"),
        (["-O1", "--tune-seconds", "0"], "from 1 to"),
        (["--write-config", "a.yaml"], "-O1"),
        (["-O1", "--write-config", "a.txt"], "NAME.yaml"),
        (["-O1", "--write-config", "there.yaml"], "not overwritten"),
    ],
)
def test_bad_usage_is_one_line(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("")
    assert words in one_line(ttt_here(*RUN, *options))


def test_what_was_chosen_is_used_again_for_the_same_settings_only(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = tmp_path / "results" / "here-mini-baseline-O1" / "bert"
    folder.mkdir(parents=True)
    made_for = "ttt run language_bert baseline --size mini -O1 --set submission.hardware=here"
    (folder / "baseline-O1.yaml").write_text(f"# Found by: {made_for}\nextends: baseline\n")
    command = [*made_for.split()[1:], *places(tmp_path)]
    again = ttt_here(*command, "--index", 0, "--runs", 2)  # which is refused, but later
    assert "as chosen before" in again.stdout
    assert "--index" in one_line(again)
    other = ttt_here(*command, "--set", "submission.org=me")  # which changes no recipe, so not the folder
    assert "other settings or ranks; remove it to choose anew" in one_line(other)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "threads", "changes"),
    [
        ([], 1, None, ""),
        ([], 1, "7", "+threads=7"),
        (["target=0.5"], 1, None, "+target=0.5"),
        (["target=0.5", "methods.no_norm_decay=false"], 2, None, None),
        (["model.hidden_size=16", "optimizer.learning_rate=0.01", "global_batch_size=4"], 1, "7", None),
    ],
)
def test_what_was_chosen_is_beside_the_results_of_its_own_settings_ranks_and_threads(
    settings, num_ranks, threads, changes, tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setattr(torch, "get_num_threads", lambda: int(threads))  # as in a process so started
    settings = ["submission.hardware=here", *settings]
    loaded = load_config("language_bert", "baseline", size="mini", settings=settings)
    args = Namespace(level=1, nproc=num_ranks, results=tmp_path)
    path = tune_command.default_path(args, loaded)
    path.parent.mkdir(parents=True)
    path.write_text(extend("baseline", [*settings, "methods.unpad={}"], "# head"))
    tuned = load_config("language_bert", str(path), size="mini", settings=settings)
    assert "unpad" in tuned.config.methods
    run_set = launch.plan_run_set(
        tuned, results=tmp_path, runs="1", seed=None, num_ranks=num_ranks, tuned_from="baseline"
    )
    assert run_set.directory == path.parent and run_set.system.startswith("here-mini-baseline-O1")
    assert changes is None or run_set.system == f"here-mini-baseline-O1{changes}"
    assert ("+" in run_set.system) == (len(settings) > 1 or threads is not None)


def test_o1_below_torchrun_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setitem(os.environ, name, value)
    assert "--write-config" in one_line(ttt_here(*RUN, "-O1"))


@pytest.mark.on_demand
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_o1_tunes_prints_and_writes_what_then_runs(benchmark, tmp_path):
    path = tmp_path / "found.yaml"
    settings = ["--set", *SMALL[benchmark], *SHORT]
    command = ["run", benchmark, "baseline", "--size", "mini", *places(tmp_path), *settings]
    done = ttt(*command, "-O1", "--tune-seconds", 15, "--dry-run", "--write-config", path)
    assert done.returncode == 0, done.stderr
    for word in ("channels_last", "reuse_memory", "compile", "largest difference", "tuning took"):
        assert word in done.stdout
    assert path.read_text() in done.stdout + "\n" and not (tmp_path / "results").exists()
    done = ttt("run", benchmark, path, "--size", "mini", *places(tmp_path))
    assert done.returncode == 1, done.stderr  # the target is out of reach
    (result,) = (tmp_path / "results").rglob("result_0.txt")
    assert read_log(result).value("configuration_name") == "found"
    assert "-mini-found" in result.parts[-3]


@pytest.mark.on_demand
def test_o1_runs_what_it_chose_and_chooses_once(tmp_path):
    command = ["run", "language_bert", "baseline", "--size", "mini", *places(tmp_path)]
    command += ["--set", *SMALL["language_bert"], *SHORT, "-O1", "--tune-seconds", 15]
    done = ttt(*command, "--seed", 1)
    assert done.returncode == 1, done.stderr
    (result,) = (tmp_path / "results").rglob("result_*.txt")
    written = result.parent / "baseline-O1.yaml"
    config = load_config("language_bert", str(written), size="mini", settings=[]).config
    log = read_log(result)
    assert yaml.safe_load("\n".join(log.settings)) == yaml.safe_load(to_yaml(config))
    assert log.value("configuration_name") == "baseline-O1"
    again = ttt(*command, "--seed", 2)
    assert "as chosen before" in again.stdout and "tuning took" not in again.stdout
    assert (result.parent / "result_1.txt").exists()
