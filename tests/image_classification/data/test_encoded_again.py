"""Training images that preparation encodes again: their sizes, the manifest, the loss in crops."""

from itertools import islice

import numpy as np
import pytest

from common.data import manifest
from common.errors import UserError
from image_classification.data.images import Record, decode, open_images, read_image
from image_classification.data.prepare import prepare
from tests.image_classification.imagenet import NUM_TRAIN, NUM_VALIDATION, config_for, prepared
from tests.image_classification.loading import (
    STEPS_PER_EPOCH,
    CountedImages,
    config_of,
    load,
    natural,
    smooth,
    write_images,
)

SHORTER_PX = 60
ENCODED = f"data.encoded_px={SHORTER_PX}"


def opened(directory):
    return (
        open_images(directory, part, num_samples=num_samples, num_classes=3, hint="")
        for part, num_samples in (("train", NUM_TRAIN), ("validation", NUM_VALIDATION))
    )


def test_larger_training_images_are_encoded_again_and_the_manifest_says_so(folders, tmp_path):
    prepared(tmp_path / "plain", folders)
    prepared(tmp_path / "small", folders, ENCODED)
    (plain, plain_validation), (train, validation) = (opened(tmp_path / name) for name in ("plain", "small"))
    before, after = ([min(part.size(one)) for one in range(NUM_TRAIN)] for part in (plain, train))
    assert after == [min(side, SHORTER_PX) for side in before] and min(before) < SHORTER_PX < max(before)
    for sample in range(NUM_TRAIN):
        assert decode(train, sample).size[::-1] == train.size(sample)
        assert (train.jpeg(sample) == plain.jpeg(sample)) == (before[sample] <= SHORTER_PX)
    for sample in range(NUM_VALIDATION):
        assert validation.jpeg(sample) == plain_validation.jpeg(sample)
    assert train.labels.tolist() == plain.labels.tolist()
    config, plain_config = (config_for(tmp_path / "small", *more) for more in ([ENCODED], []))
    assert f"--set {ENCODED}" in config.prepared_hint
    assert manifest.verify(tmp_path / "small", config.prepared_with(), hint="") == []
    (problem,) = manifest.verify(tmp_path / "small", plain_config.prepared_with(), hint="")
    assert f"made with data.encoded_px {SHORTER_PX}, the configuration says None" in problem
    facts = manifest.read_manifest(tmp_path / "plain", hint="")["facts"]
    assert "data.encoded_px" not in facts["settings"]


def test_whole_data_of_other_settings_are_not_replaced_but_damaged_ones_are(folders, tmp_path):
    directory = tmp_path / "full"
    digest = prepared(directory, folders)
    line = r"full/manifest\.json: made with data\.encoded_px None, the configuration says 60; .*--data DIR"
    for source in (folders, None):
        with pytest.raises(UserError, match=line):
            prepared(directory, source, ENCODED)
    assert prepared(directory, None) == digest
    (directory / "train.index.npy").unlink()
    assert prepared(directory, folders, ENCODED) != digest


def test_embedded_data_are_not_made_with_other_settings(tmp_path):
    for setting, there in ((ENCODED, "no such setting"), ("data.num_train_samples=99", "1437")):
        key, _, value = setting.partition("=")
        with pytest.raises(UserError, match=f"{key}: {value}, and .* size mini have {there}; leave it out"):
            prepare(tmp_path / "mini", config_of("baseline", "mini", setting))
    assert not (tmp_path / "mini").exists()


def test_a_stopped_preparation_goes_on_unless_the_size_differs(folders, tmp_path, monkeypatch, capsys):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("image_classification.data.prepare.shards.write_index", stop)
    outputs = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path / "small", folders, ENCODED)
        outputs.append(capsys.readouterr().out)
    work = tmp_path / ".small.part"
    num_shards = len(list(work.glob("data/*")))
    assert "finished already" not in outputs[0]
    assert f"{num_shards} of {num_shards} shards are finished already" in outputs[1]
    before = {path: path.stat().st_mtime_ns for path in work.glob("*/*")}
    line = rf"\.small\.part: {num_shards} shards are finished with data\.encoded_px 60, .* says "
    for setting, value in (([], "None"), (["data.encoded_px=50"], "50")):
        with pytest.raises(UserError, match=rf"{line}{value}; go on with --set {ENCODED}, or remove"):
            prepared(tmp_path / "small", folders, *setting)
    assert {path: path.stat().st_mtime_ns for path in work.glob("*/*")} == before


@pytest.mark.parametrize(("draw", "most"), [(smooth, 1.5), (natural, 4.0)])
def test_crops_of_resident_pixels_differ_by_little(draw, most, tmp_path):
    """Levels of 255, on average: images of 375 x 500 pixels, encoded again at 320, kept at 256."""
    original, small = tmp_path / "original", tmp_path / "small"
    original.mkdir()
    write_images(original, lambda rng, height, width: draw(rng, 375, 500))
    for path in original.glob("*/*"):
        stat = path.stat()
        record = Record("", path.name, str(path), 0, stat.st_size, stat.st_mtime_ns)
        target = small / path.relative_to(original)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(read_image(record, 320)[0])
    loaders = (load(CountedImages(directory), stored_px=256) for directory in (small, original))
    levels = []
    for one, other in islice(zip(*loaders, strict=False), 3 * STEPS_PER_EPOCH):
        assert one.samples.tolist() == other.samples.tolist()
        levels.append(float(abs(one.pixels - other.pixels).mean()) * 0.225 * 255)
    assert 0 < np.mean(levels) < most
