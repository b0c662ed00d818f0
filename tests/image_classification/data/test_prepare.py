"""ImageNet to shards from its tars and from class folders, what is refused, a preparation that goes on."""

import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from common.data import manifest as fingerprint
from image_classification.data import sources
from image_classification.data.images import decode, open_images
from tests.command import ttt_here as ttt
from tests.image_classification.imagenet import (
    NUM_TRAIN,
    NUM_VALIDATION,
    SYNSETS,
    config_for,
    content_of,
    images_of,
    jpeg,
    needs_room,
    prepared,
    refuses,
    settings_of,
)


@pytest.fixture
def own_folders(folders, tmp_path):
    return shutil.copytree(folders, tmp_path / "own")


@pytest.fixture
def own_tars(tars, tmp_path):
    return shutil.copytree(tars, tmp_path / "own")


def test_shards_hold_every_file_with_its_class(folders, tmp_path):
    directory = tmp_path / "full"
    digest = prepared(directory, folders)
    train = open_images(directory, "train", num_samples=NUM_TRAIN, num_classes=3, hint="")
    stored = {(int(train.labels[sample]), train.jpeg(sample)) for sample in range(NUM_TRAIN)}
    assert stored == {(SYNSETS.index(synset), content) for _, synset, content in images_of("train")}
    assert len(set(train.labels[:12].tolist())) == 3  # shuffled
    for sample in range(NUM_TRAIN):
        image = decode(train, sample)
        assert image.mode == "RGB" and image.size[::-1] == train.size(sample)
    validation = open_images(directory, "validation", num_samples=NUM_VALIDATION, num_classes=3, hint="")
    in_order = [(validation.jpeg(sample), SYNSETS[validation.labels[sample]]) for sample in range(9)]
    assert in_order == [(content, synset) for _, synset, content in images_of("validation")]
    manifest = fingerprint.read_manifest(directory, hint="")
    assert manifest["fingerprint"] == digest
    assert manifest["facts"]["classes"] == list(SYNSETS)
    assert fingerprint.verify(directory, config_for(directory).prepared_with(), hint="") == []


def test_an_intact_folder_is_left_alone_and_a_damaged_one_is_replaced(folders, expected, tmp_path):
    directory = tmp_path / "full"
    digest = prepared(directory, folders)
    manifest = directory / "manifest.json"
    before = manifest.stat().st_ino
    assert prepared(directory, None) == digest and manifest.stat().st_ino == before
    (directory / "train-00001.shard").write_bytes(expected["train-00000.shard"])
    refuses("--source DIR", directory, None)
    prepared(directory, folders)
    assert content_of(directory) == expected


def test_the_command_line_prepares_and_verifies(tars, tmp_path):
    directory = tmp_path / "full"
    common = ["image_classification", "--size", "full"]
    common += [part for setting in settings_of(directory) for part in ("--set", setting)]
    done = ttt("data", "prepare", *common)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--source DIR" in done.stderr
    done = ttt("data", "prepare", *common, "--source", tars)
    assert done.returncode == 0 and "fingerprint" in done.stdout
    assert re.search(r"33 of 33 images, [\d,]+ images/s, \d+ MB/s, 0\.0 min left", done.stdout)
    assert ttt("data", "verify", *common).returncode == 0
    shard = directory / "train-00000.shard"
    content = bytearray(shard.read_bytes())
    rows = np.load(directory / "train.index.npy")
    second = int(rows["offset"][1])
    assert rows["shard"][1] == 0
    content[second + 10] ^= 1
    shard.write_bytes(content)
    (directory / "train-00001.shard").write_bytes(content)
    (directory / "validation-00000.shard").rename(directory / "validation-00009.shard")
    done = ttt("data", "verify", *common)
    assert done.returncode == 1
    assert "train-00000.shard: content changed (SHA-256 differs) in record 1\n" in done.stdout
    for line in ("train-00001.shard", "00000.shard: missing", "00009.shard: not in the manifest"):
        assert line in done.stdout
    other = ["--size", "mini", "--set", f"data.directory={tmp_path / 'other'}", "--source", tars]
    for benchmark in ("image_classification", "language_bert"):
        done = ttt("data", "prepare", benchmark, *other)
        assert done.returncode == 2 and "--source" in done.stderr


