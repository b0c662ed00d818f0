"""Shards: what is written is what is read, and damage is named."""

import io
import multiprocessing
import os
import pickle
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.data.shards import read_index
from common.errors import UserError
from image_classification.data.images import decode, open_images
from image_classification.data.shards import (
    EncodedImage,
    Shards,
    index_path,
    shard_path,
    split_by_bytes,
    write_shard,
)
from tests.image_classification.imagenet import jpeg

NUM_SAMPLES, NUM_CLASSES = 24, 3


def encoded(number):
    content = jpeg(number)
    width, height = Image.open(io.BytesIO(content)).size
    return EncodedImage(content, number % NUM_CLASSES, height, width)


@pytest.fixture
def images():
    return [encoded(number) for number in range(NUM_SAMPLES)]


@pytest.fixture
def directory(tmp_path, images):
    lengths = [len(image.content) for image in images]
    rows = [
        write_shard(shard_path(tmp_path, "train", number), number, images[members])
        for number, members in enumerate(split_by_bytes(lengths, 12_000))
    ]
    assert len(rows) >= 4
    np.save(index_path(tmp_path, "train"), np.concatenate(rows), allow_pickle=False)
    return tmp_path


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def opened(directory, num_samples=NUM_SAMPLES, num_classes=NUM_CLASSES):
    return open_images(
        directory, "train", num_samples=num_samples, num_classes=num_classes, hint="prepare again"
    )


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([5, 5, 5], [(0, 2), (2, 3)]),
        ([99, 1, 9, 1], [(0, 1), (1, 3), (3, 4)]),
        ([0, 0, 11, 0], [(0, 2), (2, 3), (3, 4)]),
    ],
)
def test_a_shard_holds_as_many_images_as_fit_and_at_least_one(lengths, expected):
    assert [(members.start, members.stop) for members in split_by_bytes(lengths, 10)] == expected


def test_every_sample_is_read_back_with_its_label_size_and_record(directory, images):
    shards = opened(directory)
    assert isinstance(shards, Shards) and len(shards) == NUM_SAMPLES
    assert shards.labels.dtype == np.int64 and shards.labels.tolist() == [image.label for image in images]
    numbers = shards.index["shard"].tolist()
    for sample, (image, number) in enumerate(zip(images, numbers, strict=True)):
        assert shards.jpeg(sample) == image.content
        assert shards.size(sample) == (image.height, image.width) == decode(shards, sample).size[::-1]
        record = sample - numbers.index(number)
        assert shards.where(sample) == f"{directory}/train-{number:05}.shard record {record}"
    whole = b"".join(path.read_bytes() for path in sorted(directory.glob("*.shard")))
    assert whole == b"".join(image.content for image in images)


def send_crcs(shards, samples, queue):
    queue.put([zlib.crc32(shards.jpeg(sample)) for sample in samples])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_threads_forked_workers_and_pickled_copies_read_the_same(directory, images):
    shards = opened(directory)
    samples = np.random.default_rng(0).integers(NUM_SAMPLES, size=2000).tolist()
    expected = [images[sample].content for sample in samples]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(shards.jpeg, samples)) == expected
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    workers = [fork.Process(target=send_crcs, args=(shards, samples, queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for _ in workers:
        assert queue.get() == [zlib.crc32(content) for content in expected]
    for worker in workers:
        worker.join()
    copy, descriptors = pickle.loads(pickle.dumps(shards)), list(shards.descriptors)
    del shards  # which closes its files
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)
    assert [copy.jpeg(sample) for sample in samples] == expected


def test_one_changed_bit_is_named_with_shard_and_record(directory, images):
    content = bytearray(shard_path(directory, "train", 1).read_bytes())
    content[-1] ^= 1
    shard_path(directory, "train", 1).write_bytes(content)
    shards = opened(directory)
    numbers = shards.index["shard"].tolist()
    victim = NUM_SAMPLES - 1 - numbers[::-1].index(1)  # the last of shard 1
    record = victim - numbers.index(1)
    with pytest.raises(UserError, match=rf"train-00001.shard record {record}: .*CRC differs.*prepare again"):
        shards.jpeg(victim)
    assert all(shards.jpeg(s) == images[s].content for s in range(NUM_SAMPLES) if s != victim)


def test_an_index_that_is_damaged_anywhere_in_its_head_is_named(directory):
    path = directory / "train.index.npy"
    whole, dtype = path.read_bytes(), np.load(path).dtype
    num_named = 0
    for place in range(120):
        for bit in (1, 8, 32):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            try:
                read_index(path, dtype)
            except UserError as error:
                assert str(error).startswith(f"{path}: ")
                num_named += 1
    assert num_named > 340  # of 360: some damages leave an index


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-00002.shard", cut, r"\d+ bytes, its index says \d+"),
        ("train-00002.shard", lambda path: path.write_bytes(bytes(100)), "100 bytes, its index says"),
        ("train-00002.shard", Path.unlink, "cannot be opened .No such file"),
        ("train.index.npy", cut, "cannot be read"),
        ("train.index.npy", lambda path: path.write_bytes(b""), "cannot be read"),
        ("train.index.npy", lambda path: np.save(path, np.zeros(3)), "not an index"),
        ("train.index.npy", lambda path: np.save(path, np.load(path)[:0]), "not an index"),
        ("train.index.npy", lambda path: np.save(path, np.array([{}], dtype=object)), "cannot be read"),
        ("train.index.npy", lambda path: np.save(path, np.load(path)[::-1]), "not numbered in order"),
    ],
)
def test_a_damaged_file_is_named_on_opening(directory, name, damage, message):
    damage(directory / name)
    with pytest.raises(UserError, match=rf"{name}: .*{message}.*prepare again"):
        opened(directory)


def test_without_an_index_a_folder_per_class_is_opened(directory, images, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("folders")
    for number, image in enumerate(images):
        path = tmp_path / "train" / f"class_{image.label}" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.content)
    folder = opened(tmp_path)
    assert folder.labels.tolist() == sorted(image.label for image in images)
    assert folder.jpeg(1) == images[3].content and folder.size(1) == (images[3].height, images[3].width)
    for settings, message in (((25, 3), "24 images, expected 25"), ((24, 2), "3 classes, expected 2")):
        for either in (directory, tmp_path):
            with pytest.raises(UserError, match=f"{message}; prepare again"):
                opened(either, *settings)
    with pytest.raises(UserError, match="no such folder; prepare again"):
        opened(tmp_path / "nowhere")
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="0 classes, expected 3"):
        opened(tmp_path / "empty")
