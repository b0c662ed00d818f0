"""Checkpoints: a resumed training ends as one that was not interrupted; a kill leaves the last one whole."""

import errno
import json
import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.cli import dispatch
from common.data.preparation import data_fingerprint
from common.errors import UserError
from common.evidence.audit import audit_paths
from common.evidence.log import load as read_sets
from common.evidence.log import read_log
from common.evidence.score import score
from common.evidence.sealed.chain import is_chained, read_chain
from common.repository import ROOT
from common.run import launch, resume
from common.run.loop import save
from common.training import checkpoint
from common.training.checkpoint_header import Facts, checkpoint_of, crc_of, read_facts
from common.training.load import load_config
from common.training.ranks import SINGLE_RANK
from tests.command import run, run_ranks, ttt
from tests.common.run.kill_writers import FACTS
from tests.common.training import checkpointed
from tests.runs import open_place, records

TINY = ("max_duration=80ba", "evaluate_every=40ba", "evaluate_from=40ba", "schedule.warmup=5ba")


pytestmark = pytest.mark.usefixtures("prepared_data")
KEPT = {"language_bert": range(checkpointed.NUM_STEPS), "image_classification": (1, 4)}


@pytest.fixture(scope="module", params=KEPT)
def whole(request, tmp_path_factory):
    """A training that was not interrupted: its benchmark, its outcome, checkpoints of some steps."""
    folder = tmp_path_factory.mktemp("whole")
    run = checkpointed.start(request.param, folder)
    before = {name: value.clone() for name, value in checkpoint.capture(run)[0].items()}
    ended = checkpointed.train(run, KEPT[request.param])
    unmoved = {name for name, value in before.items() if torch.equal(value, ended[0][name])}
    assert not any(name.startswith("model.") for name in unmoved)
    assert any(name.startswith("methods.ema.") for name in ended[0])
    return request.param, ended, folder


@pytest.mark.slow
def test_resumed_at_any_step_it_ends_as_without_an_interruption(whole, tmp_path):
    name, ended, folder = whole
    for step in KEPT[name]:
        resumed = checkpointed.start(name, tmp_path, source=folder / f"{step}.safetensors")
        assert resumed.first_step == step
        assert checkpointed.are_equal(checkpointed.train(resumed), ended)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimizer"), [("language_bert", "lamb"), ("image_classification", "lars")])
def test_optimizers_with_trust_ratios_go_on_as_without_an_interruption(name, optimizer, tmp_path):
    settings = [*checkpointed.SETTINGS[name], f"optimizer.name={optimizer}"]
    ended = checkpointed.train(checkpointed.start(name, tmp_path, settings=settings), keep=[4])
    source, again = tmp_path / "4.safetensors", tmp_path / "again"
    again.mkdir()
    resumed = checkpointed.start(name, again, source=source, settings=settings)
    assert resumed.first_step == 4 and checkpointed.are_equal(checkpointed.train(resumed), ended)


@pytest.mark.slow
def test_killed_between_two_micro_batches_it_goes_on_from_the_step_before(whole, tmp_path):
    name, ended, _ = whole
    done = run(sys.executable, "-m", checkpointed.__name__, tmp_path, name)
    assert done.returncode == -signal.SIGKILL, done.stderr
    source = tmp_path / "result_0.safetensors"
    assert read_facts(source).step == checkpointed.DIES_IN_STEP
    resumed = checkpointed.start(name, tmp_path, source=source)
    assert checkpointed.are_equal(checkpointed.train(resumed), ended)


@pytest.mark.slow
def test_each_of_two_ranks_gets_its_own_buffers_and_random_state_back(tmp_path):
    said = run_ranks(2, checkpointed.__name__, tmp_path)
    assert said.splitlines().count("True False") == 2


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_writing_leaves_a_whole_checkpoint(tmp_path):
    done = run(sys.executable, "-m", "tests.common.run.kill_writers", tmp_path, 40)
    assert done.returncode == 0, done.stderr
    num_hit, num_written = map(int, done.stdout.split())
    assert num_hit >= 10 and num_written >= 10


