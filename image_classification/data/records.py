"""The encoded images of a source by their place in its files, and how one is read."""

import io
from typing import NamedTuple

from PIL import Image

from common.errors import UserError
from common.files import explain_os_error
from image_classification.data.images import decode_bytes

QUALITY = 92  # of JPEG, where an image is encoded again


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


def read_image(record: Record, encoded_px: int | None = None) -> tuple[bytes, int, int]:
    """Return the bytes of an image, its height and width; it was decoded to its end.

    Where its shorter side has more than `encoded_px` pixels, it is shrunk to that and encoded again.

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
    """Shrink an image until its shorter side has so many pixels, and encode it; colours keep their detail."""
    width, height = (round(side * shorter_px / min(image.size)) for side in image.size)
    smaller, file = image.resize((width, height), Image.Resampling.BICUBIC), io.BytesIO()
    smaller.save(file, "JPEG", quality=QUALITY, subsampling="4:4:4")
    return smaller, file.getvalue()
