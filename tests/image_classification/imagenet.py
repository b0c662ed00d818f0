"""A small ImageNet of three classes: its images, the forms in which people have them, its preparation."""

import io
import json
import shutil
import tarfile
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from common.errors import UserError
from image_classification.data.prepare import prepare
from tests.image_classification.loading import config_of

SYNSETS = ("n01440764", "n01443537", "n02119789")
NUM_CLASSES, NUM_TRAIN, NUM_VALIDATION = 3, 24, 9
SHARD_BYTES = 20_000


def settings_of(directory, num_train=NUM_TRAIN, num_validation=NUM_VALIDATION, num_classes=NUM_CLASSES):
    return [
        f"data.directory={directory}",
        f"data.num_train_samples={num_train}",
        f"data.num_evaluation_samples={num_validation}",
        f"model.num_classes={num_classes}",
        "global_batch_size=8",
    ]


def config_for(directory, *settings, **counts):
    return config_of("baseline", "full", *settings_of(directory, **counts), *settings)


def prepared(directory, source, *settings, **counts):
    return prepare(directory, config_for(directory, *settings, **counts), source, shard_bytes=SHARD_BYTES)


def refuses(key_words, directory, source, **counts):
    with pytest.raises(UserError, match=key_words) as raised:
        prepared(directory, source, **counts)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def needs_room(num_bytes, directory, source, monkeypatch):
    """Assert that a preparation needs a disk with so many free bytes, and writes nothing on a fuller one."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes - 1))
    refuses(r"needs 0.00 GiB, but the disk has 0.00 GiB free", directory, source)
    assert not [*directory.parent.rglob("*.shard"), *directory.parent.rglob("*.arrow")]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))
    prepared(directory, source)


def content_of(directory):
    """Return the bytes of every prepared file, and the manifest without the form of its source."""
    content = {path.name: path.read_bytes() for path in directory.iterdir()}
    manifest = json.loads(content["manifest.json"])
    del manifest["source"]
    return content | {"manifest.json": manifest}


def jpeg(number, mode="RGB", form="JPEG"):
    rng = np.random.default_rng(number)
    height, width = rng.integers(40, 80, 2).tolist()
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if number % 2:
        pixels = np.broadcast_to(np.linspace(0, 255, width, dtype=np.uint8)[:, None], (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).convert(mode).save(file, form)
    return file.getvalue()


@cache
def images_of(part):
    """Return (name, synset, content) of every image of a part, in the order of the names."""
    if part == "validation":
        synsets = {number: SYNSETS[(number * 5 + number // 3) % 3] for number in range(1, NUM_VALIDATION + 1)}
        return [
            (f"ILSVRC2012_val_{number:08}.JPEG", synset, jpeg(100 + number))
            for number, synset in synsets.items()
        ]
    odd = {3: ("L", "JPEG"), 10: ("CMYK", "JPEG"), 17: ("RGB", "PNG")}  # as in ImageNet
    synsets = {number: SYNSETS[number % 3] for number in range(NUM_TRAIN)}
    return [
        (f"{synset}_{number}.JPEG", synset, jpeg(number, *odd.get(number, ())))
        for number, synset in synsets.items()
    ]


def all_images():
    """Return the images of each part, shuffled."""
    rng, parts = np.random.default_rng(0), {part: images_of(part) for part in ("train", "validation")}
    return {
        part: [images[number] for number in rng.permutation(len(images))] for part, images in parts.items()
    }


def write_folders(source):
    for part, folder in (("train", "train"), ("validation", "val")):
        for name, synset, content in images_of(part):
            path = source / folder / synset / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return source


def tar_of(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def write_tars(source):
    of_class = {synset: {} for synset in reversed(SYNSETS)}
    for name, synset, content in images_of("train"):
        of_class[synset][name] = content
    classes = {f"{synset}.tar": tar_of(files) for synset, files in of_class.items()}
    (source / "ILSVRC2012_img_train.tar").write_bytes(tar_of(classes))
    validation = images_of("validation")
    packed = tar_of({name: content for name, _, content in reversed(validation)})
    (source / "ILSVRC2012_img_val.tar").write_bytes(packed)
    (source / "validation_synsets.txt").write_text("".join(f"{synset}\n" for _, synset, _ in validation))
    return source


def write_webdataset(source, names=lambda name, number: name.partition(".")[0]):
    """Write both parts as tars of at most ten samples, each a .jpg and a .cls beside other members."""
    for part, images in all_images().items():
        for first in range(0, len(images), 10):
            files = {}
            for number, (name, synset, content) in enumerate(images[first : first + 10], first):
                key = names(name, number)
                files[f"{key}.cls"] = str(SYNSETS.index(synset)).encode()
                files[f"{key}.jpg"], files[f"{key}.json"] = content, b"{}"
            (source / f"imagenet1k-{part}-{first:04}.tar").write_bytes(tar_of(files))
    return source
