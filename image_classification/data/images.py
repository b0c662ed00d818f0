"""Read and decode images: of a prepared data set (shards, or one folder per class) and of a source."""

import hashlib
import io
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from common.data import manifest
from common.errors import UserError
from common.files import explain_os_error
from image_classification.data.shards import Shards, index_path

PARTS = ("train", "validation")
QUALITY = 92  # of JPEG, where an image is encoded again


class Images(Protocol):
    """A part of a data set: training or validation. Samples count from 0."""

    labels: np.ndarray  # (num_samples,) int64, classes from 0

    def __len__(self) -> int:
        """The number of samples."""

    def where(self, sample: int) -> str:
        """Name a sample for an error: its file, and its record there."""

    def jpeg(self, sample: int) -> bytes:
        """Return the encoded image. Raises UserError when it cannot be read."""

    def size(self, sample: int) -> tuple[int, int]:
        """Return height and width in pixels, without decoding."""


class ImageFolder:
    """One folder per class, in the order of their names.

    Where the data set has a manifest, with the SHA-256 of each file, a file that has changed is refused.
    """

    def __init__(self, directory: Path, *, hint: str) -> None:
        if not directory.is_dir():
            raise UserError("no such folder", where=str(directory), hint=hint)
        folders = [sorted(path.iterdir()) for path in sorted(directory.iterdir()) if path.is_dir()]
        classes = [paths for paths in folders if paths]  # no manifest has an empty folder
        files = [(path, label) for label, paths in enumerate(classes) for path in paths]
        self.paths = [path for path, _ in files]
        self.labels = np.array([label for _, label in files], dtype=np.int64)
        self.digests: list[str] = []
        root = directory.parent
        if (root / manifest.MANIFEST).is_file():
            known = manifest.read_manifest(root, hint=hint)["files"]
            names = [path.relative_to(root).as_posix() for path in self.paths]
            self.digests = [known.get(name, {}).get("sha256", "") for name in names]

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, sample: int) -> str:
        return str(self.paths[sample])

    def jpeg(self, sample: int) -> bytes:
        """Return the content of the file. Raises UserError, too, when it is not what was prepared."""
        with explain_os_error("cannot be read", self.where(sample)):
            content = self.paths[sample].read_bytes()
        if self.digests and hashlib.sha256(content).hexdigest() != self.digests[sample]:
            raise UserError("its content has changed (SHA-256 differs)", where=self.where(sample))
        return content

    def size(self, sample: int) -> tuple[int, int]:
        try:
            with Image.open(self.paths[sample]) as image:
                return image.height, image.width
        except OSError as error:
            raise UserError(f"not an image ({error})", where=self.where(sample)) from error


def open_images(directory: Path, part: str, *, num_samples: int, num_classes: int, hint: str) -> Images:
    """Open `train` or `validation` of a prepared data set: shards where they are, else a folder per class.

    Raises UserError for another number of samples or classes; `hint` says how to prepare the data.
    """
    has_shards = index_path(directory, part).is_file()
    images: Images = (
        Shards(directory, part, hint=hint) if has_shards else ImageFolder(directory / part, hint=hint)
    )
    counted = {"classes": len(np.unique(images.labels)), "images": len(images)}
    for name, expected in (("classes", num_classes), ("images", num_samples)):
        if counted[name] != expected:
            what = f"{counted[name]} {name}, expected {expected}"
            raise UserError(what, where=str(directory / part), hint=hint)
    return images


def decode(images: Images, sample: int) -> Image.Image:
    """Return a sample as RGB, also where the file is grey or CMYK. Raises UserError that names it."""
    return decode_bytes(images.jpeg(sample), where=images.where(sample))


def decode_bytes(content: bytes, *, where: str) -> Image.Image:
    """Decode an image as RGB. Raises UserError with `where` when it cannot be decoded to its end."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"cannot be decoded ({reason})", where=where) from error


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
        return f"{self.path} {self.synset}/{self.name}" if self.offset else self.path


def read_image(record: Record, encoded_px: int | None = None) -> tuple[bytes, int, int]:
    """Read an image and decode it to its end; returns its bytes, height and width.

    An image whose shorter side has more than `encoded_px` pixels is shrunk to that and encoded again.
    Raises UserError that names the image when it cannot be read or decoded.
    """
    with explain_os_error("cannot be read", record.where), open(record.path, "rb", buffering=0) as file:
        file.seek(record.offset)
        content = file.read(record.num_bytes)
    if len(content) != record.num_bytes:
        raise UserError(f"{len(content)} bytes, expected {record.num_bytes}", where=record.where)
    image = decode_bytes(content, where=record.where)
    if encoded_px and min(image.size) > encoded_px:
        image, content = encode_again(image, encoded_px)
    return content, image.height, image.width


def encode_again(image: Image.Image, shorter_px: int) -> tuple[Image.Image, bytes]:
    """Shrink an image to `shorter_px` on its shorter side, and encode it without chroma subsampling."""
    width, height = (round(side * shorter_px / min(image.size)) for side in image.size)
    smaller, file = image.resize((width, height), Image.Resampling.BICUBIC), io.BytesIO()
    smaller.save(file, "JPEG", quality=QUALITY, subsampling="4:4:4")
    return smaller, file.getvalue()
