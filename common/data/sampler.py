"""The order of the training samples: a pure function of (seed, epoch, batches already drawn, rank)."""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import numpy as np

from common.training.ranks import RankInfo, part

SHARDS = 2**32  # in the place of an epoch: the seed of the draw of each rank's samples


def epoch_order(num_samples: int, *, seed: int, epoch: int, rank: int = 0) -> np.ndarray:
    """Return the permutation (num_samples,) int64 of one epoch (from 0); `rank` where each rank has its own.

    Drawn by Philox: the same on every machine.
    """
    philox = np.random.Philox(key=[seed, epoch], counter=[0, 0, rank, 0])
    return np.random.Generator(philox).permutation(num_samples)


def batches(num_samples: int, batch_size: int, *, seed: int, start_step: int = 0) -> Iterator[np.ndarray]:
    """Yield the sample indices (batch_size,) of every step from `start_step` on, without end.

    Each epoch is shuffled anew and its incomplete last batch dropped, as in both published recipes. These are
    the batches of all ranks together; each takes its own part of them, see `rank_part` and `balanced_part`.
    """

    def order(epoch: int) -> np.ndarray:
        return epoch_order(num_samples, seed=seed, epoch=epoch)

    return in_epochs(order, batch_size, num_samples // batch_size, start_step)


def in_epochs(
    order: Callable[[int], np.ndarray], size: int, steps_per_epoch: int, start_step: int
) -> Iterator[np.ndarray]:
    """Yield `size` samples of each step from `start_step` on; `order` gives those of an epoch."""
    epoch, step = divmod(start_step, steps_per_epoch)
    while True:
        samples = order(epoch)
        for first in range(step * size, steps_per_epoch * size, size):
            yield samples[first : first + size]
        epoch, step = epoch + 1, 0


def shard_bounds(num_samples: int, batch_size: int, rank_info: RankInfo) -> range:
    """Locate the samples of a rank in the permutation of all."""
    taken = rank_info.part(batch_size)
    return range(num_samples * taken.start // batch_size, num_samples * taken.stop // batch_size)


def shard(num_samples: int, batch_size: int, *, seed: int, rank_info: RankInfo) -> np.ndarray:
    """Draw the samples that a rank keeps for the whole run; ascending."""
    bounds = shard_bounds(num_samples, batch_size, rank_info)
    return np.sort(epoch_order(num_samples, seed=seed, epoch=SHARDS)[bounds.start : bounds.stop])


def shard_batches(
    samples: np.ndarray,
    num_samples: int,
    batch_size: int,
    *,
    seed: int,
    rank_info: RankInfo,
    start_step: int = 0,
) -> Iterator[np.ndarray]:
    """Yield a rank's part of every step, drawn from its own `samples` (its `shard`), without end.

    A single rank gets the samples of `batches`. With more ranks a batch consists of a random part of each
    shard.
    """

    def order(epoch: int) -> np.ndarray:
        return np.take(samples, epoch_order(len(samples), seed=seed, epoch=epoch, rank=rank_info.rank))

    size = len(rank_info.part(batch_size))
    return in_epochs(order, size, num_samples // batch_size, start_step)


def rank_part(samples: np.ndarray, rank_info: RankInfo) -> np.ndarray:
    """Slice a rank's part out of a global batch; the parts of all ranks, joined, are the batch."""
    taken = rank_info.part(len(samples))
    return samples[taken.start : taken.stop]


def balanced_part(samples: np.ndarray, loads: np.ndarray, rank_info: RankInfo) -> np.ndarray:
    """Return a rank's part of a global batch, as large as `rank_part`, such that all ranks have equal loads.

    Every rank computes the same partition, so none sends anything, and each keeps the order of the batch.
    `loads` (batch,) is the work on each sample.
    """
    samples_of_rank: np.ndarray = samples[partition_by_load(loads, rank_info.world_size)[rank_info.rank]]
    return samples_of_rank


def partition_by_load(loads: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Partition samples with these loads (num_samples,) so that the sums are nearly equal; ascending indices.

    Greedy (longest processing time first): from the heaviest down, each sample goes to the part with the
    smallest sum that still has room. Parts are as large as those of `ranks.part`.
    """
    room = [len(part(len(loads), number, num_parts)) for number in range(num_parts)]
    free = [(0, number) for number in range(num_parts) if room[number]]  # a heap of load and part
    taker = np.empty(len(loads), np.int64)
    for sample in np.argsort(-loads.astype(np.int64), kind="stable").tolist():
        load, number = heappop(free)
        taker[sample] = number
        room[number] -= 1
        if room[number]:
            heappush(free, (load + int(loads[sample]), number))
    return [np.flatnonzero(taker == number) for number in range(num_parts)]
