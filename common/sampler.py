"""The order of the training samples: a pure function of (seed, epoch, batches already drawn, place)."""

from collections.abc import Iterator
from heapq import heappop, heappush

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
    the batches of all ranks together; each takes its own part of them, see `own` and `balanced`.
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


def balanced(samples: np.ndarray, loads: np.ndarray, place: Place) -> np.ndarray:
    """Return a rank's part of a global batch, as many samples as `own`, by which all ranks have equal loads.

    From the heaviest down, each sample goes to the rank with least so far that still takes one. Every rank
    deals alike, so none sends anything; each keeps the order of the batch. `loads` (batch,) is the work on
    each sample.
    """
    room = [len(part(len(samples), rank, place.world_size)) for rank in range(place.world_size)]
    free = [(0, rank) for rank in range(place.world_size) if room[rank]]  # a heap of load and rank
    taken = np.zeros(len(samples), bool)
    for each in np.argsort(-loads.astype(np.int64), kind="stable").tolist():
        load, rank = heappop(free)
        taken[each] = rank == place.rank
        room[rank] -= 1
        if room[rank]:
            heappush(free, (load + int(loads[each]), rank))
    return samples[taken]
