"""The logs of a set beside its seal and the list of its runs: each log finds its line, each line its log."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from common.evidence.log import Log, RunSet
from common.evidence.paths import label, result_name
from common.evidence.recipes import Recipe, of_configuration, software
from common.evidence.records import counted
from common.evidence.sealed.seal import Derived, Ended, Extended, Seal, SealedSet, Started, read_sealed


class Run(NamedTuple):
    """A run in the list: the line of its start with its hash, and that of its end, 0 without one."""

    line: int
    started: Started
    digest: str
    end_line: int = 0
    ended: Ended | None = None

    @property
    def has_log(self) -> bool:
        """True if the run ended with a log that was to be kept."""
        return self.ended is not None and bool(self.ended.head)

    @property
    def was_timed(self) -> bool:
        """True unless the run ended before its clock had started."""
        return self.ended is None or self.has_log or self.ended.outcome == "lost"


class Decided(NamedTuple):
    """Seeds that were decided, the line that says so (0: the seal), and how many results were known then."""

    line: int
    seeds: tuple[int, ...]
    num_known: int


def pair_runs(sealed: SealedSet) -> list[Run]:
    """Pair the starts of runs with their ends; an end belongs to the last start of its result."""
    runs: list[Run] = []
    last: dict[str, int] = {}  # result -> index of its last run
    for line, event in sealed.events:
        if isinstance(event, Started):
            last[event.result] = len(runs)
            runs.append(Run(line, event, sealed.digests[line - 1]))
        elif isinstance(event, Ended) and event.result in last:
            index = last[event.result]
            if runs[index].ended is None:
                runs[index] = runs[index]._replace(end_line=line, ended=event)
    return runs


def list_decided(sealed: SealedSet) -> list[Decided]:
    """List the decisions of seeds: by the seal, the public value and extensions, in this order."""
    decided, num_known = [], 0
    if sealed.seal and sealed.seal.seeds is not None:
        decided.append(Decided(0, tuple(sealed.seal.seeds), 0))
    for line, event in sealed.events:
        if isinstance(event, Ended):
            num_known += bool(event.head)
        elif isinstance(event, Extended | Derived):
            decided.append(Decided(line, tuple(event.seeds), num_known))
    return decided


class Turns:
    """The decided seeds that no run has used yet.

    The seeds of a decision are used in order; some may be left when more are decided. The seed of a run that
    left no log may be used again.
    """

    def __init__(self, decided: Iterable[Decided]) -> None:
        self.waiting = [(part.line, list(part.seeds[::-1])) for part in decided]
        self.retried = set[int]()

    def before(self, line: int) -> list[list[int]]:
        """List the seeds that each decision above a line has left, the next one last."""
        return [seeds for decided, seeds in self.waiting if decided < line and seeds]

    def take(self, seed: int, line: int) -> bool:
        """Take a seed for the run that a line starts; returns False if the run may not have it."""
        turn = next((seeds for seeds in self.before(line) if seeds[-1] == seed), None)
        if turn is not None:
            turn.pop()
        return turn is not None or seed in self.retried

    def take_of(self, run: Run) -> bool:
        """Take the seed of a run of the list; a resumed run keeps a seed that was taken."""
        may_have = bool(run.started.resumed) or self.take(run.started.seed, run.line)
        if not run.has_log:
            self.retried.add(run.started.seed)
        return may_have


@dataclass(frozen=True)
class Sealing:
    """A run set, the seal and the list beside its results (None without), and the results in its folder."""

    run_set: RunSet
    sealed: SealedSet | None = None
    names: frozenset[str] = frozenset()

    @property
    def seal(self) -> Seal | None:
        return self.sealed.seal if self.sealed else None

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(pair_runs(self.sealed)) if self.sealed else ()

    @cached_property
    def decided(self) -> tuple[Decided, ...]:
        """The seeds that the seal, the public value and extensions decided, in this order."""
        return tuple(list_decided(self.sealed)) if self.sealed else ()

    @property
    def extensions(self) -> list[Decided]:
        """The decisions for more runs that were made when results were known."""
        return [decided for decided in self.decided if decided.num_known]

    @cached_property
    def unsealed(self) -> list[Log]:
        """The logs that lay in the folder before it was sealed."""
        return [log for log in self.run_set.logs if self.predates_seal(log)]

    def predates_seal(self, log: Log) -> bool:
        """Return whether a log lay in the folder before it was sealed."""
        return (
            self.seal is not None and result_name(log.path) in self.seal.unsealed and self.run_of(log) is None
        )

    @property
    def unended(self) -> list[Run]:
        """The runs that no line of their launcher ends."""
        return [run for run in self.runs if run.ended is None or run.ended.outcome == "killed"]

    @property
    def num_not_started(self) -> int:
        decided = {seed for one in self.decided for seed in one.seeds}
        return len(decided - {run.started.seed for run in self.runs if not run.started.resumed})

    @cached_property
    def _by_digest(self) -> dict[str, Run]:
        return {run.digest: run for run in self.runs}

    @cached_property
    def last_by_name(self) -> dict[str, Run]:
        """The last run of each result: an earlier one left no log, or one that was removed."""
        return {run.started.result: run for run in self.runs}

    def run_of(self, log: Log) -> Run | None:
        """Return the run that a log names by the hash of its start, else the last with its number.

        The head of a resumed log is that of the run from which it goes on.
        """
        named = None if log.is_resumed else self._by_digest.get(log.header("started"))
        return named or self.last_by_name.get(result_name(log.path))

    def paired(self) -> Iterator[tuple[Log, Run]]:
        """Yield each log that has a line of the list, with its run."""
        for log in self.run_set.logs:
            if (run := self.run_of(log)) is not None:
                yield log, run

    def place(self, name: str) -> str:
        """Return the path of a file in the set's folder for messages."""
        file = self.run_set.lead.file
        return label(file.parent / name) if file else name

    def describe(self, *, is_broken: bool = False) -> str:
        """Say that a set is sealed, and which parts are not; '' for a set without a seal."""
        if self.sealed is None and not any(log.header("seal") for log in self.run_set.logs):
            return ""
        if is_broken or self.seal is None:
            return "its seal is broken"
        parts = ["sealed, seeds of a public value" if self.seal.beacon else "sealed"]
        if self.extensions:
            times = f" {len(self.extensions)} times, first" if len(self.extensions) > 1 else ""
            num_known = self.extensions[0].num_known
            parts.append(f"extended{times} after {counted(num_known, 'run')}")
        parts += [f"{len(self.unsealed)} not sealed"] * bool(self.unsealed)
        parts += [f"{len(self.unended)} never ended"] * bool(self.unended)
        parts += [f"{self.num_not_started} not started"] * bool(self.num_not_started)
        return ", ".join(parts)


def read_sealing(run_set: RunSet) -> Sealing:
    """Read the seal and the list beside the results of a set."""
    file = run_set.lead.file
    sealed = read_sealed(file.parent) if file else None
    if file is None or sealed is None:
        return Sealing(run_set)
    return Sealing(run_set, sealed, frozenset(map(result_name, file.parent.glob("*result_*.txt"))))


def recipe_of_seal(seal: Seal) -> Recipe:
    """Return the recipe that was decided before the first run, as a log states its own."""
    facts: Recipe = {"ranks": seal.ranks, "threads": seal.threads}
    facts |= software(seal.versions, seal.code, seal.commit)
    return of_configuration(seal.configuration) | {
        key: value for key, value in facts.items() if value not in (None, "")
    }
