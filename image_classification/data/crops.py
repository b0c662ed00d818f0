"""Random crops and mirroring as a function of (seed, epoch, sample): the same in every loader.

The random numbers come from a counter-based generator, Philox4x32-10, so that a crop depends neither on the
order of the work nor on who does it. Source: Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405.
"""

import math
from typing import NamedTuple

import numpy as np

ASPECT_RATIOS = (3 / 4, 4 / 3)
NUM_TRIES = 10
MASK = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
KEY_INCREMENTS = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
NUM_ROUNDS = 10


class Crops(NamedTuple):
    """The crops of a batch: top, left, height and width in pixels of the image, and which are mirrored."""

    boxes: np.ndarray  # (batch, 4) int64
    flips: np.ndarray  # (batch,) bool


def draw_crops(
    samples: np.ndarray,
    sizes: np.ndarray,
    *,
    seed: int,
    epoch: int,
    min_area: float,
    flip_probability: float,
    alternates_flips: bool = False,
) -> Crops:
    """Draw the crops of `samples` (num_samples,) int64 with sizes (num_samples, 2) int64: height, width.

    The area of a crop is uniform in [min_area, 1] of the image, the logarithm of its aspect ratio uniform
    between those of 3/4 and 4/3; after ten crops that do not fit, the largest centre crop within these
    ratios. Flips are drawn with `flip_probability`, or, where they alternate, as in `alternating_flips`.
    Source: torchvision.transforms.RandomResizedCrop, whose distribution this is.
    """
    uniform = draw_bits(samples, np.arange(NUM_TRIES + 1), seed=seed, epoch=epoch) / 2.0**32
    areas, ratios, vertical, horizontal = np.moveaxis(uniform[:, :NUM_TRIES], -1, 0)
    heights, widths = sizes.T[..., None]
    low, high = (math.log(ratio) for ratio in ASPECT_RATIOS)
    areas = heights * widths * (min_area + (1 - min_area) * areas)
    ratios = np.exp(low + (high - low) * ratios)
    crop_widths = np.rint(np.sqrt(areas * ratios)).astype(np.int64)
    crop_heights = np.rint(np.sqrt(areas / ratios)).astype(np.int64)
    fits = (crop_widths > 0) & (crop_widths <= widths) & (crop_heights > 0) & (crop_heights <= heights)
    tops = (vertical * (heights - crop_heights + 1)).astype(np.int64)
    lefts = (horizontal * (widths - crop_widths + 1)).astype(np.int64)
    drawn = np.stack([tops, lefts, crop_heights, crop_widths], axis=-1)
    first_fitting = drawn[np.arange(len(samples)), fits.argmax(axis=1)]
    boxes = np.where(fits.any(axis=1, keepdims=True), first_fitting, centre_crops(sizes))
    if alternates_flips:
        return Crops(boxes, alternating_flips(samples, seed=seed, epoch=epoch))
    return Crops(boxes, uniform[:, NUM_TRIES, 0] < flip_probability)


def alternating_flips(samples: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Return (num_samples,) bool: drawn in the first epoch, then the opposite of the epoch before."""
    first: np.ndarray = draw_bits(samples, np.array([NUM_TRIES]), seed=seed, epoch=0)[:, 0, 0] < 1 << 31
    return first ^ bool(epoch % 2)


def draw_bits(samples: np.ndarray, numbers: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Draw four times 32 bits for each sample and each of `numbers`: (num_samples, num, 4)."""
    counters = np.zeros((len(samples), len(numbers), 4), np.uint64)
    counters[..., 0] = samples[:, None].astype(np.uint64) & MASK
    counters[..., 1] = samples[:, None].astype(np.uint64) >> HALF
    counters[..., 2] = numbers
    return philox(counters, np.array([seed, epoch], np.uint64) & MASK)


def centre_crops(sizes: np.ndarray) -> np.ndarray:
    heights, widths = sizes.T
    low, high = ASPECT_RATIOS
    crop_heights = np.minimum(heights, np.rint(widths / low).astype(np.int64))
    crop_widths = np.minimum(widths, np.rint(heights * high).astype(np.int64))
    tops, lefts = (heights - crop_heights) // 2, (widths - crop_widths) // 2
    return np.stack([tops, lefts, crop_heights, crop_widths], axis=-1)


def philox(counters: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return 32 random bits for each of `counters` (..., 4), under `key` (2,); all uint64 holding uint32."""
    a, b, c, d = np.moveaxis(counters, -1, 0)
    for _ in range(NUM_ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (second >> HALF) ^ b ^ key[0], second & MASK
        c, d = (first >> HALF) ^ d ^ key[1], first & MASK
        key = (key + KEY_INCREMENTS) & MASK
    return np.stack([a, b, c, d], axis=-1)
