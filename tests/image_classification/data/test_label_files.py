"""The classes of the validation tar from the label files that their makers ship, and what is refused."""

import shutil
import tarfile

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from common.errors import UserError
from image_classification.data.label_files import validation_synsets
from tests.image_classification.imagenet import (
    SYNSETS,
    content_of,
    images_of,
    prepared,
    refuses,
)

DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
IDS = {SYNSETS[2]: 1, SYNSETS[0]: 2, SYNSETS[1]: 3}  # not in the order of the synsets, as in the devkit
TRUE = {name: synset for name, synset, _ in images_of("validation")}  # in the order of the names


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def write_meta(path):
    """Write the devkit's table of synsets, which also has inner nodes of WordNet."""
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    rows = [(number, synset, "a fish, fishes", "it swims", 0) for synset, number in IDS.items()]
    table = np.array([*rows, (4, "n00001740", "entity", "all", 2)], dtype=kinds)
    savemat(path, {"synsets": table[:, None]})


def write_devkit(folder):
    write_lines(folder / TRUTH, [IDS[synset] for synset in TRUE.values()])
    write_meta(folder / "meta.mat")


def tensorflow(source):
    write_lines(source / "imagenet_2012_validation_synset_labels.txt", TRUE.values())


def caffe(source, *, synsets=SYNSETS):
    lines = [f"{name} {synsets.index(synset)}" for name, synset in TRUE.items()]
    write_lines(source / "val.txt", reversed(lines))


def caffe_with_synsets(source):
    caffe(source, synsets=SYNSETS[::-1])
    write_lines(source / "synsets.txt", SYNSETS[::-1])


def torchvision(source):
    import torch

    torch.save(
        ({synset: ("a fish", "fishes") for synset in SYNSETS}, list(TRUE.values())), source / "meta.bin"
    )


def devkit_folder(source):
    write_devkit(source / DEVKIT / "data")


def devkit_archive(source):
    write_devkit(source.with_name("elsewhere"))
    with tarfile.open(source / f"{DEVKIT}.tar.gz", "w:gz") as tar:
        tar.add(source.with_name("elsewhere"), f"{DEVKIT}/data")


def localization_devkit(source):
    write_lines(source / TRUTH, [IDS[synset] for synset in TRUE.values()])
    write_lines(source / "map_clsloc.txt", [f"{synset} {number} a_fish" for synset, number in IDS.items()])


FORMS = (tensorflow, caffe, caffe_with_synsets, torchvision)
FORMS += (write_devkit, devkit_folder, devkit_archive, localization_devkit)


@pytest.fixture
def unlabelled(tars, tmp_path):
    source = shutil.copytree(tars, tmp_path / "tars")
    (source / "validation_synsets.txt").unlink()
    return source


@pytest.mark.parametrize("write", FORMS)
def test_each_label_file_gives_the_same_classes(write, unlabelled, expected, tmp_path):
    write(unlabelled)
    prepared(tmp_path / "full", unlabelled)
    assert content_of(tmp_path / "full") == expected


def test_ids_without_their_synsets_are_refused(unlabelled, tmp_path):
    write_devkit(unlabelled)
    (unlabelled / "meta.mat").unlink()
    refuses(f"{TRUTH}: its ILSVRC ids are not the numbers .* meta.mat or", tmp_path / "full", unlabelled)
    (unlabelled / "meta.mat").write_bytes(b"<html>not found</html>" * 20)
    refuses("meta.mat: not the devkit's table", tmp_path / "full", unlabelled)


@pytest.mark.parametrize(("write", "name"), [(write_devkit, "meta.mat"), (torchvision, "meta.bin")])
def test_a_label_file_that_ends_early_is_named(write, name, unlabelled):
    write(unlabelled)
    content = (unlabelled / name).read_bytes()
    for num_bytes in sorted({*range(10), *range(0, len(content) - 8, max(len(content) // 100, 1))}):
        (unlabelled / name).write_bytes(content[:num_bytes])
        with pytest.raises(UserError, match=f"{name}: not "):
            validation_synsets(unlabelled, list(TRUE), list(SYNSETS))


def test_a_damaged_compressed_table_of_synsets_is_named(unlabelled):
    write_devkit(unlabelled)
    table = loadmat(unlabelled / "meta.mat")
    savemat(unlabelled / "meta.mat", {"synsets": table["synsets"]}, do_compression=True)
    assert validation_synsets(unlabelled, list(TRUE), list(SYNSETS))
    content = (unlabelled / "meta.mat").read_bytes()
    for place in range(140, len(content) - 8, 9):
        damaged = content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :]
        (unlabelled / "meta.mat").write_bytes(damaged)
        with pytest.raises(UserError, match="meta.mat: not "):
            validation_synsets(unlabelled, list(TRUE), list(SYNSETS))


@pytest.mark.parametrize(
    ("name", "lines", "key_words"),
    [
        (TRUTH, ["1"] * 8, f"{TRUTH}: 8 synsets, expected 9"),
        (TRUTH, ["1"] * 8 + ["1000"], f"{TRUTH}:9: 1000 is no ILSVRC id"),
        (TRUTH, ["n01440764"] * 9, f"{TRUTH}:1: n01440764 is no ILSVRC id"),
        ("val.txt", ["0"] * 9, "val.txt:1: expected a file name and the number"),
        ("val.txt", [f"{name} 3" for name in TRUE], "val.txt:1: class 3, expected 0 to 2"),
        ("val.txt", [f"{name} 1" for name in [*TRUE][1:]], "says nothing of ILSVRC2012_val_00000001.JPEG"),
        ("meta.bin", ["<html>not found</html>"], "meta.bin: not torchvision's file"),
        (f"{DEVKIT}.tar.gz", ["<html>not found</html>"], f"{DEVKIT}.tar.gz: not a whole tar"),
    ],
)
def test_a_wrong_label_file_is_one_line(name, lines, key_words, unlabelled, tmp_path):
    write_meta(unlabelled / "meta.mat")
    write_lines(unlabelled / name, lines)
    refuses(key_words, tmp_path / "full", unlabelled)