RANDOM_STATE = {"python": random.getstate(), "numpy": ("MT19937", (0,) * 624, 624, 0, 0.0)}
LOG = "".join(
    f':::MLLOG {{"namespace": "", "time_ms": 1, "event_type": "{kind}", "key": "{key}", "value": {value}, '
    '"metadata": {"file": "a.py", "lineno": 1}}\n'
    for kind, key, value in (
        ("POINT_IN_TIME", "seed", 3),
        ("POINT_IN_TIME", "num_accelerators", 0),
        ("INTERVAL_START", "run_start", "null"),
    )
)


def facts(**changes):
    """The facts in a checkpoint of the run set that `run_set` returns."""
    planned = run_set()
    known = {
        "system": planned.system,
        "dataset_fingerprint": data_fingerprint(planned.loaded.config),
        "config": planned.loaded.config.model_dump(mode="json"),
        "random": (RANDOM_STATE,),
        "log": LOG,
    }
    return Facts(**dict(FACTS) | {"step": 7, "seed": 3} | known | changes)


def run_set(*settings, configuration="optimized", **changes):
    loaded = load_config("language_bert", configuration, size="mini", settings=list(settings))
    known = {"results": ROOT / "results", "runs": "1", "seed": None} | changes
    return launch.plan_run_set(loaded, **known)


@pytest.fixture
def result(tmp_path):
    checkpoint.write(tmp_path / "result_0.safetensors", {"a": torch.zeros(3)}, facts())
    return tmp_path / "result_0.txt"


def test_a_run_goes_on_with_its_seed_whatever_its_checkpoints(result):
    for named in (result, checkpoint_of(result)):
        found = resume.resume_run_set(run_set("checkpoint_every=9ba"), named, seed=None)
        assert found.seeds == (3,) and found.checkpoint == checkpoint_of(result)
    with pytest.raises(UserError, match="belongs to another run: seed is 3 there, 4 here"):
        resume.resume_run_set(run_set(), result, seed=4)


def test_a_checkpoint_of_another_run_than_the_named_one_is_refused(result):
    result.write_text(LOG.replace('"value": 3', '"value": 5'))
    with pytest.raises(UserError, match=r"result_0.safetensors: is of seed 3, but result_0.txt of seed 5"):
        resume.resume_run_set(run_set(), result, seed=None)
    result.write_text(LOG)
    assert resume.resume_run_set(run_set(), result, seed=None).seeds == (3,)


def test_a_checkpoint_may_be_read_by_those_who_may_enter_its_folder(result, monkeypatch):
    umask = os.umask(0o027)
    try:
        checkpoint.write(checkpoint_of(result), {}, facts())
    finally:
        os.umask(umask)
    assert checkpoint_of(result).stat().st_mode & 0o777 == 0o640

    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        resume.read_facts(checkpoint_of(result))


@pytest.mark.parametrize(
    ("saved", "asked", "difference"),
    [
        ({}, lambda: run_set("optimizer.learning_rate=0.5"), "optimizer.learning_rate is 0.002 there, 0.5"),
        ({}, lambda: run_set("methods.fused_qkv=false"), "methods.fused_qkv is {} there, missing here"),
        ({}, lambda: run_set(configuration="baseline"), "configuration is optimized there, baseline here"),
        ({}, lambda: run_set(num_ranks=2), "ranks is 1 there, 2 here"),
        ({"dataset_fingerprint": "00ff"}, run_set, "dataset_fingerprint is 00ff there"),
        ({"system": "another"}, run_set, "system is another there"),
        ({"system": "another", "log": f"# threads: 99\n{LOG}"}, run_set, "threads is 99 there"),
        ({"config": facts().config | {"size": "full"}}, run_set, "size is full there, mini here"),
    ],
    ids=["setting", "method", "configuration", "ranks", "data", "system", "threads", "size"],
)
def test_another_run_is_refused_with_the_first_difference(result, saved, asked, difference):
    checkpoint.write(checkpoint_of(result), {}, facts(**saved))
    with pytest.raises(UserError, match=f"belongs to another run: {difference}"):
        resume.resume_run_set(asked(), result, seed=None)


