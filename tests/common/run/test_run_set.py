"""Order of samples, manifests of data, names and seeds of runs."""

import errno
import itertools
import os
import re
import signal
from dataclasses import replace

import numpy as np
import pytest

from common.data import manifest, sampler
from common.errors import UserError
from common.evidence.sealed.seal import read_sealed
from common.repository import ROOT
from common.run import launch, run_sets, supervision
from common.training import load as loading
from common.training.load import load_config

pytestmark = pytest.mark.usefixtures("usual_threads")
HARDWARE = "submission.hardware=reference-2cpu"


def planned(benchmark, results, *settings, runs="official", seed=None, cell=""):
    loaded = load_config(benchmark, "baseline", size="mini", settings=[HARDWARE, *settings])
    return launch.plan_run_set(loaded, results=results, runs=runs, seed=seed, cell=cell)


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide():
    order = sampler.epoch_order(101, seed=4, epoch=2)
    assert sorted(order) == list(range(101))
    for seed, epoch in itertools.product((4, 5), (2, 3)):
        other = sampler.epoch_order(101, seed=seed, epoch=epoch)
        assert np.array_equal(order, other) == ((seed, epoch) == (4, 2))


@pytest.mark.parametrize("start", [0, 1, 4, 5, 13])
def test_training_can_start_at_any_step_and_sees_the_same_batches(start):
    whole = list(itertools.islice(sampler.batches(52, 10, seed=1), 20))
    assert all(len(batch) == 10 for batch in whole)
    resumed = itertools.islice(sampler.batches(52, 10, seed=1, start_step=start), 20 - start)
    assert all(np.array_equal(one, other) for one, other in zip(whole[start:], resumed, strict=True))


def test_verify_finds_what_was_changed_and_an_edited_manifest_is_refused(tmp_path):
    file = tmp_path / "train" / "a.bin"
    file.parent.mkdir()
    file.write_bytes(b"12345")
    (tmp_path / "vocab.txt").write_text("x")
    digest = manifest.write_manifest(tmp_path, {"settings": {"data.max_seq_length": 128}})
    assert manifest.verify(tmp_path, {"data.max_seq_length": 128}, hint="") == []
    assert manifest.read_manifest(tmp_path, hint="")["fingerprint"] == digest
    (line,) = manifest.verify(tmp_path, {"data.max_seq_length": 160}, hint="")
    assert "128, the configuration says 160" in line
    for content, expected in ((b"12346", "SHA-256"), (b"123456", "6 bytes, expected 5")):
        file.write_bytes(content)
        assert expected in manifest.verify(tmp_path, {}, hint="")[0]
    file.rename(tmp_path / "b.bin")
    assert len(manifest.verify(tmp_path, {}, hint="")) == 2
    path = tmp_path / manifest.MANIFEST
    path.write_text(path.read_text().replace("128", "129"))
    with pytest.raises(UserError, match="does not belong"):
        manifest.verify(tmp_path, {}, hint="")


@pytest.mark.parametrize(("benchmark", "num_runs"), [("image_classification", 5), ("language_bert", 10)])
def test_official_run_sets_have_mlperfs_size_and_distinct_seeds(benchmark, num_runs, tmp_path):
    official = planned(benchmark, tmp_path)
    assert len(set(official.seeds)) == official.num_runs == num_runs
    counted = planned(benchmark, tmp_path, runs="3", seed=7)
    assert counted.seeds == (7, 8, 9) and counted.system.endswith("-mini-baseline")
    with pytest.raises(UserError, match="--runs x"):
        planned(benchmark, tmp_path, runs="x")


@pytest.mark.parametrize(
    ("benchmark", "name", "key"),
    [("image_classification", "resnet", "decoder"), ("language_bert", "bert", "budget")],
)
def test_a_study_made_before_a_key_existed_is_continued(benchmark, name, key, tmp_path):
    """The logs of the committed set, without one key of the configuration, as they were before that key."""
    of_the_set = ("precision=bf16", "evaluation_precision=bf16")
    run_set = planned(benchmark, tmp_path, *of_the_set, cell="baseline")
    run_set.directory.mkdir(parents=True)
    for path in (ROOT / "results" / run_set.system / name).glob("result_*.txt"):
        text = re.sub(rf"^# +{key}: .*\n", "", path.read_text(), flags=re.MULTILINE)
        assert text != path.read_text()
        (run_set.directory / path.name).write_text(text)
    assert run_sets.find_missing_runs(run_set).num_done == run_set.num_runs
    halved = planned(benchmark, tmp_path, *of_the_set, "budget=0.5", cell="baseline").loaded
    with pytest.raises(UserError, match=r"budget is 1.0 there, 0.5 now"):
        run_sets.find_missing_runs(replace(run_set, loaded=halved))


