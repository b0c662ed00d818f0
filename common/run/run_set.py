"""A planned run set, the specification of one of its runs, and the end of a run."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common.config.schema import Loaded
from common.evidence.text import size_title
from common.training import ranks

REPLAY = "replay"  # a cell whose result is removed, so that its path is not printed
HUNG_AFTER_S = 300  # longer than any healthy step or batch of an evaluation
UNWRITABLE = "cannot write results here"
RESULT = re.compile(r"result_([0-9]{1,9})\.txt")


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """The runs of one configuration on this system; `directory` holds their results.

    `why_apart` says why the folder's name states a difference. `num_ranks` is the number to start here: 1
    also under torchrun or srun. A continued set has `num_done` finished runs, whose seeds are not read, and
    `num_more` unfinished ones; new results are numbered from `first_index`. The one run is resumed from a
    `checkpoint`. A `cell` is the place of the set in a study. Seeds are derived from a `public_value`.
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
    preflight: tuple[str, ...] = ()  # warnings of the checks, and faults that --force ignored

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
        """True under torchrun or srun, where each start of the command makes one run."""
        return self.world_size > self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run, as the launcher specifies it for the ranks that make it.

    `result` is relative to the repository if it lies inside.
    """

    config: dict[str, Any]
    seed: int
    system: str
    result: str
    expected_s: float | None  # median of the earlier runs of this configuration on this system
    drops_caches: bool = False  # the page cache of the whole machine, not only the data's pages
    needs_gpu: bool = False  # never fall back to the CPU silently
    checkpoint: str | None = None  # the file to resume from
    most_threads: int | None = None  # of a rank beside other programs; None: torch's default
    processor: str = ""
    bf16_instructions: tuple[str, ...] = ()


class Ended(NamedTuple):
    """The end of a run: its exit code, and what it counts as."""

    code: int
    outcome: Literal["converged", "missed", "ended", "failed", "refused", "lost"]  # refused: before its clock
    reason: str = ""
