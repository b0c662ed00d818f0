"""Configurations, a small data set of images, and the training loaders on it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.training.load import load_config
from common.training.ranks import SINGLE_RANK
from image_classification.benchmark import open_loader
from image_classification.data.images import ImageFolder
from image_classification.data.loader import TrainSettings

NUM_IMAGES = 22
BATCH_SIZE = 4
SIZES_PX = (48, 64, 96)  # of the epochs
STEPS_PER_EPOCH = NUM_IMAGES // BATCH_SIZE
CROPS = {"seed": 3, "min_area": 0.08, "flip_probability": 0.5}
LOADERS = {
    "workers": {"loader": "workers"},
    "dali": {"loader": "dali"},
    "resident": {"loader": "resident", "decoder": "threads"},
    "resident, on the host": {"loader": "resident", "decoder": "threads", "stored_on": "host"},
    "resident, by nvjpeg": {"loader": "resident", "decoder": "nvjpeg"},  # on a CPU by libjpeg
    "resident, by dali": {"loader": "resident", "decoder": "dali"},
}


def config_of(name, size="mini", *settings):
    """Load a configuration of this benchmark with such settings."""
    return load_config("image_classification", name, size=size, settings=settings).config


def natural(rng, height, width):
    """Return (height, width, 3) uint8 whose amplitudes fall as 1/frequency, mostly without colour."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)) + 1 / max(height, width)
    noise = np.fft.rfft2(rng.standard_normal((4, height, width))) / frequency
    grey, *colours = np.fft.irfft2(noise, s=(height, width))
    image = grey[..., None] + 0.3 * np.stack(colours, axis=-1)
    return (118 + 60 * image / image.std()).clip(0, 255).astype(np.uint8)


def smooth(rng, height, width):
    """Return (height, width, 3) uint8 without detail."""
    coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def write_images(directory: Path, draw=natural) -> Path:
    """Write JPEGs of two classes, one grey, one CMYK, and a PNG that is named JPEG, as in ImageNet."""
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        image = Image.fromarray(draw(rng, *rng.integers(120, 200, 2).tolist()))
        path = directory / str(number % 2) / f"{number:02}.JPEG"
        path.parent.mkdir(exist_ok=True)
        image = image.convert({4: "L", 5: "CMYK"}.get(number, "RGB"))
        image.save(path, format="PNG" if number == 6 else "JPEG", quality=90)
    return directory


class CountedImages(ImageFolder):
    """Images that count how often each was read."""

    def __init__(self, directory):
        super().__init__(directory, hint="")
        self.num_reads = [0] * len(self)

    def jpeg(self, sample):
        self.num_reads[sample] += 1
        return super().jpeg(sample)


def settings_of(name="resident", *, batch_size=BATCH_SIZE, start_step=0, rank_info=SINGLE_RANK, **changes):
    """Return the settings of one of LOADERS, or of one with such changes of the data's."""
    crops = {"min_crop_area": CROPS["min_area"], "flip_probability": CROPS["flip_probability"]}
    device = torch.device(changes.pop("device", "cpu"))
    changes = {"num_workers": 2, "stored_px": 200} | crops | LOADERS[name] | changes
    return TrainSettings(
        data=config_of("baseline").data.model_copy(update=changes),
        batch_size=batch_size,
        seed=CROPS["seed"],
        crop_px=lambda step: SIZES_PX[step // STEPS_PER_EPOCH % 3],
        rank_info=rank_info,
        start_step=start_step,
        device=device,
    )


def load(images, name="resident", **settings):
    """Open one of LOADERS; skips the test where it needs DALI, which is not installed."""
    if "dali" in name:
        pytest.importorskip("nvidia.dali")
    return open_loader(images, settings_of(name, **settings))
