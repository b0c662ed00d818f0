"""Sources that give an image the number of its class: WebDataset's tars, and Hugging Face's data sets.

Nothing is decoded. A record points into the file of its image: to a member of a tar, or a value of Arrow.
"""

import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from common.data import tables
from common.errors import UserError
from image_classification.data.images import Record
from image_classification.data.label_files import SYNSET, open_tar

IMAGE_SUFFIXES = {"jpg", "jpeg", "png", "webp"}
CLASS_SUFFIX = "cls"
IMAGE_NAMES, LABEL_NAMES = ("image", "img", "jpg"), ("label", "labels", "cls")  # of columns
IMAGENET_NAME = re.compile(r"((?P<synset>n\d{8})_\d+|ILSVRC2012_val_\d{8})(_(?P<suffix>n\d{8}))?")


class Numbered(NamedTuple):
    """An image with the number of its class; the synset of its record is '' unless its name has one."""

    label: int | None
    record: Record


class Columns(NamedTuple):
    """The columns of a table of images."""

    image: str
    label: str
    class_names: list[str]  # by number; [] where the table has none


def original_name(path: str) -> tuple[str, str]:
    """Return the name of an image in ImageNet's tars, and the synset in the name, or ''.

    Copies have other suffixes, and Hugging Face's has the synset behind the name:
    n01440764_10026_n01440764.JPEG, ILSVRC2012_val_00000293_n01440764.JPEG.
    """
    name = PurePosixPath(path).name
    match = IMAGENET_NAME.fullmatch(name.partition(".")[0])
    if match is None:
        return name, ""
    return f"{match[1]}.JPEG", match["suffix"] or match["synset"] or ""


def webdataset_images(paths: Sequence[Path]) -> Iterator[Numbered]:
    """Yield the samples of tars, pairs of a member with an image and one of the same name with its class."""
    for path in paths:
        with open_tar(path) as tar:
            yield from tar_samples(tar, path)


def tar_samples(tar: tarfile.TarFile, path: Path) -> Iterator[Numbered]:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    for member in tar:
        folder, _, name = member.name.rpartition("/")
        stem, _, suffix = name.partition(".")
        key = f"{folder}/{stem}".lstrip("/")
        if member.isfile() and suffix.lower() in IMAGE_SUFFIXES:
            images[key] = member
        elif member.isfile() and suffix == CLASS_SUFFIX:
            labels[key] = read_class(tar, member, path)
    if odd := sorted(images.keys() ^ labels.keys()):
        lacks = f".{CLASS_SUFFIX}" if odd[0] in images else "image (.jpg, .jpeg, .png or .webp)"
        raise UserError(f"sample {odd[0]} has no {lacks}", where=str(path))
    modified_ns = path.stat().st_mtime_ns
    for key, member in images.items():
        name, synset = original_name(member.name)
        record = Record(synset, name, str(path), member.offset_data, member.size, modified_ns)
        yield Numbered(labels[key], record)


def read_class(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> int:
    file = tar.extractfile(member)
    text = (file.read(32) if file else b"").decode("ascii", "replace").strip()
    if not text.removeprefix("-").isdecimal():
        raise UserError(f"class {text!r} is no number", where=f"{path} {member.name}")
    return int(text)


def find_columns(path: Path) -> Columns:
    """Find the columns of images and classes in a table. Raises UserError where one of them is missing."""
    schema = tables.read_schema(path)
    types = tables.import_pyarrow().types
    kinds = {field.name: field.type for field in schema}
    images = [name for name, kind in kinds.items() if has_bytes(kind)]
    images += [name for name in IMAGE_NAMES if name in kinds and is_binary(kinds[name])]
    labels = [name for name in LABEL_NAMES if name in kinds and types.is_integer(kinds[name])]
    for what, columns in (("images (bytes and path)", images), (f"integers named {LABEL_NAMES[0]}", labels)):
        if not columns:
            raise UserError(f"no column of {what} among {', '.join(kinds)}", where=str(path))
    return Columns(images[0], labels[0], tables.class_names(schema, labels[0]))


def is_binary(kind: Any) -> bool:
    types = tables.import_pyarrow().types
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def has_bytes(kind: Any) -> bool:
    if not tables.import_pyarrow().types.is_struct(kind):
        return False
    place = kind.get_field_index("bytes")
    return place >= 0 and is_binary(kind.field(place).type)


def arrow_images(paths: Sequence[Path]) -> Iterator[Numbered]:
    """Yield the rows of Arrow files. An image without a name gets the number of its row in the part."""
    number = 0
    for path in paths:
        columns, modified_ns = find_columns(path), path.stat().st_mtime_ns
        for batch, address in tables.map_batches(path):
            images, labels = batch.column(columns.image), batch.column(columns.label).to_pylist()
            content, names = images, [None] * len(labels)
            if has_bytes(images.type):
                content = images.field("bytes")
                if images.type.get_field_index("path") >= 0:
                    names = images.field("path").to_pylist()
            if images.null_count or content.null_count:
                what = f"an image of rows {number} to {number + len(labels) - 1} has no bytes"
                hint = "the data set names files elsewhere: give the folder of these files"
                raise UserError(what, where=str(path), hint=hint)
            places, lengths = tables.locate(content, address, path)
            for label, name, place, length in zip(
                labels, names, places.tolist(), lengths.tolist(), strict=True
            ):
                named, synset = original_name(name) if name else (f"{number:08}", "")
                yield Numbered(label, Record(synset, named, str(path), place, length, modified_ns))
                number += 1


def name_classes(images: Sequence[Numbered], class_names: Sequence[str], num_classes: int) -> list[str]:
    """Return a name for each number of a class, so that the sorted names have the order of the numbers.

    They are `class_names` where these are sorted, as those of folders are; else the synsets in the names of
    the images; else the numbers themselves.
    """
    if len(class_names) == num_classes and list(class_names) == sorted(class_names):
        return list(class_names)
    width = len(str(num_classes - 1))
    by_label = {image.label: image.record.synset for image in reversed(images) if image.record.synset}
    return [by_label.get(label, f"{label:0{width}}") for label in range(num_classes)]


def check_label(label: int | None, num_classes: int, where: str) -> int:
    if label is None or not 0 <= label < num_classes:
        raise UserError(f"class {label}, expected 0 to {num_classes - 1}", where=where)
    return label


def attach_synsets(images: Sequence[Numbered], classes: Sequence[str]) -> list[Record]:
    """Return the records of images with the names of their classes.

    Raises UserError for a number that no class has, and for an image whose name says another synset.
    """
    records = []
    for label, record in images:
        where = f"{record.path} {record.name}"
        synset = classes[check_label(label, len(classes), where)]
        if record.synset and record.synset != synset and SYNSET.fullmatch(synset):
            what = f"its class {label} is {synset} elsewhere, and its name says {record.synset}"
            raise UserError(what, where=where)
        records.append(record._replace(synset=synset))
    return records
