"""The seal of a run set, written before its first run, and the list of the runs that were started.

`runset.json` lies beside the results, is written once and never changed. `runs.jsonl` gets a line when a run
starts and when it ends, whatever became of it; each line carries the SHA-256 of the line before, the first
one that of the seal. The comment lines of a result name the seal and the line of its start, and the line of
its end names the head of the result's chain (chain.py), so that each result commits to those before it.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from common.errors import first_fault
from common.evidence.records import read_bytes
from common.evidence.sealed.chain import digest

SEAL, RUNS = "runset.json", "runs.jsonl"
MAX_SEAL_BYTES = 2**20
MAX_RUNS_BYTES = 2**24
MAX_FAULTS, MAX_LINES = 100, 10_000  # of the list: 5,000 runs
SEED_BITS = 31
BEACON = "beacon:"  # begins a public value on the command line

Text = Annotated[str, StringConstraints(max_length=4000)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Result = Annotated[str, StringConstraints(pattern=r"^result_[0-9]{1,9}\.txt$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Seal(Strict):
    """The decisions made before the first run of a set.

    `seeds` is None where they come from the public value that `beacon` names, which is not known yet.
    `configuration` and `data` (the fingerprint of the data set) are those of the logs. `unsealed` names
    results that lay in the folder already.
    """

    format: Literal[1] = 1
    made: Text  # UTC, ISO 8601
    system: Text
    benchmark: Text
    configuration_name: Text
    size: Text
    num_runs: Annotated[int, Field(ge=1, le=1000)]
    seeds: list[int] | None
    beacon: Text = ""
    commit: Text
    code: Text
    versions: Text
    ranks: int
    threads: int
    machine: dict[Text, Text]
    data: Text
    configuration: dict[str, Any]
    unsealed: list[Result] = []


class Started(Strict):
    """A run was started; `resumed` names the result whose checkpoint it goes on from."""

    event: Literal["started"] = "started"
    time: Text
    result: Result
    seed: int
    resumed: Text = ""
    previous: Digest


class Ended(Strict):
    """A run ended. `head` is that of its log; '' where no log is kept, because its clock had not started.

    `lost`: somebody removed the log while it ran. `killed`: its launcher was killed before the clock had
    started; a later command in the folder wrote this line.
    """

    event: Literal["ended"] = "ended"
    time: Text
    result: Result
    outcome: Literal["converged", "missed", "ended", "failed", "refused", "lost", "killed"]
    reason: Text = ""
    head: Digest | Literal[""]
    previous: Digest


class Extended(Strict):
    """More runs were decided after the seal."""

    event: Literal["extended"] = "extended"
    time: Text
    seeds: list[int]
    previous: Digest


class Derived(Strict):
    """The public value that the seal named became known, and gave the seeds."""

    event: Literal["derived"] = "derived"
    time: Text
    value: Text
    seeds: list[int]
    previous: Digest


Event = Annotated[Started | Ended | Extended | Derived, Field(discriminator="event")]
EVENT: TypeAdapter[Event] = TypeAdapter(Event)


class Fault(NamedTuple):
    """A place of `runset.json` or `runs.jsonl` that is wrong: file name, line (0: the whole), and why."""

    file: str
    line: int
    text: str


class SealedSet(NamedTuple):
    """The two files as read: each event with its line. `tip` is the hash of the last line of the list.

    `digests` are the hashes of its lines, from the first.
    """

    seal: Seal | None
    digest: str
    events: tuple[tuple[int, Event], ...]
    tip: str
    faults: tuple[Fault, ...]
    digests: tuple[str, ...] = ()


def read_sealed(folder: Path) -> SealedSet | None:
    """Read the seal and the list of a folder; None where neither exists. Never raises."""
    if not (folder / SEAL).exists() and not (folder / RUNS).exists():
        return None
    seal: Seal | None = None
    faults: list[Fault] = []
    data = lines = b""
    try:
        data = read_bytes(folder / SEAL, MAX_SEAL_BYTES)
        seal = Seal.model_validate_json(data)
    except ValueError as error:
        faults.append(Fault(SEAL, 0, first_fault(error)))
    try:
        lines = read_bytes(folder / RUNS, MAX_RUNS_BYTES) if (folder / RUNS).exists() else b""
    except ValueError as error:
        faults.append(Fault(RUNS, 0, first_fault(error)))
    events: list[tuple[int, Event]] = []
    tip, digests = digest(data), []
    for number, line in enumerate(lines.splitlines(keepends=True), 1):
        try:
            event = EVENT.validate_json(line)
        except ValueError as error:
            faults.append(Fault(RUNS, number, first_fault(error)))
        else:
            events.append((number, event))
            if event.previous != tip:
                before = f"line {number - 1}" if number > 1 else SEAL
                faults.append(Fault(RUNS, number, f"{before} was changed after this line was written"))
        tip = digest(line)
        digests.append(tip)
        if len(faults) > MAX_FAULTS or number > MAX_LINES:
            faults[MAX_FAULTS:] = [Fault(RUNS, number, "no line from here on was read")]
            break
    return SealedSet(seal, digest(data), tuple(events), tip, tuple(faults), tuple(digests))


def derive_seeds(seal: str, value: str, number: int) -> list[int]:
    """Derive so many seeds, all different, from the hash of a seal and a public value that came later."""
    seeds: dict[int, None] = {}
    for count in range(2 * number + 100):
        content = hashlib.sha256(f"{seal}\n{value}\nseed {count}".encode()).digest()
        seeds[int.from_bytes(content[:8], "big") >> (64 - SEED_BITS)] = None
    return list(seeds)[:number]


def draw(tip: str, value: str, results: list[str]) -> str:
    """Draw one result by the hash of the whole list of runs and a public value that came later."""
    content = hashlib.sha256(f"{tip}\n{value}\ndraw".encode()).digest()
    return sorted(results)[int.from_bytes(content[:16], "big") % len(results)]
