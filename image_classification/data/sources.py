"""ImageNet as a person has it: the official tars, or one folder per class. Nothing is unpacked.

Both forms give the same records in the same order. A class's number is its place among the sorted synsets of
the training set. Training images are shuffled by a hash of their names, so that a sequential reader sees all
classes; validation images are sorted by file name.
"""

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from PIL import Image

from common.data import preparation
from common.errors import UserError
from image_classification.data.images import PARTS, decode_bytes

TARS = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
FOLDERS = {"train": ("train",), "validation": ("validation", "val")}
OFFICIAL = {  # number of images and MD5 of the tar, https://image-net.org/download-images
    "train": (1_281_167, "1d675b47d978889d74fa0da5fadfb00e"),
    "validation": (50_000, "29b22e2961454d5413ddabcf34fc5622"),
}
QUALITY = 92  # of JPEG, where an image is encoded again
SYNSETS = "validation_synsets.txt"
SYNSETS_HINT = (
    "it has the synset of each validation image (n01440764), one a line, in the order of the file names: "
    "imagenet_2012_validation_synset_labels.txt, for example from github.com/tensorflow/models in "
    "research/slim/datasets"
)


class Record(NamedTuple):
    """An encoded image in a source: `num_bytes` from `offset` of the file at `path`."""

    synset: str
    name: str
    path: str
    offset: int  # 0: the file is the image; a tar begins with a header
    num_bytes: int
    modified_ns: int  # time of the last change of the file

    @property
    def where(self) -> str:
        """Return what names the image in an error."""
        return f"{self.path} {self.synset}/{self.name}" if self.offset else self.path


def list_source(
    directory: Path, *, expected: dict[str, int], num_classes: int
) -> tuple[list[str], dict[str, list[Record]]]:
    """List what `directory` holds, tars before folders: the sorted synsets and the records of each part.

    Records come in the order in which they are stored. Raises UserError unless there are `num_classes`
    classes and the expected number of images of each part.
    """
    parts = {part: list_part(directory, part) for part in PARTS}
    synsets = {part: {record.synset for record in records} for part, records in parts.items()}
    for part in PARTS:
        counts = (len(synsets[part]), num_classes, "classes"), (len(parts[part]), expected[part], "images")
        for number, right, name in counts:
            if number != right:
                raise UserError(f"{number} {name}, expected {right}", where=f"{directory}: {part}")
    if alien := sorted(synsets["validation"] - synsets["train"]):
        raise UserError(f"class {alien[0]} is not in the training set", where=f"{directory}: validation")
    parts["train"].sort(key=lambda record: (name_hash(record), record.synset, record.name))
    parts["validation"].sort(key=lambda record: (record.name, record.synset))
    return sorted(synsets["train"]), parts


def name_hash(record: Record) -> bytes:
    return hashlib.blake2b(os.fsencode(f"{record.synset}/{record.name}"), digest_size=8).digest()


def list_part(directory: Path, part: str) -> list[Record]:
    """List `train` or `validation`, unsorted, from its tar or else its folder."""
    tar = directory / TARS[part]
    if tar.is_file():
        try:
            return list((train_tar if part == "train" else validation_tar)(tar))
        except tarfile.TarError as error:
            raise UserError(f"not a whole tar ({error})", where=str(tar)) from error
    for name in FOLDERS[part]:
        if (directory / name).is_dir():
            return list(class_folders(directory / name))
    raise UserError(
        f"holds neither {TARS[part]} nor {' nor '.join(f'{name}/' for name in FOLDERS[part])}",
        where=str(directory),
        hint="--source takes a folder with ImageNet's two tars, or with train/CLASS/* and validation/CLASS/*",
    )


def class_folders(directory: Path) -> Iterator[Record]:
    """Yield every file of every class."""
    for synset in (path for path in directory.iterdir() if path.is_dir()):
        for path in synset.iterdir():
            if path.is_file():
                status = path.stat()
                yield Record(synset.name, path.name, str(path), 0, status.st_size, status.st_mtime_ns)


def train_tar(path: Path) -> Iterator[Record]:
    """Yield the images of the class tars in the training tar."""
    modified_ns = path.stat().st_mtime_ns
    with tarfile.open(path, "r:") as outer:
        for member in outer:
            if member.isfile():
                synset = PurePosixPath(member.name).stem
                with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
                    for name, offset, num_bytes in images_of(inner):
                        start = member.offset_data + offset
                        yield Record(synset, name, str(path), start, num_bytes, modified_ns)


def validation_tar(path: Path) -> Iterator[Record]:
    """Yield the images of the validation tar with the classes in validation_synsets.txt beside it."""
    with tarfile.open(path, "r:") as tar:
        images = sorted(images_of(tar))
    text = path.with_name(SYNSETS)
    if not text.is_file():
        raise UserError("no such file; the validation tar has no classes", where=str(text), hint=SYNSETS_HINT)
    synsets = text.read_text(errors="replace").split()
    if len(synsets) != len(images):
        raise UserError(
            f"{len(synsets)} synsets, expected {len(images)}, one for each image of {path.name}",
            where=str(text),
            hint=SYNSETS_HINT,
        )
    modified_ns = path.stat().st_mtime_ns
    for synset, (name, offset, num_bytes) in zip(synsets, images, strict=True):
        yield Record(synset, name, str(path), offset, num_bytes, modified_ns)


def images_of(tar: tarfile.TarFile) -> Iterator[tuple[str, int, int]]:
    """Yield file name, offset and length in bytes of each file in a tar."""
    for member in tar:
        if member.isfile():
            yield PurePosixPath(member.name).name, member.offset_data, member.size


def check_md5(directory: Path, expected: dict[str, int]) -> None:
    """Read the tars of these parts, where the official numbers of images are expected and a tar is used.

    Raises UserError for a damaged one.
    """
    for part, num_expected in expected.items():
        path, (num_images, md5) = directory / TARS[part], OFFICIAL[part]
        if num_expected == num_images and path.is_file():
            preparation.check_md5(path, md5, hint="download it again")


def read_image(record: Record, encoded_px: int | None = None) -> tuple[bytes, int, int]:
    """Return the bytes of an image, its height and width; it was decoded to its end.

    Where its shorter side has more than `encoded_px` pixels, it is shrunk to that and encoded again.

    Raises UserError that names the image when it cannot be read or decoded.
    """
    try:
        with open(record.path, "rb", buffering=0) as file:
            file.seek(record.offset)
            content = file.read(record.num_bytes)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=record.where) from error
    if len(content) != record.num_bytes:
        raise UserError(f"{len(content)} bytes, expected {record.num_bytes}", where=record.where)
    image = decode_bytes(content, where=record.where)
    if encoded_px and min(image.size) > encoded_px:
        image, content = encode_again(image, encoded_px)
    return content, image.height, image.width


def encode_again(image: Image.Image, shorter_px: int) -> tuple[Image.Image, bytes]:
    """Shrink an image until its shorter side has so many pixels, and encode it; colours keep their detail."""
    width, height = (round(side * shorter_px / min(image.size)) for side in image.size)
    smaller, file = image.resize((width, height), Image.Resampling.BICUBIC), io.BytesIO()
    smaller.save(file, "JPEG", quality=QUALITY, subsampling="4:4:4")
    return smaller, file.getvalue()
