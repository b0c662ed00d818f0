"""The order of the training samples: a pure function of (seed, epoch, batches already drawn, place)."""

from collections.abc import Iterator

import numpy as np

from common.ranks import Place, part


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation (num_samples,) int64 of one epoch (from 0).

    Philox: the same on every machine.
    """
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_samples)


def batches(num_samples: int, batch_size: int, *, seed: int, start_step: int = 0) -> Iterator[np.ndarray]:
    """Yield the sample indices (batch_size,) of every step from `start_step` on, without end.

    Each epoch is shuffled anew and its incomplete last batch dropped, as in both published recipes. These are
    the batches of all ranks together; each takes its own part of them, see `own`.
    """
    steps_per_epoch = num_samples // batch_size
    epoch, step = divmod(start_step, steps_per_epoch)
    while True:
        order = epoch_order(num_samples, seed=seed, epoch=epoch)
        for first in range(step * batch_size, steps_per_epoch * batch_size, batch_size):
            yield order[first : first + batch_size]
        epoch, step = epoch + 1, 0


def own(samples: np.ndarray, place: Place) -> np.ndarray:
    """Return a rank's part of a global batch: one behind the other the parts are the batch."""
    taken = part(len(samples), place.rank, place.world_size)
    return samples[taken.start : taken.stop]
