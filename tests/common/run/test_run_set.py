"""Order of samples, fingerprints of data, names and seeds of runs."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from common.data import manifest as fingerprint
from common.data import sampler
from common.errors import UserError
from common.repository import ROOT
from common.run import launch, run_sets
from common.training.load import load_config


@pytest.fixture(autouse=True)
def usual_threads(monkeypatch):
    """The tests run with OMP_NUM_THREADS=1, which is no machine's usual way."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide():
    order = sampler.epoch_order(101, seed=4, epoch=2)
    assert sorted(order) == list(range(101))
    assert np.array_equal(order, sampler.epoch_order(101, seed=4, epoch=2))
    assert not np.array_equal(order, sampler.epoch_order(101, seed=5, epoch=2))
    assert not np.array_equal(order, sampler.epoch_order(101, seed=4, epoch=3))


@pytest.mark.parametrize("start", [0, 1, 4, 5, 13])
def test_training_can_start_at_any_step_and_sees_the_same_batches(start):
    whole = list(itertools.islice(sampler.batches(52, 10, seed=1), 20))
    assert all(len(batch) == 10 for batch in whole)
    resumed = itertools.islice(sampler.batches(52, 10, seed=1, start_step=start), 20 - start)
    assert all(np.array_equal(one, other) for one, other in zip(whole[start:], resumed, strict=True))


def make_data(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.bin").write_bytes(b"12345")
    (tmp_path / "vocab.txt").write_text("x")
    return fingerprint.write_manifest(tmp_path, {"num": 3})


def test_verify_finds_a_changed_missing_or_extra_byte(tmp_path):
    digest = make_data(tmp_path)
    assert fingerprint.verify(tmp_path, {}, hint="") == []
    assert fingerprint.read_manifest(tmp_path, hint="")["fingerprint"] == digest
    file = tmp_path / "train" / "a.bin"
    for content, expected in ((b"12346", "SHA-256"), (b"123456", "6 bytes, expected 5")):
        file.write_bytes(content)
        assert expected in fingerprint.verify(tmp_path, {}, hint="")[0]
    file.rename(tmp_path / "b.bin")
    assert len(fingerprint.verify(tmp_path, {}, hint="")) == 2


def test_data_made_with_other_settings_are_told(tmp_path):
    make_data(tmp_path)
    fingerprint.write_manifest(tmp_path, {"settings": {"data.max_seq_length": 128}})
    assert fingerprint.verify(tmp_path, {"data.max_seq_length": 128}, hint="") == []
    assert (
        "128, the configuration says 160"
        in fingerprint.verify(tmp_path, {"data.max_seq_length": 160}, hint="")[0]
    )


def test_a_manifest_that_was_edited_is_refused(tmp_path):
    make_data(tmp_path)
    manifest = tmp_path / fingerprint.MANIFEST
    manifest.write_text(manifest.read_text().replace('"num": 3', '"num": 4'))
    with pytest.raises(UserError, match="does not belong"):
        fingerprint.verify(tmp_path, {}, hint="")


def test_a_result_is_reserved_once_and_never_overwritten(tmp_path):
    names = [launch.reserve(tmp_path / "bert", None).name for _ in range(3)]
    assert names == ["result_0.txt", "result_1.txt", "result_2.txt"]
    with pytest.raises(UserError, match="never overwritten"):
        launch.reserve(tmp_path / "bert", 1)
    (tmp_path / "bert" / "result_1.txt").unlink()
    assert launch.reserve(tmp_path / "bert", None).name == "result_1.txt"


def test_official_run_sets_have_mlperfs_size_and_distinct_seeds(tmp_path):
    for benchmark, expected in (("image_classification", 5), ("language_bert", 10)):
        loaded = load_config(benchmark, "baseline", size="mini", settings=[])
        drawn = launch.plan_run_set(loaded, results=tmp_path, runs="official", seed=None)
        assert len(set(drawn.seeds)) == drawn.num_runs == expected
        counted = launch.plan_run_set(loaded, results=tmp_path, runs="3", seed=7)
        assert counted.seeds == (7, 8, 9)
        assert counted.system.endswith("-mini-baseline")
    with pytest.raises(UserError, match="--runs x"):
        launch.plan_run_set(loaded, results=tmp_path, runs="x", seed=None)


@pytest.mark.parametrize(
    ("benchmark", "name", "key"),
    [("image_classification", "resnet", "decoder"), ("language_bert", "bert", "budget")],
)
def test_a_study_made_before_a_key_existed_is_continued(benchmark, name, key, tmp_path):
    """The logs of the committed set, without one key of the configuration, as they were before that key."""
    system = "reference-2cpu-mini-baseline"
    for path in (ROOT / "results" / system / name).glob("result_*.txt"):
        text = re.sub(rf"^# +{key}: .*\n", "", path.read_text(), flags=re.MULTILINE)
        assert text != path.read_text()
        copy = tmp_path / system / name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    loaded = load_config(benchmark, "baseline", size="mini", settings=["submission.hardware=reference-2cpu"])
    planned = launch.plan_run_set(loaded, results=tmp_path, runs="official", seed=None, cell="baseline")
    assert run_sets.find_missing_runs(planned).num_done == planned.num_runs
    halved = load_config(
        benchmark, "baseline", size="mini", settings=["submission.hardware=reference-2cpu", "budget=0.5"]
    )
    with pytest.raises(UserError, match=r"budget is 1.0 there, 0.5 now"):
        run_sets.find_missing_runs(replace(planned, loaded=halved))


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
    loaded = load_config(
        "language_bert", "baseline", size="mini", settings=["submission.hardware=reference-2cpu"]
    )
    planned = launch.plan_run_set(loaded, results=tmp_path, runs="2", seed=None)
    source = ROOT / "results" / planned.system / "bert" / "result_0.txt"
    records = "".join(line for line in source.read_text().splitlines(True) if not line.startswith("#"))
    head = "".join(f"#   {line}\n" for line in lines)
    planned.directory.mkdir(parents=True)
    (planned.directory / "result_0.txt").write_text(f"# --- configuration\n{head}{records}")
    with pytest.raises(UserError, match=r"result_0.txt: "):
        run_sets.find_missing_runs(planned)
