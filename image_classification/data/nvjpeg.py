"""nvJPEG by torchvision: a resident decoder on a GPU that needs no DALI.

PIL decodes the files that nvJPEG cannot: CMYK, and other formats under the name JPEG, both of which ImageNet
has. nvJPEG upsamples chroma without interpolation; PIL and DALI interpolate. All squash with the same filter.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.io import ImageReadMode, decode_jpeg

from common.errors import UserError, name_error
from image_classification.data.decoding import (
    Decoded,
    Request,
    decode_behind,
    ignore_notice_of_decoder,
    on_side_stream,
)
from image_classification.data.images import Images, decode_bytes


@contextmanager
def nvjpeg_decoder(images: Images, stored_px: int, *, device: torch.device) -> Iterator[Request]:
    """Open a decoder as `resident.open_decoder` does; pixels are on the device. On a CPU libjpeg decodes.

    One thread of Python reads files, another decodes what was read.
    """
    ignore_notice_of_decoder()

    def decode_files(samples: np.ndarray, files: list[np.ndarray]) -> Decoded:
        def squash_all() -> Tensor:
            decoded = decode_batch(images, samples, files, device)
            sizes[:] = [image.shape[1:] for image in decoded]
            return torch.stack([squash(image, stored_px) for image in decoded])

        sizes = np.zeros((len(samples), 2), np.int64)
        return on_side_stream(device, squash_all), sizes

    with decode_behind(images, decode_files) as request:
        yield request


def decode_batch(
    images: Images, samples: np.ndarray, files: list[np.ndarray], device: torch.device
) -> list[Tensor]:
    """Decode files to (3, height, width) uint8. Raises UserError for the first that cannot be decoded."""

    def by_pil(number: int) -> Image.Image:
        return decode_bytes(files[number].tobytes(), where=images.where(int(samples[number])))

    supported = [number for number, content in enumerate(files) if is_supported(content)]
    try:
        decoded = dict(zip(supported, decode_jpegs([files[n] for n in supported], device), strict=True))
    except RuntimeError:  # it does not name the file
        for number in supported:
            by_pil(number)
        raise
    for number in sorted({*range(len(files))} - {*supported}):
        decoded[number] = torch.from_numpy(np.array(by_pil(number))).permute(2, 0, 1).to(device)
    return [decoded[number] for number in range(len(files))]


def decode_jpegs(files: list[np.ndarray], device: torch.device) -> list[Tensor]:
    encoded = [torch.from_numpy(content.copy()) for content in files]  # torch takes no read-only memory
    return decode_jpeg(encoded, ImageReadMode.RGB, device) if encoded else []


def is_supported(content: np.ndarray) -> bool:
    try:
        with Image.open(io.BytesIO(content)) as image:  # reads the header
            return image.format == "JPEG" and image.mode in ("RGB", "L")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False  # PIL raises the error when it decodes


def squash(image: Tensor, stored_px: int) -> Tensor:
    """Resize (3, height, width) uint8 to (stored_px, stored_px, 3) as PIL's bilinear filter does."""
    resized = F.interpolate(image[None].float(), (stored_px, stored_px), mode="bilinear", antialias=True)
    return resized[0].round_().clamp_(0, 255).to(torch.uint8).permute(1, 2, 0)


def check_nvjpeg(device: torch.device) -> None:
    """Decode a grey square. Raises UserError without a GPU, and where nvJPEG does not work on it."""
    if device.type != "cuda":
        raise UserError("nvjpeg needs a GPU", where="data.decoder", hint="use threads or dali")
    ignore_notice_of_decoder()
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "grey").save(file, "JPEG")
    try:
        decode_jpegs([np.frombuffer(file.getvalue(), np.uint8)], device)
    except RuntimeError as error:
        what = f"nvJPEG does not work here ({name_error(error, 200)})"
        raise UserError(what, where="data.decoder", hint="use threads or dali") from error


def has_nvjpeg(device: torch.device) -> bool:
    """Return whether nvJPEG works on this device; on a GPU where it does not, print why."""
    try:
        check_nvjpeg(device)
    except UserError as error:
        if device.type == "cuda":
            print(error, file=sys.stderr)
        return False
    return True