def test_what_is_no_checkpoint_is_refused(result, tmp_path):
    (tmp_path / "result_1.txt").touch()
    for name, why in (
        ("result_1", "no such checkpoint"),
        ("result_2", "no such result"),
        ("", "is a folder"),
    ):
        with pytest.raises(UserError, match=why):
            resume.resume_run_set(run_set(), tmp_path / (name and f"{name}.txt"), seed=None)
    with pytest.raises(UserError, match="--runs 1"):
        resume.resume_run_set(run_set(runs="2"), result, seed=None)
    whole = checkpoint_of(result).read_bytes()
    for content in (b"", b"text", whole[:-1], whole[:100], whole.replace(b"step", b"stop")):
        checkpoint_of(result).write_bytes(content)
        with pytest.raises(UserError, match="is not a checkpoint of ttt run"):
            resume.resume_run_set(run_set(), result, seed=None)


OUT_OF_RANGE = {"step": -5, "quality": 1.5, "saved": -1.0, "world_size": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "its step 0 is not one of"),
        ({"step": 10**9}, "its step 1,000,000,000 is not one of"),
        ({"random": ()}, "random states"),
        ({"log": ""}, "its log is not"),
        ({"log": LOG + "caf\u00e9\n"}, "its log is not"),
        ({"log": LOG + LOG.splitlines()[-1].replace("start", "stop")}, "its log is not"),
        ({"log": LOG.replace("3", "4")}, "another seed"),
        ({"epoch": 1}, "its epoch"),
        ({"started": 5.0}, "its times"),
        *(({key: number}, "is not a checkpoint of ttt run") for key, number in OUT_OF_RANGE.items()),
    ],
)
def test_facts_that_no_run_can_have_written_are_refused(result, change, message):
    text = json.dumps(json.loads(facts().model_dump_json()) | change)
    save_file({}, checkpoint_of(result), metadata={"facts": text, "facts_crc32": crc_of(text)})
    with pytest.raises(UserError, match=f"result_0.safetensors: .*{message}"):
        resume.resume_run_set(run_set(), result, seed=None)


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_refused(result):
    def training():
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(5)).sum().backward()
        optimizer.step()
        return SimpleNamespace(
            model=model,
            methods=[],
            optimizer=optimizer,
            device=torch.device("cpu"),
            rank_info=SINGLE_RANK,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
        )

    def resume_from(path):
        found = resume.resume_run_set(run_set(), path, seed=None)
        checkpoint.restore(training(), path, read_facts(found.checkpoint))

    path = checkpoint_of(result)
    tensors, states = checkpoint.capture(training())
    checkpoint.write(path, tensors, facts(random=tuple(states)))
    resume_from(path)
    whole = path.read_bytes()
    places = [*range(0, len(whole), 211), *range(len(whole) - 400, len(whole), 7)]
    assert len(places) > 60
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(UserError, match="result_0.safetensors: "):
            resume_from(path)


def test_a_resumed_run_that_died_before_its_own_checkpoint_goes_on_from_the_one_before(result, capsys):
    again, last, short = (result.with_name(f"result_{number}.txt") for number in (1, 2, 3))
    again.write_text(
        f"# command: ttt run a b\n{LOG}# --- resumed by\n# command: ttt run a b --resume {result}\n"
    )
    last.write_text(f"# command: ttt run a b --resume={checkpoint_of(again).name}\n")
    short.write_text(f"# command: ttt run a b --resu {last}\n")
    assert resume.find_resumed_result(result) is None
    for nothing in ("''", "/"):
        (other := result.with_name("result_4.txt")).write_text(f"# command: ttt run a b --resume {nothing}\n")
        assert resume.find_resumed_result(other) is None
    for path in (again, last, short):
        found = resume.resume_run_set(run_set(), path, seed=None)
        assert found.checkpoint == checkpoint_of(result)
        assert f"{path.name} has no checkpoint of its own" in capsys.readouterr().out
    checkpoint_of(result).unlink()
    result.write_text(f"# command: ttt run a b --resume {last}\n")  # a circle
    with pytest.raises(UserError, match="no such checkpoint"):
        resume.resume_run_set(run_set(), last, seed=None)


