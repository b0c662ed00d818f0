"""The cheap checks before a run, which take seconds. `ttt run` refuses on a fault unless forced."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.config.schema import RunConfig
from common.errors import UserError
from common.machine import gpus, host, torch_build
from common.machine.line import FAULT, OK, Line
from common.machine.load import Meter


def cheap_checks(size: str, results: Path, num_shards: int, *, has_workers: bool = False) -> Iterator[Line]:
    """Yield the checks that need no processes, no training, and no data."""
    meter = Meter()
    yield host.versions()
    yield gpus.check_presence(size)
    yield from gpus.check_health()
    yield host.space("results", results)
    yield host.space("temporary files", Path(tempfile.gettempdir()))
    yield host.shared_memory(size, is_needed=has_workers)
    yield host.open_files(num_shards)
    yield host.processors(meter)
    if not gpus.visible_gpus() and torch_build.has_torch():
        yield host.core_speed()


def num_shards(config: RunConfig) -> int:
    return sum(1 for _ in config.data_directory.glob("*.shard"))


def preflight(config: RunConfig, results: Path, *, is_forced: bool) -> tuple[str, ...]:
    """Check before a run; returns the lines that were not ok, for the head of its log.

    Raises UserError for a fault, unless `is_forced`.
    """
    has_workers = getattr(config.data, "loader", "") == "workers"  # type: ignore[attr-defined]
    checks = cheap_checks(config.size, results, num_shards(config), has_workers=has_workers)
    lines = [line for line in checks if line.state != OK]
    faults = [line for line in lines if line.state == FAULT]
    if faults and not is_forced:
        more = f" (and {len(faults) - 1} more: ttt doctor --quick)" if len(faults) > 1 else ""
        hint = "or run in spite of it with --force" * faults[0].values.get("is_forcible", True)
        raise UserError(f"{faults[0]}{more}", hint=hint)
    return tuple(f"{line.state}{', forced' * (line.state == FAULT)}: {line}" for line in lines)
