"""The images of a data set, in shards or in one folder per class, and their decoding."""

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from common.data import manifest
from common.errors import UserError
from image_classification.data.shards import Shards, index_path

PARTS = ("train", "validation")


class Images(Protocol):
    """A part of a data set: training or validation. Samples count from 0."""

    labels: np.ndarray  # (num_samples,) int64, classes from 0

    def __len__(self) -> int:
        """The number of samples."""

    def where(self, sample: int) -> str:
        """Return what names a sample in an error: its file, and its record there."""

    def jpeg(self, sample: int) -> bytes:
        """Return the encoded image. Raises UserError when it cannot be read."""

    def size(self, sample: int) -> tuple[int, int]:
        """Return height and width in pixels, without decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolder:
    """One folder per class; a class's number is its place among the sorted names.

    With `digests`, the SHA-256 of each file, one that has changed is refused.
    """

    paths: list[Path]
    labels: np.ndarray
    digests: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path, *, hint: str) -> "ImageFolder":
        """List `directory`, a part of a data set whose manifest, where there is one, knows the digests."""
        if not directory.is_dir():
            raise UserError("no such folder", where=str(directory), hint=hint)
        classes = sorted(path for path in directory.iterdir() if path.is_dir())
        files = [sorted(path.iterdir()) for path in classes]
        counts = np.array([len(inner) for inner in files], dtype=np.int64)
        labels = np.repeat(np.arange(len(classes)), counts)
        paths = [path for inner in files for path in inner]
        root = directory.parent
        if not (root / manifest.MANIFEST).is_file():
            return cls(paths=paths, labels=labels)
        known = manifest.read_manifest(root, hint=hint)["files"]
        names = [path.relative_to(root).as_posix() for path in paths]
        return cls(
            paths=paths, labels=labels, digests=[known.get(name, {}).get("sha256", "") for name in names]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def where(self, sample: int) -> str:
        """Return the path of the file."""
        return str(self.paths[sample])

    def jpeg(self, sample: int) -> bytes:
        """Return the content of the file. Raises UserError, too, when it is not what was prepared."""
        try:
            content = self.paths[sample].read_bytes()
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror})", where=self.where(sample)) from error
        if self.digests and hashlib.sha256(content).hexdigest() != self.digests[sample]:
            raise UserError("its content has changed (SHA-256 differs)", where=self.where(sample))
        return content

    def size(self, sample: int) -> tuple[int, int]:
        """Return what the file's header says."""
        try:
            with Image.open(self.paths[sample]) as image:
                return image.height, image.width
        except OSError as error:
            raise UserError(f"not an image ({error})", where=self.where(sample)) from error


def open_images(directory: Path, part: str, *, num_samples: int, num_classes: int, hint: str) -> Images:
    """Open `train` or `validation` of a prepared data set: shards where they are, else a folder per class.

    Raises UserError unless it holds so many samples of so many classes; `hint` tells how to prepare it.
    """
    has_shards = index_path(directory, part).is_file()
    images: Images = (
        Shards(directory, part, hint=hint) if has_shards else ImageFolder.open(directory / part, hint=hint)
    )
    num_found = len(np.unique(images.labels))
    if num_found != num_classes:
        where = str(directory / part)
        raise UserError(f"{num_found} classes, expected {num_classes}", where=where, hint=hint)
    if len(images) != num_samples:
        where = str(directory / part)
        raise UserError(f"{len(images)} images, expected {num_samples}", where=where, hint=hint)
    return images


def decode(images: Images, sample: int) -> Image.Image:
    """Return a sample as RGB, also where the file is grey or CMYK. Raises UserError that names it."""
    return decode_bytes(images.jpeg(sample), where=images.where(sample))


def decode_bytes(content: bytes, *, where: str) -> Image.Image:
    """Return an encoded image as RGB. Raises UserError with `where` when it cannot be decoded to its end."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"cannot be decoded ({reason})", where=where) from error