def test_a_full_disk_leaves_the_checkpoint_that_was_there(mount_disk):
    path = mount_disk("4m") / "result_0.safetensors"
    checkpoint.write(path, {"a": torch.ones(1000)}, facts(step=1))
    with pytest.raises((OSError, SafetensorError), match="No space left"):
        checkpoint.write(path, {"a": torch.ones(2_000_000)}, facts(step=2))
    assert read_facts(path).step == 1 and (load_file(path)["a"] == 1).all()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_on_a_full_disk_training_goes_on_and_the_log_says_so(mount_disk, capsys):
    small_disk = mount_disk("4m")
    run = checkpointed.start("language_bert", small_disk)
    batches = run.benchmark.train_batches()
    for step in range(2):  # the optimizer's state comes with the first
        save(run, step)
        run.train_step(next(batches), step)
    run.log.close()
    assert "no checkpoint before step 2, the one before stays" in capsys.readouterr().out
    kept, path = sorted(small_disk.iterdir())
    assert read_facts(kept).step == 0
    written, failed = records(path)
    assert (written["key"], written["value"], failed["value"]) == ("checkpoint", 0, 1)
    assert failed["key"] == "checkpoint_failed" and "No space left" in failed["metadata"]["reason"]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that was killed after a checkpoint, and the one that went on to the target after 40 steps."""
    folder = tmp_path_factory.mktemp("resumed")
    settings = ("language_bert", "optimized", *TINY, "target=0.01", "checkpoint_every=3ba")
    with open_place(folder) as place:
        first = place.start(*place.arguments(settings, "--seed", 5))
        path = place.until_logged('"checkpoint"')
        place.rank().kill()
        assert "aborted" in first.communicate(timeout=20)[1] and first.returncode == 1
        again = place.arguments(settings, "--resume", path)
        there = read_facts(checkpoint_of(path)).config["precision"]
        here = "fp32" if there == "bf16" else "bf16"
        with pytest.raises(UserError, match=f"precision is {there} there, {here} here"):
            dispatch([*again, "--set", f"precision={here}"])
        done = ttt(*again)
        assert done.returncode == 0, done.stderr
    return folder, path, path.with_name("result_1.txt")


@pytest.mark.slow
def test_a_killed_run_goes_on_in_a_new_result_that_says_so(resumed):
    _, interrupted, path = resumed
    before, after = records(interrupted), records(path)
    number = next(i for i, event in enumerate(after) if event["key"] == "resumed")
    event, step = after[number], after[number]["value"]
    assert after[:number] == before[:number] and before[-1]["metadata"]["status"] == "aborted"
    assert step % 3 == 0 and event["metadata"]["samples"] == 16 * step
    gap_ms = event["time_ms"] - before[number]["time_ms"]  # the checkpoint's own record
    assert gap_ms > 2000 and event["metadata"]["gap_ms"] == pytest.approx(gap_ms, abs=1000)
    keys = [each["key"] for each in after]
    assert all(keys.count(key) == 1 for key in ("run_start", "run_stop", "seed", "dataset_fingerprint"))
    start, stop = after[keys.index("run_start")], after[-1]
    assert stop["metadata"]["status"] == "success"
    duration = stop["time_ms"] - start["time_ms"]
    assert duration > gap_ms and stop["metadata"]["duration_ms"] == pytest.approx(duration, abs=500)
    assert "# --- resumed by" in path.read_text() and "--resume" in path.read_text()
    for content in (interrupted.read_bytes(), path.read_bytes()):
        assert is_chained(content) and read_chain(content).breaks == ()


@pytest.mark.slow
def test_the_audit_names_a_resumed_run_and_no_score_counts_it_unless_told_to(resumed):
    folder, interrupted, path = resumed
    found = [finding for entry in audit_paths([folder]) for finding in entry.findings]
    errors = {(Path(each.path).name, each.rule) for each in found if each.severity == "error"}
    assert errors == {("result_1.txt", "T215")}
    (both,) = read_sets([folder])
    alone, told = score(both), score(both, include_resumed=True)
    assert alone.minutes is None and len(alone.runs) == 1 and "1 resumed not counted" in alone.label
    assert told.minutes == pytest.approx(read_log(path).minutes) and len(told.runs) == 1
    done = ttt("score", folder, "--include-resumed")
    assert done.returncode == 0 and "1 of 1" in done.stdout and "1 resumed" in done.stdout


@pytest.mark.slow
def test_a_run_that_reached_its_target_leaves_no_checkpoint_and_the_killed_one_keeps_its_own(resumed):
    folder, interrupted, _ = resumed
    left = sorted(path.name for path in interrupted.parent.iterdir())
    results = ["result_0.safetensors", "result_0.txt", "result_1.txt"]
    assert left == [*results, "runs.jsonl", "runset.json"]
