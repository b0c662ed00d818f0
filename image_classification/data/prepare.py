"""Make the embedded data set of size `mini`, or describe an ImageNet tree that is already there."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from common import fingerprint
from common.errors import UserError

PARTS = ("train", "validation")
NUM_EVALUATION_SAMPLES = 360  # of 1797
SPLIT_SEED = 0
IMAGE_PX = 144
JPEG_QUALITY = 90


def prepare(directory: Path, config: Any) -> str:
    """Prepare the data in `directory`, unless they are there and whole; returns the fingerprint.

    The folder appears whole or not at all; a damaged one is replaced. Raises UserError for a folder that
    holds something else, and for size `full` without its images.
    """
    hint = f"run: ttt data prepare {config.benchmark} --size {config.size}"
    if is_intact(directory, config):
        return str(fingerprint.read_manifest(directory, hint=hint)["fingerprint"])
    if config.size == "full":
        return describe_tree(directory, config)
    if directory.exists() and any(directory.iterdir()) and not (directory / fingerprint.MANIFEST).exists():
        raise UserError(
            "holds files but no manifest, and is not replaced",
            where=str(directory),
            hint="move it away or choose another folder with --set data.directory=DIR",
        )
    partial = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    settings = write_digits(partial)
    if settings != config.prepared_with():
        shutil.rmtree(partial)
        raise UserError(f"the embedded set has {settings}, not {config.prepared_with()}", where="data")
    result = fingerprint.write_manifest(partial, {"settings": settings})
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)
    return result


def is_intact(directory: Path, config: Any) -> bool:
    """Return whether a folder is a prepared data set without a changed, missing or additional file."""
    try:
        return not fingerprint.verify(directory, config.prepared_with(), hint="")
    except UserError:
        return False


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


def describe_tree(directory: Path, config: Any) -> str:
    """Write the manifest of an ImageNet tree that a person has put there; reads every byte once."""
    where = str(directory)
    if not all((directory / part).is_dir() for part in PARTS):
        raise UserError(
            "ImageNet cannot be downloaded or converted from here",
            where=where,
            hint="--set data.directory=DIR to a tree of train/CLASS/*.JPEG and validation/CLASS/*.JPEG",
        )
    if (directory / fingerprint.MANIFEST).exists():
        raise UserError(
            "differs from its manifest",
            where=where,
            hint="restore the files, or remove manifest.json to describe the tree as it is",
        )
    counts = {part: sum(1 for _ in (directory / part).glob("*/*")) for part in PARTS}
    expected = {"train": config.data.num_train_samples, "validation": config.data.num_evaluation_samples}
    if counts != expected:
        raise UserError(f"{counts} images, expected {expected}", where=where)
    return fingerprint.write_manifest(directory, {"settings": config.prepared_with()})
