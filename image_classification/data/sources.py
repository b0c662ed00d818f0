"""ImageNet in the five forms in which people have it; none needs to be unpacked by hand.

A folder holds, looked for in this order and for each part: the official tar; one folder per class; tars of
WebDataset; parquet or Arrow files, as Hugging Face's `datasets` has them, whose paths name the part.

Names decide the order, not files: training images are shuffled by a hash of class and name, so that a
sequential reader sees all classes; validation images are sorted by name. So all forms in which the images
have ImageNet's names give the same records in the same order. Where a data set has no names, the number of
an image in the order of the paths is its name. A class's number is its place among the sorted names of the
classes of the training set, whichever number a source gives it.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from common.data import hub, preparation, tables
from common.errors import UserError
from image_classification.data.images import PARTS, Record
from image_classification.data.label_files import open_tar, read_classes, validation_synsets
from image_classification.data.numbered import (
    Numbered,
    arrow_images,
    attach_synsets,
    check_label,
    find_columns,
    name_classes,
    webdataset_images,
)

TARS = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
OFFICIAL_NAME = "ILSVRC2012_img_"  # begins the names of ImageNet's tars, also of those that nobody needs
FOLDERS = {"train": ("train",), "validation": ("validation", "val")}
OFFICIAL = {  # number of images and MD5 of the tar, https://image-net.org/download-images
    "train": (1_281_167, "1d675b47d978889d74fa0da5fadfb00e"),
    "validation": (50_000, "29b22e2961454d5413ddabcf34fc5622"),
}
TAR, CLASS_FOLDERS, WEBDATASET, PARQUET = "tar", "class folders", "WebDataset", "parquet"
SUFFIXES = {WEBDATASET: ".tar", PARQUET: ".parquet", "Arrow": ".arrow"}  # of sources with numbered classes
HINT = (
    "--source takes a folder with ImageNet's two tars, with train/CLASS/* and validation/CLASS/*, with tars "
    "of WebDataset, or with parquet or Arrow files of a data set of Hugging Face; or its name on the hub"
)


class ImageSource(NamedTuple):
    """The sorted names of the classes, the records of each part in stored order, and the form of each."""

    classes: list[str]
    parts: dict[str, list[Record]]
    forms: dict[str, str]


def list_source(directory: Path, work: Path, *, expected: dict[str, int], num_classes: int) -> ImageSource:
    """List what `directory` holds; parquet files are unpacked in a folder of `work`.

    Raises UserError unless there are `num_classes` classes and the expected number of images of each part.
    """
    forms: dict[str, str] = {}
    parts: dict[str, list[Record]] = {}
    classes: list[str] = []
    for part in PARTS:
        forms[part], paths = find_files(directory, part)
        where = f"{directory}: {part}"
        if forms[part] == TAR:
            tar = paths[0]
            records = list(train_tar(tar) if part == "train" else validation_tar(tar, classes))
        elif forms[part] == CLASS_FOLDERS:
            records = list(class_folders(paths[0]))
        else:
            if forms[part] != WEBDATASET:
                check_tables(paths, expected[part], num_classes, where)
            images, class_names = list_numbered(paths, forms[part], work / "unpacked" / part)
            listed = read_classes(directory, num_classes)
            classes = listed or classes or name_classes(images, class_names, num_classes)
            records = attach_synsets(images, classes)
        synsets = {record.synset for record in records}
        missing = min(set(classes) - synsets, default="")
        check_count(len(synsets), num_classes, "classes", where, f"; there is no {missing}" * bool(missing))
        check_count(len(records), expected[part], "images", where)
        classes = classes or sorted(synsets)
        if alien := sorted(synsets - set(classes)):
            raise UserError(f"class {alien[0]} is not in the training set", where=where)
        parts[part] = records
    parts["train"].sort(key=lambda record: (name_hash(record), record.synset, record.name))
    parts["validation"].sort(key=lambda record: (record.name, record.synset))
    return ImageSource(sorted(classes), parts, forms)


def check_count(number: int, expected: int, name: str, where: str, more: str = "") -> None:
    if number != expected:
        raise UserError(f"{number} {name}, expected {expected}{more}", where=where)


def name_hash(record: Record) -> bytes:
    return hashlib.blake2b(os.fsencode(f"{record.synset}/{record.name}"), digest_size=8).digest()


def find_files(directory: Path, part: str) -> tuple[str, list[Path]]:
    """Return the form in which `directory` holds a part, and its files, or the folder of its classes."""
    tar = directory / TARS[part]
    if tar.is_file():
        return TAR, [tar]
    for folder in (directory / name for name in FOLDERS[part]):
        if folder.is_dir() and has_classes(folder):
            return CLASS_FOLDERS, [folder]
    for form, suffix in SUFFIXES.items():
        paths = tables.split_files(directory, part, suffix)
        if paths := [path for path in paths if not path.name.startswith(OFFICIAL_NAME)]:
            return form, paths
    folders = " nor ".join(f"{name}/" for name in FOLDERS[part])
    what = f"holds neither {TARS[part]} nor {folders}, and no tars, parquet or Arrow files of {part}"
    raise UserError(what, where=str(directory), hint=HINT)


def has_classes(directory: Path) -> bool:
    """True if there are folders of classes: tars or tables below them must have the name of a class."""
    classes = {path.name for path in folders_of(directory)}
    for _, folders, names in os.walk(directory) if classes else ():
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith((*SUFFIXES.values(),)) and PurePosixPath(name).stem not in classes:
                return False
    return bool(classes)


def folders_of(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")]


def check_tables(paths: Sequence[Path], expected: int, num_classes: int, where: str) -> None:
    """Check columns, numbers of rows and class numbers of parquet or Arrow files, without reading images.

    Raises UserError for columns that differ, another number of images, and a number that no class has.
    """
    columns = [find_columns(path) for path in paths]
    those = f"those of {paths[0].name} are {columns[0].image} and {columns[0].label}"
    for path, other in zip(paths, columns, strict=True):
        if other[:2] != columns[0][:2]:
            raise UserError(f"columns {other.image} and {other.label}, {those}", where=str(path))
    check_count(sum(map(tables.count_rows, paths)), expected, "images", where)
    for path in paths:
        for row, label in enumerate(tables.read_column(path, columns[0].label)):
            check_label(label, num_classes, f"{path} row {row}")


def list_numbered(paths: Sequence[Path], form: str, folder: Path) -> tuple[list[Numbered], list[str]]:
    """List the images of files with numbered classes, and the names of these, where the files have them."""
    if form == WEBDATASET:
        return list(webdataset_images(paths)), []
    columns = find_columns(paths[0])
    if form == PARQUET:
        print(f"unpacking {len(paths)} parquet files", flush=True)
        paths = tables.unpack(paths, [columns.image, columns.label], folder)
    return list(arrow_images(paths)), columns.class_names


def class_folders(directory: Path) -> Iterator[Record]:
    """Yield every file of every class that is not hidden."""
    for synset in folders_of(directory):
        for path in synset.iterdir():
            if path.is_file() and not path.name.startswith("."):
                status = path.stat()
                yield Record(synset.name, path.name, str(path), 0, status.st_size, status.st_mtime_ns)


def train_tar(path: Path) -> Iterator[Record]:
    """Yield the images of the class tars in the training tar."""
    modified_ns = path.stat().st_mtime_ns
    with open_tar(path) as outer:
        for member in outer:
            if member.isfile():
                synset = PurePosixPath(member.name).stem
                with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
                    for name, offset, num_bytes in images_of(inner):
                        start = member.offset_data + offset
                        yield Record(synset, name, str(path), start, num_bytes, modified_ns)


def validation_tar(path: Path, classes: Sequence[str]) -> Iterator[Record]:
    """Yield the images of the validation tar with the synsets that a label file beside it says."""
    with open_tar(path) as tar:
        images = sorted(images_of(tar))
    synsets = validation_synsets(path.parent, [name for name, *_ in images], classes)
    modified_ns = path.stat().st_mtime_ns
    for synset, (name, offset, num_bytes) in zip(synsets, images, strict=True):
        yield Record(synset, name, str(path), offset, num_bytes, modified_ns)


def images_of(tar: tarfile.TarFile) -> Iterator[tuple[str, int, int]]:
    """Yield file name, offset and length in bytes of each file in a tar."""
    for member in tar:
        if member.isfile():
            yield PurePosixPath(member.name).name, member.offset_data, member.size


def official_tars(directory: Path, expected: dict[str, int]) -> dict[Path, str]:
    """Map the tars of these parts to their MD5, where the official numbers of images are expected."""
    tars = {part: directory / TARS[part] for part, number in expected.items() if number == OFFICIAL[part][0]}
    return {path: OFFICIAL[part][1] for part, path in tars.items() if path.is_file()}


def check_md5(directory: Path, expected: dict[str, int]) -> None:
    """Read the official tars of these parts. Raises UserError for a damaged one."""
    for path, md5 in official_tars(directory, expected).items():
        preparation.check_md5(path, md5, hint="download it again")


def describe_source(directory: Path, source: ImageSource, expected: dict[str, int]) -> dict[str, str]:
    """Return what the manifest says of a source: its form, its origin on the hub, the MD5 of official tars.

    Counts and decodability are checked in every form, the MD5 of official tars only.
    """
    forms = ", ".join(dict.fromkeys(source.forms.values()))
    md5s = {f"MD5 of {path.name}": md5 for path, md5 in official_tars(directory, expected).items()}
    return {"form": forms, **hub.origin(directory), **md5s}
