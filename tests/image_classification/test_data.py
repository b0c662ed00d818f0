"""The embedded digits and the loader: layout, repair, errors, order."""

import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop

from common import fingerprint
from common.config import load
from common.errors import UserError
from image_classification.benchmark import Benchmark
from image_classification.data.image_folder import crop_box, normalize, one_ahead, sample_generator
from image_classification.data.prepare import prepare


def mini(directory: Path, *settings: str, seed: int = 1) -> Benchmark:
    where = [f"data.directory={directory}", *settings]
    config = load("image_classification", "baseline", size="mini", settings=where).config
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
    assert mini(prepared).fingerprint() == manifest["fingerprint"]


def test_damage_is_repaired_to_the_same_fingerprint(own_copy: Path) -> None:
    before = fingerprint.read_manifest(own_copy, hint="")["fingerprint"]
    victim = next(own_copy.rglob("*.jpg"))
    victim.write_bytes(b"damaged")
    assert fingerprint.verify(own_copy, {}, hint="")
    assert prepare(own_copy, mini(own_copy).config) == before
    assert fingerprint.verify(own_copy, {}, hint="") == []
    assert [path.name for path in own_copy.parent.iterdir()] == ["mini"]


def test_an_intact_folder_is_left_alone(prepared: Path) -> None:
    before = (prepared / "manifest.json").stat().st_mtime_ns
    prepare(prepared, mini(prepared).config)
    assert (prepared / "manifest.json").stat().st_mtime_ns == before


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not replaced"):
        prepare(tmp_path, mini(tmp_path).config)
    assert (tmp_path / "thesis.txt").exists()


def test_full_size_needs_images_and_describes_a_tree(tmp_path: Path) -> None:
    settings = [f"data.directory={tmp_path}", "data.num_train_samples=2048", "data.num_evaluation_samples=1"]
    config = load("image_classification", "baseline", size="full", settings=settings).config
    with pytest.raises(UserError, match="data.directory"):
        prepare(tmp_path, config)
    for part in ("train", "validation"):
        (tmp_path / part / "n01440764").mkdir(parents=True)
    (tmp_path / "validation/n01440764/a.JPEG").touch()
    with pytest.raises(UserError, match="'train': 2048"):
        prepare(tmp_path, config)
    for number in range(2048):
        (tmp_path / f"train/n01440764/{number}.JPEG").touch()
    digest = prepare(tmp_path, config)
    assert prepare(tmp_path, config) == digest
    (tmp_path / "train/n01440764/0.JPEG").write_text("x")
    with pytest.raises(UserError, match="differs from its manifest"):
        prepare(tmp_path, config)


def test_a_damaged_image_is_named(own_copy: Path) -> None:
    benchmark = mini(own_copy)
    victim = sorted((own_copy / "validation" / "0").iterdir())[0]
    content = victim.read_bytes()
    for damaged in (content[: len(content) // 2], b"not a JPEG", b""):
        victim.write_bytes(damaged)
        with pytest.raises(UserError, match=f"validation/0/{victim.name}: cannot be decoded"):
            next(benchmark.evaluation_batches())


def test_wrong_counts_name_expected_and_found(own_copy: Path) -> None:
    next((own_copy / "train" / "3").iterdir()).unlink()
    with pytest.raises(UserError, match="1436 images, expected 1437.*ttt data prepare"):
        next(mini(own_copy).train_batches())
    with pytest.raises(UserError, match="10 classes, expected 9"):
        next(mini(own_copy, "model.num_classes=9").evaluation_batches())
    with pytest.raises(UserError, match="no such folder"):
        next(mini(own_copy / "absent").train_batches())


def test_evaluation_sees_every_image_once_in_order(prepared: Path) -> None:
    batches = list(mini(prepared, "evaluation_batch_size=100").evaluation_batches())
    assert [batch.num_samples for batch in batches] == [100, 100, 100, 60]
    labels = torch.cat([batch.targets["labels"] for batch in batches])
    assert labels.equal(labels.sort().values) and len(labels) == 360
    for batch in batches:
        images = batch.inputs["x"]
        assert images.shape == (batch.num_samples, 3, 128, 128) and images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_training_batches_depend_on_the_seed_alone(prepared: Path) -> None:
    first, again, other = (next(mini(prepared, seed=seed).train_batches()) for seed in (1, 1, 2))
    assert first.inputs["x"].equal(again.inputs["x"])
    assert not first.inputs["x"].equal(other.inputs["x"])
    assert first.inputs["x"].shape == (32, 3, 128, 128)
    assert first.inputs["x"].is_contiguous(memory_format=torch.channels_last)
    assert first.targets["labels"].equal(again.targets["labels"])


def test_an_epoch_holds_different_samples_and_the_next_other_crops(prepared: Path) -> None:
    settings = ("global_batch_size=700", "data.train_crop_px=32")
    batches = list(islice(mini(prepared, *settings).train_batches(), 4))
    means = [{float(image.sum()) for image in batch.inputs["x"].double()} for batch in batches]
    assert len(means[0] | means[1]) > 1395  # nearly all of 1400 differ
    assert len((means[0] | means[1]) & (means[2] | means[3])) < 10


def test_crop_of_a_sample_does_not_depend_on_the_order() -> None:
    forward = [crop_box(144, 144, sample_generator(3, 1, i), min_area=0.25) for i in range(50)]
    backward = [crop_box(144, 144, sample_generator(3, 1, i), min_area=0.25) for i in range(49, -1, -1)]
    assert forward == backward[::-1]
    assert len(set(forward)) > 45
    assert forward != [crop_box(144, 144, sample_generator(3, 2, i), min_area=0.25) for i in range(50)]


def test_crops_keep_area_and_aspect_ratio() -> None:
    rng = np.random.default_rng(0)
    fractions = []
    for _ in range(2000):
        top, left, height, width = crop_box(375, 500, rng, min_area=0.08)
        assert 0 <= top <= 375 - height and 0 <= left <= 500 - width
        assert 0.7 < width / height < 1.4  # 3/4 to 4/3, rounded to pixels
        fractions.append(height * width / (375 * 500))
    assert min(fractions) > 0.078 and max(fractions) <= 1
    torch.manual_seed(0)
    boxes = [
        RandomResizedCrop.get_params(torch.empty(3, 375, 500), [0.08, 1.0], [3 / 4, 4 / 3])
        for _ in range(2000)
    ]
    expected = np.mean([height * width for _, _, height, width in boxes]) / (375 * 500)
    assert np.mean(fractions) == pytest.approx(expected, abs=0.02)  # four standard errors are 0.02


@pytest.mark.parametrize(("size", "box"), [((10, 1000), (0, 494, 10, 13)), ((1000, 10), (494, 0, 13, 10))])
def test_crops_that_never_fit_become_the_centre(size: tuple[int, int], box: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    top, left, height, width = crop_box(*size, rng, min_area=0.9)
    assert (height, width) == box[2:]
    assert abs(top - box[0]) <= 1 and abs(left - box[1]) <= 1


def test_normalisation_is_imagenets() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 3, 4, 4)
    black, white = normalize(images)[:, :, 0, 0].double()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(black.float(), -mean / std)
    torch.testing.assert_close(white.float(), (1 - mean) / std)


def test_an_error_in_the_second_thread_is_raised_here() -> None:
    def build(item: int) -> int:
        if item == 2:
            raise UserError("broken")
        return item

    batches = one_ahead(build, range(5))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(UserError, match="broken"):
        next(batches)
