"""The runs of a set as they are planned, and the end of one."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from common.config.schema import Loaded
from common.evidence.text import size_title
from common.training import ranks

REPLAY = "replay"  # a cell whose result nobody keeps: its path is not printed
HUNG_AFTER_S = 300  # no rank takes so long for a step, or for a batch of an evaluation
UNWRITABLE = "cannot write results here"
RESULT = re.compile(r"result_([0-9]{1,9})\.txt")


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """The runs of one configuration on this system; `directory` holds their results.

    `num_ranks` is the number to start here: 1 also below torchrun or srun. A continued set has `num_done`
    finished runs, whose seeds are not read, and `num_more` unfinished ones; new results are numbered from
    `first_index`. With a `checkpoint` the one run goes on from there. A `cell` is the place of the set in a
    study. With a `public_value` the seeds are derived from it.
    """

    loaded: Loaded
    directory: Path
    why_apart: str = ""
    num_runs: int
    seeds: tuple[int, ...]
    num_ranks: int = 1
    num_done: int = 0
    num_more: int = 0
    first_index: int = 0
    hung_after_s: float = HUNG_AFTER_S
    drops_caches: bool = False
    anchor: str | None = None  # the address of a time-stamp authority
    checkpoint: Path | None = None
    cell: str = ""
    public_value: str = ""
    preflight: tuple[str, ...] = ()  # what was not well on this machine; a fault was forced past

    @property
    def system(self) -> str:
        return self.directory.parent.name

    @property
    def title(self) -> str:
        config = self.loaded.config
        return f"{config.benchmark} {self.cell or config.configuration} {size_title(config.size)}"

    @property
    def world_size(self) -> int:
        return ranks.count_all(self.num_ranks)

    @property
    def makes_one_run(self) -> bool:
        """True below torchrun or srun, where each start of the command makes one run."""
        return self.world_size > self.num_ranks


class Ended(NamedTuple):
    """The end of a run: its exit code, and what it counts as."""

    code: int
    outcome: Literal["converged", "missed", "ended", "failed", "refused", "lost"]  # refused: before its clock
    reason: str = ""
