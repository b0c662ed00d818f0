"""Memory that a launcher shares with its ranks: the specification, and each rank's progress and failure.

A rank stores its progress as one word, and its failure as a line of text; no process waits for another.
"""

import json
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import IO, Any

PHASES = (  # in the order in which a rank passes them
    "between steps",
    "evaluating",
    "at the end of an evaluation",
    "waiting for a batch",
    "computing a step",
)
BETWEEN, EVALUATING, EVALUATED, LOADING, COMPUTING = range(len(PHASES))

SLOT_BYTES = 1024  # for each rank: words of 8 bytes, and from byte TEXT_AT the cause of its failure
TEXT_AT = 64
# Indices of the words; FAILED_AT is a monotonic time in nanoseconds.
POSITION, COUNT, FAILED_AT, SHUTTING_DOWN, FAILED_STEP = range(5)
FIRST = 1  # a FAILED_AT before any real time


class Slot:
    """The progress of one rank: written by the rank, read by its launcher."""

    def __init__(self, memory: memoryview | None = None) -> None:
        """Use a part of the shared memory; without `memory` nobody else reads the slot."""
        self.memory = memoryview(bytearray(SLOT_BYTES)) if memory is None else memory
        self.words = self.memory.cast("q")

    def enter(self, step: int, phase: int) -> None:
        """Record that this rank has taken `step` whole steps and enters a phase."""
        self.words[POSITION] = step * len(PHASES) + phase

    def count_progress(self) -> None:
        self.words[COUNT] += 1

    @property
    def step(self) -> int:
        return self.words[POSITION] // len(PHASES)

    @property
    def phase(self) -> str:
        return PHASES[self.words[POSITION] % len(PHASES)]

    def fail(self, cause: str, *, at_ns: int | None = None) -> None:
        """Record why this rank ends; the first cause stays, unless `at_ns` is earlier."""
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        if self.words[FAILED_AT] and self.words[FAILED_AT] <= at_ns:
            return
        room = SLOT_BYTES - TEXT_AT
        self.memory[TEXT_AT:] = cause.encode(errors="replace")[:room].ljust(room, b"\0")
        self.words[FAILED_STEP] = self.step
        self.words[FAILED_AT] = at_ns

    @property
    def cause(self) -> str:
        """The cause of the rank's failure; empty while there is none."""
        return bytes(self.memory[TEXT_AT:]).rstrip(b"\0").decode(errors="ignore")


def describe_failure(step: int, cause: str, who: str = "") -> str:
    """Describe in one line who failed, when and why; logs and seals remove folders from it."""
    when = f"after step {step:,}" if step else "before the first step"
    return " ".join(f"{who}{', ' if who else ''}{when}: {cause}".split())


class Heartbeat:
    """The slots of all ranks, followed by the specification of the run, which rank 0 reads."""

    def __init__(self, file: IO[bytes], path: str, num_ranks: int) -> None:
        self.file, self.path = file, path
        self.memory = memoryview(mmap.mmap(file.fileno(), 0))
        self.slots = [
            Slot(self.memory[rank * SLOT_BYTES : (rank + 1) * SLOT_BYTES]) for rank in range(num_ranks)
        ]

    @classmethod
    def create(cls, num_ranks: int, spec: dict[str, Any]) -> "Heartbeat":
        """Create the memory; on Linux it has no name, and is freed with the last process that maps it."""
        if hasattr(os, "memfd_create"):
            file: IO[bytes] = os.fdopen(os.memfd_create("heartbeat"), "r+b")
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed with the heartbeat
            path = file.name
        file.write(bytes(num_ranks * SLOT_BYTES) + json.dumps(spec).encode())
        file.flush()
        return cls(file, path, num_ranks)

    @classmethod
    def open(cls, path: str, num_ranks: int) -> "Heartbeat":
        with Path(path).open("r+b") as file:
            return cls(file, path, num_ranks)

    def close(self) -> None:
        """Let no further rank open the memory."""
        self.file.close()

    @property
    def spec(self) -> dict[str, Any]:
        """The specification of the run, for rank 0."""
        return dict(json.loads(bytes(self.memory[len(self.slots) * SLOT_BYTES :])))

    @property
    def is_shutting_down(self) -> bool:
        """True if the launcher is ending the ranks and will close the log."""
        return bool(self.slots[0].words[SHUTTING_DOWN])

    def announce_shutdown(self) -> None:
        self.slots[0].words[SHUTTING_DOWN] = 1

    def record_death(self, rank: int, cause: str) -> None:
        """Record why the first rank to die ended; `failure` names it before the failures that it caused."""
        if not any(slot.words[FAILED_AT] == FIRST for slot in self.slots):
            self.slots[rank].fail(cause, at_ns=FIRST)

    def failure(self) -> str:
        """Say which rank failed first, after which step and why; empty when none did."""
        failed = [rank for rank, slot in enumerate(self.slots) if slot.words[FAILED_AT]]
        if not failed:
            return ""
        rank = min(failed, key=lambda number: self.slots[number].words[FAILED_AT])
        slot = self.slots[rank]
        return describe_failure(slot.words[FAILED_STEP], slot.cause, f"rank {rank} of {len(self.slots)}")

    def interruption(self) -> str:
        return describe_failure(max(slot.step for slot in self.slots), "interrupted")
