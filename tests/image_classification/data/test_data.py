"""The embedded digits and the loader: layout, repair, errors, order."""

import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

from common.data import manifest as fingerprint
from common.data.preparation import data_fingerprint
from common.errors import UserError
from image_classification.benchmark import Benchmark
from image_classification.data.prepare import prepare
from tests.image_classification.loading import config_of


def mini(directory: Path, *settings: str, seed: int = 1) -> Benchmark:
    where = [f"data.directory={directory}", *settings]
    config = config_of("baseline", "mini", *where)
    return Benchmark(config, seed=seed)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits") / "mini"
    prepare(directory, mini(directory).config)
    return directory


@pytest.fixture
def own_copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "mini"))


def test_prepared_digits_verify_and_hold_both_parts(prepared: Path) -> None:
    assert fingerprint.verify(prepared, {}, hint="") == []
    manifest = fingerprint.read_manifest(prepared, hint="")
    assert manifest["facts"] == {
        "settings": {"data.num_train_samples": 1437, "data.num_evaluation_samples": 360}
    }
    names = [name.split("/") for name in manifest["files"]]
    assert sum(part == "validation" for part, _, _ in names) == 360
    per_digit = [sum(part == "validation" and digit == str(i) for part, digit, _ in names) for i in range(10)]
    assert min(per_digit) >= 34 and max(per_digit) <= 38  # stratified
    assert len({name for _, _, name in names}) == 1797
    assert data_fingerprint(mini(prepared).config) == manifest["fingerprint"]


def test_damage_is_repaired_to_the_same_fingerprint(own_copy: Path) -> None:
    before = fingerprint.read_manifest(own_copy, hint="")["fingerprint"]
    victim = next(own_copy.rglob("*.jpg"))
    victim.write_bytes(b"damaged")
    assert fingerprint.verify(own_copy, {}, hint="")
    assert prepare(own_copy, mini(own_copy).config) == before
    assert fingerprint.verify(own_copy, {}, hint="") == []
    assert [path.name for path in own_copy.parent.iterdir()] == ["mini"]


def test_a_damaged_image_is_named(own_copy: Path) -> None:
    benchmark = mini(own_copy)
    victim = sorted((own_copy / "validation" / "0").iterdir())[0]
    content = victim.read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]  # decodes, to other pixels
    for damaged in (flipped, content[: len(content) // 2], b"not a JPEG", b""):
        victim.write_bytes(damaged)
        with pytest.raises(UserError, match=f"validation/0/{victim.name}: its content has changed"):
            next(benchmark.evaluation_batches())


def test_a_wrong_count_says_how_to_prepare(own_copy: Path) -> None:
    next((own_copy / "train" / "3").iterdir()).unlink()
    with pytest.raises(UserError, match="1436 images, expected 1437.*ttt data prepare"):
        next(mini(own_copy).train_batches())


def test_evaluation_sees_every_image_once_with_its_label(prepared: Path) -> None:
    batches = list(mini(prepared, "evaluation_batch_size=100").evaluation_batches())
    assert [batch.num_samples for batch in batches] == [100, 100, 100, 60]
    labels = torch.cat([batch.targets["labels"] for batch in batches])
    assert labels.equal(labels.sort().values)
    assert batches[3].inputs["x"].shape == (60, 3, 112, 112)


def test_training_batches_depend_on_the_seed_and_the_epoch_alone(prepared: Path) -> None:
    settings = ("global_batch_size=700", "data.train_crop_px=64")
    batches = list(islice(mini(prepared, *settings).train_batches(), 4))
    again, other = (next(mini(prepared, *settings, seed=seed).train_batches()) for seed in (1, 2))
    assert again.inputs["x"].equal(batches[0].inputs["x"])
    assert again.targets["labels"].equal(batches[0].targets["labels"])
    assert not other.inputs["x"].equal(again.inputs["x"])
    means = [{float(image.sum()) for image in batch.inputs["x"].double()} for batch in batches]
    assert len(means[0] | means[1]) > 1395  # nearly all of 1400 differ
    assert len((means[0] | means[1]) & (means[2] | means[3])) < 10
    resident = mini(prepared, "data.loader=resident", *settings).train_batches()
    for expected, found in zip(batches[:3], islice(resident, 3), strict=True):  # into the second epoch
        assert found.targets["labels"].equal(expected.targets["labels"])
        difference = (found.inputs["x"].float() - expected.inputs["x"]).abs().mean()
        assert difference < 0.03  # of a standard deviation of ImageNet's pixels; other crops differ by 0.5
        assert found.inputs["x"].is_contiguous(memory_format=torch.channels_last)


def test_resident_images_that_do_not_fit_are_refused_before_the_start(prepared: Path) -> None:
    benchmark = mini(prepared, "data.loader=resident", "data.stored_px=100000")
    with pytest.raises(UserError, match="GiB of decoded pixels needed.*data.loader=workers"):
        benchmark.prepare_loader()


def test_an_empty_folder_changes_no_label(own_copy: Path) -> None:
    (own_copy / "train" / ".ipynb_checkpoints").mkdir()
    assert fingerprint.verify(own_copy, {}, hint="") == []
    labels = next(mini(own_copy, "global_batch_size=700").train_batches()).targets["labels"]
    assert set(labels.tolist()) == set(range(10))