def test_a_resumed_run_does_not_fill_a_set(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "fast_precision", lambda: "bf16")  # that of the committed runs
    run_set = planned("language_bert", tmp_path, "precision=bf16", "evaluation_precision=bf16", runs="2")
    assert run_set.title == "language_bert baseline mini (a proxy)"
    run_set.directory.mkdir(parents=True)
    source = ROOT / "results" / run_set.system / "bert"
    whole = (source / "result_0.txt").read_text()
    resumed = re.sub(r'(.*"key": )"seed"(.*\n)', r'\g<0>\1"resumed"\2', whole)
    for number, text in enumerate((whole, resumed)):
        (run_set.directory / f"result_{number}.txt").write_text(text)
    missing = run_sets.find_missing_runs(run_set)
    assert (missing.num_done, missing.num_more, missing.first_index) == (1, 0, 2)


@pytest.mark.parametrize(
    "lines",
    [
        ["l0: &l0 {x: 1}", *(f"l{n}: &l{n} {{x: *l{n - 1}, y: *l{n - 1}}}" for n in range(1, 40))],
        ["when: 2024-13-45"],
        ["model: " + "[" * 250, *["[" * 250] * 5],
        ['model: "\\UFFFFFFFF"'],
        [""],
    ],
    ids=["aliases", "date", "brackets", "escape", "empty"],
)
def test_a_hostile_head_of_a_result_is_refused_in_one_line(lines, tmp_path):
    run_set = planned("language_bert", tmp_path, runs="2")
    source = ROOT / "results" / run_set.system / "bert" / "result_0.txt"
    records = "".join(line for line in source.read_text().splitlines(True) if not line.startswith("#"))
    head = "".join(f"#   {line}\n" for line in lines)
    launch.reserve(run_set.directory, None, f"# --- configuration\n{head}{records}")
    with pytest.raises(UserError, match=r"result_0.txt: "):
        run_sets.find_missing_runs(run_set)


@pytest.mark.parametrize(
    ("module", "name", "number", "file"),
    [(launch, "temporary_folder", errno.ENOSPC, "ttt-x"), (supervision, "Processes", errno.EAGAIN, None)],
    ids=["no room", "no process"],
)
def test_ranks_that_cannot_be_started_are_no_interruption(
    module, name, number, file, tmp_path, prepared_data, monkeypatch, capsys
):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number), file)

    monkeypatch.setattr(module, name, fail)
    why = f"{os.strerror(number)} ({file or 'starting the ranks'})"
    run_set = planned("image_classification", tmp_path, runs="2")
    assert run_sets.run_all([run_set], [], fail_fast=False) == 2
    out, err = capsys.readouterr()
    assert f"error: {why}; the clock had not started" in err
    assert "of 2 runs 1 failed, 1 not run" in out and not list(run_set.directory.glob("result_*.txt"))
    _, ended = read_sealed(run_set.directory).events[-1]
    assert (ended.outcome, ended.reason) == ("refused", why)


def test_a_run_that_ends_as_a_signal_arrives_is_counted(tmp_path, prepared_data, monkeypatch, capsys):
    def close_as_ctrl_c_arrives(*_):
        signal.raise_signal(signal.SIGINT)
        return launch.Ended(0, "converged")

    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: (0, ""))
    monkeypatch.setattr(launch, "close_log", close_as_ctrl_c_arrives)
    run_set = planned("image_classification", tmp_path, runs="2")
    with pytest.raises(KeyboardInterrupt):
        run_sets.run_all([run_set], [], fail_fast=False)
    assert "of 2 runs 1 converged, 1 not run" in capsys.readouterr().out