@pytest.mark.parametrize(
    ("counts", "key_words"),
    [
        ({"num_train": 25}, "train: 24 images, expected 25"),
        ({"num_validation": 50_000}, "validation: 9 images, expected 50000"),
        ({"num_classes": 4}, "train: 3 classes, expected 4"),
    ],
)
@pytest.mark.parametrize("form", ["folders", "tars"])
def test_an_incomplete_source_is_refused(request, tmp_path, form, counts, key_words):
    refuses(key_words, tmp_path / "full", request.getfixturevalue(form), **counts)
    assert list(tmp_path.iterdir()) == []


def shorten(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero_fifth_member(path):
    with tarfile.open(path) as tar:
        first = tar.getmembers()[4].offset_data
    content = path.read_bytes()
    path.write_bytes(content[:first] + bytes(4) + content[first + 4 :])


PAGE = b"<html>not found</html>"


def cut_before_a_member(path):
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1].offset
    path.write_bytes(path.read_bytes()[:last])


VAL, TRAIN_TAR, VAL_TAR = f"val/{SYNSETS[0]}", sources.TARS["train"], sources.TARS["validation"]
LABELS = "validation_synsets.txt"


@pytest.mark.parametrize(
    ("form", "name", "damage", "key_words"),
    [
        ("folders", VAL, lambda path: path.rename(path.with_name("n9")), "n9 is not in the training set"),
        ("folders", VAL, shutil.rmtree, f"validation: 2 classes, expected 3; there is no {SYNSETS[0]}"),
        ("folders", "val", shutil.rmtree, f"neither {VAL_TAR} nor validation/ nor val/"),
        ("tars", LABELS, Path.unlink, "synset of each validation image.*validation_synset_labels.txt"),
        *(
            ("tars", name, damage, f"{name}: not a whole tar")
            for name in (TRAIN_TAR, VAL_TAR)
            for damage in (
                shorten,
                cut_before_a_member,
                lambda path: path.write_bytes(b""),
                lambda path: path.write_bytes(PAGE),
            )
        ),
        ("tars", VAL_TAR, zero_fifth_member, r"1 of its images .*img_val.tar n.*_\d+.JPEG: .*not"),
    ],
)
def test_a_source_that_is_not_whole_is_refused(form, name, damage, key_words, request, tmp_path):
    source = shutil.copytree(request.getfixturevalue(form), tmp_path / "own")
    damage(source / name)
    refuses(key_words, tmp_path / "full", source)
    assert not (tmp_path / "full").exists()


def test_the_official_tars_are_checked_by_their_md5(own_tars, expected, tmp_path, monkeypatch):
    counts = {"train": NUM_TRAIN, "validation": NUM_VALIDATION}
    md5s = {part: hashlib.md5((own_tars / sources.TARS[part]).read_bytes()).hexdigest() for part in counts}
    official = {part: (counts[part], md5s[part]) for part in counts}
    monkeypatch.setattr(sources, "OFFICIAL", official | {"train": (NUM_TRAIN, "0" * 32)})
    refuses(f"img_train.tar: MD5 {md5s['train']}, expected 0000", tmp_path / "full", own_tars)
    monkeypatch.setattr(sources, "OFFICIAL", official)
    prepared(tmp_path / "full", own_tars)
    assert content_of(tmp_path / "full") == expected


def test_hidden_files_are_no_images(own_folders, expected, tmp_path):
    (own_folders / "train" / SYNSETS[1] / ".DS_Store").write_bytes(b"of a file manager")
    prepared(tmp_path / "full", own_folders)
    assert content_of(tmp_path / "full") == expected


def test_damaged_images_are_all_counted_and_named_and_the_rest_is_kept(own_folders, expected, tmp_path):
    train = own_folders / "train" / SYNSETS[1]
    whole = {path: path.read_bytes() for path in sorted(train.iterdir())[:3]}
    cut, empty, text = whole
    for path, content in ((cut, whole[cut][:-20]), (empty, b""), (text, PAGE)):
        path.write_bytes(content)
    message = refuses("3 of its images are damaged", tmp_path / "full", own_folders)
    for path, reason in ((cut, "image file is truncated"), (empty, "not an image"), (text, "not an image")):
        assert f"{path}: cannot be decoded ({reason}" in message
    assert not (tmp_path / "full").exists()
    others = {path: path.read_bytes() for path in train.parent.rglob("*.JPEG") if path not in whole}
    for path in others:
        path.write_bytes(b"")
    message = refuses(r"24 of its images .*; \.\.\.", tmp_path / "full", own_folders)
    assert message.count("cannot be decoded") == 5  # only the first are named
    for path, content in (whole | others).items():
        path.write_bytes(content)
    prepared(tmp_path / "full", own_folders)
    assert content_of(tmp_path / "full") == expected


