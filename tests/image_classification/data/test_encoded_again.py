"""Training images that preparation encodes again: their sizes, what the manifest says, what crops lose."""

from itertools import islice

import numpy as np
import pytest

from common.data import manifest
from image_classification.data.images import Record, decode, open_images, read_image
from image_classification.data.prepare import prepare
from tests.image_classification.loading import (
    NUM_IMAGES,
    STEPS_PER_EPOCH,
    CountedImages,
    config_of,
    load,
    natural,
    smooth,
    write_images,
)

SHORTER_PX = 150
SYNSETS = ("n01440764", "n01443537")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two classes of images of 120 to 200 pixels, to train on and to evaluate."""
    directory = tmp_path_factory.mktemp("source")
    for part in ("train", "validation"):
        (directory / part).mkdir()
        write_images(directory / part)
        for number, synset in enumerate(SYNSETS):
            (directory / part / str(number)).rename(directory / part / synset)
    return directory


def prepared(source, directory, *settings):
    """Prepare the source in shards of about five images; returns the configuration and both parts."""
    counts = [f"data.num_{part}_samples={NUM_IMAGES}" for part in ("train", "evaluation")]
    named = [f"data.directory={directory}", "model.num_classes=2", "global_batch_size=2", *counts, *settings]
    config = config_of("baseline", "full", *named)
    prepare(directory, config, source, shard_bytes=40_000)
    parts = (
        open_images(directory, part, num_samples=NUM_IMAGES, num_classes=2, hint="")
        for part in ("train", "validation")
    )
    return config, *parts


def test_larger_training_images_are_encoded_again_and_the_manifest_says_so(source, tmp_path):
    plain_config, plain, plain_validation = prepared(source, tmp_path / "plain")
    config, train, validation = prepared(source, tmp_path / "small", f"data.encoded_px={SHORTER_PX}")
    before, after = ([min(part.size(one)) for one in range(NUM_IMAGES)] for part in (plain, train))
    assert after == [min(side, SHORTER_PX) for side in before] and min(before) < SHORTER_PX < max(before)
    for sample in range(NUM_IMAGES):
        assert decode(train, sample).size[::-1] == train.size(sample)
        assert (train.jpeg(sample) == plain.jpeg(sample)) == (before[sample] <= SHORTER_PX)
        assert validation.jpeg(sample) == plain_validation.jpeg(sample)
    assert train.labels.tolist() == plain.labels.tolist()
    assert f"--set data.encoded_px={SHORTER_PX}" in config.prepared_hint
    assert manifest.verify(tmp_path / "small", config.prepared_with(), hint="") == []
    (problem,) = manifest.verify(tmp_path / "small", plain_config.prepared_with(), hint="")
    assert f"made with data.encoded_px {SHORTER_PX}, the configuration says None" in problem
    facts = manifest.read_manifest(tmp_path / "plain", hint="")["facts"]
    assert "data.encoded_px" not in facts["settings"]


def test_a_stopped_preparation_goes_on_unless_the_size_differs(source, tmp_path, monkeypatch, capsys):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("image_classification.data.prepare.shards.write_index", stop)
    outputs = []
    for encoded_px in (SHORTER_PX, SHORTER_PX, 130):
        with pytest.raises(KeyboardInterrupt):
            prepared(source, tmp_path / "small", f"data.encoded_px={encoded_px}")
        outputs.append(capsys.readouterr().out)
    num_shards = {part: len(list(tmp_path.glob(f".small.part/data/{part}*"))) for part in ("train", "")}
    assert "finished already" not in outputs[0]
    assert f"{num_shards['']} of {num_shards['']} shards are finished already" in outputs[1]
    validation = num_shards[""] - num_shards["train"]
    assert f"{validation} of {num_shards['']} shards are finished already" in outputs[2]


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
