"""Compares a run with its recipe: the global batch, and the samples that batch norm averages over.

Any number of ranks shares the global batch, and accumulates gradients over micro-batches. Where that changes
the recipe, the run is refused until a person decides with --set, and the log says so.
"""

from dataclasses import replace

from common.config.merge import is_asked
from common.config.schema import Loaded
from common.errors import UserError
from common.evidence.records import counted
from common.repository import benchmark_module
from common.training.load import load_config
from common.training.ranks import RankInfo


def mark_unverified(loaded: Loaded, num_ranks: int) -> Loaded:
    """Add to the configuration's changes each difference that makes its recipe an unverified one."""
    config = loaded.config
    recipe = load_config(config.benchmark, loaded.source, size=config.size, settings=[]).config
    differences = []
    if config.global_batch_size != recipe.global_batch_size:
        differences.append(f"global_batch_size: {recipe.global_batch_size} -> {config.global_batch_size}")
    expected, sizes = recipe.micro_batch_size, statistics_sizes(loaded, num_ranks)
    if expected is not None and sizes and sizes != [expected]:
        differences.append(
            f"samples that batch norm averages over: {expected} -> {', '.join(map(str, sizes))}"
        )
    changes = [f"unverified recipe: {difference}" for difference in differences]
    return replace(loaded, changes=loaded.changes + changes)


def statistics_sizes(loaded: Loaded, num_ranks: int) -> list[int]:
    """List the numbers of samples that any rank's batch norm averages over; none without batch norm."""
    name = loaded.config.benchmark
    if not benchmark_module(name, "probes").Probes.has_batch_norm:
        return []
    kind = benchmark_module(name).Benchmark
    # The ranks with the fewest and the most samples.
    ends = [RankInfo(rank=rank, world_size=num_ranks) for rank in (0, num_ranks - 1)]
    return sorted(
        {size for end in ends for size in kind(loaded.config, seed=0, rank_info=end).micro_batch_sizes}
    )


def unverified(loaded: Loaded) -> list[str]:
    return [change for change in loaded.changes if change.startswith("unverified recipe")]


def check_asked(loaded: Loaded, num_ranks: int) -> None:
    """Raise UserError for an unverified recipe that no --set has asked for."""
    keys = ("global_batch_size", "micro_batch_size")
    changes = unverified(loaded)
    if changes and not any(is_asked(loaded.origins.get((key,))) for key in keys):
        largest = statistics_sizes(loaded, num_ranks)[-1]
        raise UserError(
            f"{counted(num_ranks, 'rank')}: {changes[0]}",
            where="micro_batch_size",
            hint=f"--set micro_batch_size={largest} runs it all the same, and the log says so",
        )
