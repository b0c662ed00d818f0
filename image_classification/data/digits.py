"""The embedded data set of size `mini`: scikit-learn's handwritten digits as JPEG files in folders."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from image_classification.data.images import PARTS

NUM_EVALUATION_SAMPLES = 360  # of 1797
SPLIT_SEED = 0
IMAGE_PX = 144
JPEG_QUALITY = 90


def write_digits(directory: Path) -> dict[str, int]:
    """Write scikit-learn's 1797 handwritten digits as `<part>/<digit>/NNNN.jpg`; returns the counts.

    8 x 8 pixels in 16 grey levels, enlarged to 144 x 144 RGB. Split by digit with a fixed seed; NNNN is the
    number of the image in scikit-learn's order. Source: https://archive.ics.uci.edu/dataset/80 (test set).
    """
    digits = load_digits()
    numbers = np.arange(len(digits.target))
    parts = train_test_split(
        numbers, test_size=NUM_EVALUATION_SAMPLES, stratify=digits.target, random_state=SPLIT_SEED
    )
    for part, members in zip(PARTS, parts, strict=True):
        for number in members:
            path = directory / part / str(digits.target[number]) / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((digits.images[number] * (255 / 16)).round().astype(np.uint8))
            image = image.resize((IMAGE_PX, IMAGE_PX), Image.Resampling.BICUBIC).convert("RGB")
            image.save(path, quality=JPEG_QUALITY)
    return {"data.num_train_samples": len(parts[0]), "data.num_evaluation_samples": len(parts[1])}
