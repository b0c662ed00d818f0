"""The pieces of a ResNet's training that `ttt bench` times alone, on images made up on the spot."""

import io
import os
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import nn

from common.training.benchmark import Part
from image_classification.data.dali import has_dali
from image_classification.data.decoders import Name, open_decoder
from image_classification.data.images import Images
from image_classification.data.loader import MEAN, STD, TrainSettings
from image_classification.data.loaders import open_loader
from image_classification.kernels.crop_resize import crop_resize
from image_classification.methods.blurpool import Blur

HEIGHT, WIDTH, QUALITY = 375, 500, 90  # a usual image of ImageNet
NUM_IMAGES = 64
CROP_PX = 176
LOADER_BATCH = 32
SHORTCUT = (256, 56, 512)  # channels, size and outputs of the first strided shortcut of ResNet-50 at 224 px


class MadeUpImages:
    """Smooth noise as JPEG files in memory; an `Images`."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.labels = np.zeros(NUM_IMAGES, np.int64)
        self.files = []
        for _ in range(NUM_IMAGES):
            noise = Image.fromarray(rng.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8))
            file = io.BytesIO()
            noise.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(file, "JPEG", quality=QUALITY)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def where(self, sample: int) -> str:
        """Return a name for errors."""
        return f"made-up image {sample}"

    def jpeg(self, sample: int) -> bytes:
        """Return the file."""
        return self.files[sample]

    def size(self, sample: int) -> tuple[int, int]:
        """Return height and width."""
        return HEIGHT, WIDTH


def bench_parts(data: Any, batch_size: int, device: torch.device) -> Iterator[Part]:
    """Yield the loaders that this machine has, the crop of resident pixels, and blurred shortcuts."""
    images, num_workers = MadeUpImages(), min(data.num_workers, os.cpu_count() or 1)
    yield from loader_parts(images, data.model_copy(update={"num_workers": num_workers}), device)
    yield from decoder_parts(images, data.stored_px, num_workers, device)
    yield crop_part(data.stored_px, batch_size, device)
    yield from blur_parts(min(batch_size, 256), device)


def loader_parts(images: Images, data: Any, device: torch.device) -> Iterator[Part]:
    """Yield the loaders that decode in every epoch."""
    settings = TrainSettings(
        batch_size=LOADER_BATCH, seed=0, crop_px=lambda step: CROP_PX, min_area=0.08, flip_probability=0.5
    )
    for loader in ("workers", *["dali"] * has_dali()):
        chosen = data.model_copy(update={"loader": loader})
        batches: Any = open_loader(images, settings, chosen, device, "fp32")
        name = f"loader {loader} ({data.num_workers}), {WIDTH} x {HEIGHT} JPEG to {CROP_PX} px"
        yield Part(name=name, call=lambda batches=batches: next(batches), num_samples=LOADER_BATCH)
        batches.close()


def decoder_parts(images: Images, stored_px: int, num_threads: int, device: torch.device) -> Iterator[Part]:
    """Yield what decodes resident images, in the first epoch of a run."""
    samples = np.arange(LOADER_BATCH)
    for name in get_args(Name)[1:]:
        if name == "dali" and not has_dali():
            continue
        decoder = open_decoder(
            name, images, stored_px, device=device, num_threads=num_threads, most=LOADER_BATCH
        )
        yield Part(
            name=f"decoder {name} ({num_threads}), {WIDTH} x {HEIGHT} JPEG to {stored_px} px",
            call=lambda decoder=decoder: decoder.request(samples)(),
            num_samples=LOADER_BATCH,
        )
        decoder.close()


def crop_part(stored_px: int, batch_size: int, device: torch.device) -> Part:
    """Return the crop, resize, flip and normalisation of a batch of resident pixels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (batch_size, stored_px, stored_px, 3), dtype=torch.uint8, generator=generator)
    starts = torch.rand(batch_size, 2, generator=generator) * 0.4
    boxes = torch.cat([starts, 0.3 + 0.3 * torch.rand(batch_size, 2, generator=generator)], dim=1)
    flips = torch.rand(batch_size, generator=generator) < 0.5
    arguments = [values.to(device) for values in (pixels, torch.randperm(batch_size), boxes, flips)]

    def call() -> object:
        return crop_resize(*arguments, size_px=CROP_PX, mean=MEAN, std=STD, dtype=torch.bfloat16)

    return Part(name=f"crop and resize, {stored_px} to {CROP_PX} px", call=call, num_samples=batch_size)


def blur_parts(batch_size: int, device: torch.device) -> Iterator[Part]:
    """Yield the blurred shortcut as published and with the stride in the blur, forward and backward."""
    channels, size_px, outputs = SHORTCUT
    images = torch.randn(batch_size, channels, size_px, size_px, device=device)
    images = images.to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    forms = {"published": (1, 2), "stride in the blur": (2, 1)}
    for name, (blur_stride, stride) in forms.items():
        layer = nn.Sequential(Blur(stride=blur_stride), nn.Conv2d(channels, outputs, 1, stride, bias=False))
        layer = layer.to(device, torch.bfloat16, memory_format=torch.channels_last)

        def call(layer: nn.Module = layer) -> None:
            layer(images).sum().backward()

        yield Part(name=f"blurred shortcut, {name}", call=call, num_samples=batch_size)