def test_a_full_disk_is_noticed_before_anything_is_written(folders, tmp_path, monkeypatch):
    num_bytes = sum(path.stat().st_size for path in folders.rglob("*.JPEG"))
    needs_room(num_bytes, tmp_path / "full", folders, monkeypatch)


def test_a_changed_image_is_noticed_when_a_preparation_goes_on(own_folders, expected, tmp_path, capsys):
    first, second = (expected[f"train-{number:05}.shard"] for number in (0, 1))
    files = {path: path.read_bytes() for path in (own_folders / "train").rglob("*.JPEG")}
    victim = next(path for path, content in files.items() if content in first)
    damaged = next(path for path, content in files.items() if content in second)
    whole = files[victim]
    damaged.write_bytes(b"")
    changed = bytearray(whole)
    changed[-3] ^= 1  # still an image, of the same length
    victim.write_bytes(changed)
    refuses("1 of its images", tmp_path / "full", own_folders)
    work = tmp_path / ".full.part"
    (holder,) = (path for path in work.glob("data/*") if bytes(changed) in path.read_bytes())
    assert list(work.glob(f"rows/{holder.stem}-*"))  # finished, with the changed image
    assert "removing" not in capsys.readouterr().out
    damaged.write_bytes(files[damaged])
    victim.write_bytes(whole)
    prepared(tmp_path / "full", own_folders)
    assert re.search("removing [1-9] finished shards of another source", capsys.readouterr().out)
    assert content_of(tmp_path / "full") == expected


def test_what_a_crash_left_behind_is_not_taken(own_tars, expected, tmp_path):
    tar = own_tars / "ILSVRC2012_img_val.tar"
    content, times = tar.read_bytes(), (tar.stat().st_atime_ns, tar.stat().st_mtime_ns)
    with tarfile.open(tar) as opened:
        first = opened.getmembers()[0].offset_data
    tar.write_bytes(content[:first] + bytes(8) + content[first + 8 :])
    refuses("1 of its images", tmp_path / "full", own_tars)
    work = tmp_path / ".full.part"
    for name in ("train-00000.shard", "train-00001.shard"):
        assert list(work.glob(f"rows/{name.split('.')[0]}-*"))  # finished
    os.truncate(work / "data" / "train-00000.shard", 100)
    (work / "data" / "train-00001.shard").unlink()
    (work / "data" / "train-00099.shard").write_bytes(b"of another source")
    (work / "rows" / "draft.npy").write_bytes(b"half")
    tar.write_bytes(content)
    os.utime(tar, ns=times)
    prepared(tmp_path / "full", own_tars)
    assert content_of(tmp_path / "full") == expected


def many_images(source):
    for part, synset in ((part, synset) for part in ("train", "validation") for synset in SYNSETS):
        folder = source / part / synset
        folder.mkdir(parents=True)
        for number in range(200 if part == "train" else 3):
            original = source / f"{number % 12}.JPEG"
            if not original.exists():
                original.write_bytes(jpeg(number))
            os.link(original, folder / f"{synset}_{number}.JPEG")
    return source


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_killed_preparation_goes_on_to_the_same_bytes(tmp_path):
    source, counts = many_images(tmp_path / "source"), {"num_train": 600, "num_validation": 9}
    whole, directory, work = tmp_path / "whole", tmp_path / "full", tmp_path / ".full.part"
    prepared(whole, source, **counts)
    num_shards = len(list(whole.glob("*.shard")))
    fork = multiprocessing.get_context("fork")  # imports nothing again
    process = fork.Process(target=prepared, args=(directory, source), kwargs=counts)
    process.start()
    while len(list(work.glob("rows/train-*"))) < 2 and process.is_alive():
        time.sleep(0.001)
    process.kill()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    finished = {path.name for path in work.glob("rows/train-*")}
    assert 2 <= len(finished) < num_shards and not directory.exists()
    first = (work / "data" / "train-00000.shard").stat()
    prepared(directory, source, **counts)
    kept = (directory / "train-00000.shard").stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert content_of(directory) == content_of(whole)
    assert not work.exists()
