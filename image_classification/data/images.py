"""The images of a data set, in shards or in one folder per class, and their decoding."""

import hashlib
import io
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


class ImageFolder:
    """One folder per class, in the order of their names.

    Where the data set has a manifest, with the SHA-256 of each file, a file that has changed is refused.
    """

    def __init__(self, directory: Path, *, hint: str) -> None:
        if not directory.is_dir():
            raise UserError("no such folder", where=str(directory), hint=hint)
        classes = sorted(path for path in directory.iterdir() if path.is_dir())
        files = [(path, label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]
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
        try:
            content = self.paths[sample].read_bytes()
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror})", where=self.where(sample)) from error
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

    Raises UserError unless it holds so many samples of so many classes; `hint` tells how to prepare it.
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
    """Return an encoded image as RGB. Raises UserError with `where` when it cannot be decoded to its end."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"cannot be decoded ({reason})", where=where) from error
