"""Anchors: replies of time-stamp authorities that lie in `anchors.jsonl` beside the results.

A line holds the reply for the bytes of one line of a log (`line` 0: for the whole seal), or the reason why
there is none. A record carries the hash of all that stands before it (chain.py), so that a reply for its line
proves that the log was so at the time that the authority states.
"""

import base64
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StringConstraints

from common.errors import first_fault
from common.evidence.log import MAX_BYTES, Log, RunSet
from common.evidence.paths import label, result_name
from common.evidence.records import Event, read_bytes
from common.evidence.sealed.chain import digest
from common.evidence.sealed.replies import MAX_REPLY_BYTES, Reply, read_reply
from common.evidence.sealed.seal import SEAL, Digest, Result, SealedSet, Strict, Text, read_sealed
from common.repository import install_hint

ANCHORS = "anchors.jsonl"
ANCHORED_KEYS = ("run_start", "eval_accuracy", "run_stop")
MAX_ANCHORS_BYTES = 2**25
MAX_ANCHORS = 10_000
MAX_DELAY_MS = 2_000  # of a reply that bounds an interval
MAX_WAIT_MS = 20_000  # for a reply, and at the end of a command for the last ones
Base64 = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/=]*$", max_length=2 * MAX_REPLY_BYTES)]


class Anchor(Strict):
    """A line of `anchors.jsonl`: `sha256` of the stamped bytes, a reply (base64) or a failure.

    `url`, scheme and host of a public authority, is in older lines only. `delay_ms` is the time from the last
    moment without the bytes to the reply.
    """

    of: Literal["runset.json"] | Result
    line: Annotated[int, Field(ge=0)]
    sha256: Digest
    url: Text = ""
    delay_ms: Annotated[int, Field(ge=0)] = 0
    reply: Base64 = ""
    failure: Text = ""

    @property
    def where(self) -> tuple[str, int]:
        return self.of, self.line


class Place(NamedTuple):
    """A record that an anchored run has stamped, or the seal (no log, no event)."""

    of: str
    line: int
    log: Log | None = None
    event: Event | None = None

    @property
    def where(self) -> tuple[str, int]:
        return self.of, self.line

    def __str__(self) -> str:
        return f"{self.of} line {self.line} ({self.event.key})" if self.event else self.of


class Stamp(NamedTuple):
    """A reply, by its line in `anchors.jsonl`.

    `edit` says how the bytes differ from the stamped ones, `fault` why the reply is wrong or cannot be read.
    `place` is None where the line is no record that a run stamps.
    """

    number: int
    anchor: Anchor
    place: Place | None
    edit: str
    fault: str
    reply: Reply | None

    @property
    def is_good(self) -> bool:
        return self.reply is not None and not self.edit and not self.fault and self.place is not None

    @property
    def is_prompt(self) -> bool:
        """True if the reply came soon enough to bound an interval."""
        return self.is_good and self.anchor.delay_ms <= MAX_DELAY_MS

    def earliest_ms(self) -> float:
        """Return the earliest time of the authority's clock at which the bytes were sent, by its delay."""
        assert self.reply
        return self.reply.time_ms - self.reply.accuracy_ms - min(self.anchor.delay_ms, MAX_WAIT_MS)

    def latest_ms(self) -> float:
        """Return the latest time at which the bytes were there: the reply cuts off parts of a second."""
        assert self.reply
        return self.reply.time_ms + 1000 + self.reply.accuracy_ms


class Anchored(NamedTuple):
    """The replies beside a run set; `places` are all that have, or lack, one.

    `is_verified` is False if the library is not installed. `faults` are lines that cannot be read,
    `explained` the places for whose missing reply a line states a reason.
    """

    path: str
    sealed: SealedSet | None
    places: tuple[Place, ...]
    stamps: tuple[Stamp, ...]
    faults: tuple[tuple[int, str], ...] = ()
    is_verified: bool = True
    explained: frozenset[tuple[str, int]] = frozenset()

    def good(self) -> list[Stamp]:
        return [stamp for stamp in self.stamps if stamp.is_good]

    def summary(self) -> str:
        """Say in a line how many places are stamped, and by whom."""
        good = self.good()
        num_places = len({stamp.anchor.where for stamp in good})
        text = f"{num_places} of {len(self.places)} places stamped"
        if not self.is_verified:
            return f"not verified; {install_hint('anchor')}"
        signers = sorted({stamp.reply.signer for stamp in good if stamp.reply})
        text += f" by {', '.join(signers[:3])}" if signers else ""
        unknown = any(stamp.reply and not stamp.reply.is_identified for stamp in good)
        return text + (", whose identity was not verified (--anchor-root)" if unknown else "")


class Source:
    """The files beside the replies, each read once."""

    def __init__(self, folder: Path, run_set: RunSet) -> None:
        self.folder = folder
        self.logs = {result_name(log.file): log for log in run_set.logs if log.file}
        self.lines: dict[str, list[bytes]] = {}  # of a file: all of it, then each line
        self.digests: dict[tuple[str, int], str] = {}

    @cached_property
    def places(self) -> dict[tuple[str, int], Place]:
        """The places of the logs that a run stamps, and of the seal."""
        places = [Place(SEAL, 0)] if (self.folder / SEAL).exists() else []
        for name, log in self.logs.items():
            if not log.is_resumed:
                places += [Place(name, event.line, log, event) for event in log.events(*ANCHORED_KEYS)]
        return {place.where: place for place in places}

    def digest_of(self, of: str, line: int) -> str:
        """Return the SHA-256 of a line, or of the file; '' where it is not there."""
        if of not in self.lines:
            try:
                log = self.logs.get(of)
                data = read_bytes(log.file if log and log.file else self.folder / of, MAX_BYTES)
                self.lines[of] = [data, *data.splitlines(keepends=True)]
            except ValueError:
                self.lines[of] = []
        if (of, line) not in self.digests:  # a file may have millions of lines, and few stamps
            lines = self.lines[of]
            self.digests[of, line] = digest(lines[line]) if line < len(lines) else ""
        return self.digests[of, line]

    def compare(self, anchor: Anchor) -> str:
        """Say how the bytes of an anchor differ from the stamped ones; '' if they do not."""
        if (actual := self.digest_of(*anchor.where)) == anchor.sha256:
            return ""
        what = f"line {anchor.line} of {anchor.of}" if anchor.line else anchor.of
        return f"{what} was {'changed' if actual else 'removed'} after it was stamped"


def read_anchored(run_set: RunSet, roots: Sequence[Any] = ()) -> Anchored | None:
    """Read the replies beside the results of a set; None if no run asked for any. Never raises.

    `roots` are certificates that the authority must lead to; without any its identity is not verified.
    """
    if run_set.lead.file is None:
        return None
    path = run_set.lead.file.parent / ANCHORS
    if not path.exists() and not any(map(asked_for_stamps, run_set.logs)):
        return None
    source = Source(path.parent, run_set)
    sealed, places = read_sealed(path.parent), tuple(source.places.values())
    empty = Anchored(label(path), sealed, places, ())
    try:
        lines = read_bytes(path, MAX_ANCHORS_BYTES).splitlines() if path.exists() else []
        if len(lines) > MAX_ANCHORS:
            raise ValueError(f"more than {MAX_ANCHORS:,} lines")
    except ValueError as error:
        return empty._replace(faults=((0, str(error)),))
    faults, stamps, is_verified, explained = [], [], True, set[tuple[str, int]]()
    for number, line in enumerate(lines, 1):
        try:
            anchor = Anchor.model_validate_json(line)
        except ValueError as error:
            faults.append((number, first_fault(error)))
            continue
        if not anchor.reply:
            explained.add(anchor.where)
        else:
            try:
                stamps.append(read_stamp(number, anchor, source, roots))
            except ImportError:
                is_verified = False
                stamps.append(Stamp(number, anchor, None, source.compare(anchor), "", None))
    return empty._replace(
        stamps=tuple(stamps), faults=tuple(faults), is_verified=is_verified, explained=frozenset(explained)
    )


def asked_for_stamps(log: Log) -> bool:
    """True if the command in the head of a log has --anchor, or its first letters."""
    words = (word.partition("=")[0] for word in log.header("command").split())
    return not log.is_resumed and any(
        word.startswith("--a") and "--anchor".startswith(word) for word in words
    )


def read_stamp(number: int, anchor: Anchor, source: Source, roots: Sequence[Any]) -> Stamp:
    """Read a reply and compare it with the bytes that it is of. Raises ImportError without the library."""
    edit, place = source.compare(anchor), source.places.get(anchor.where)
    try:
        reply = read_reply(base64.b64decode(anchor.reply, validate=True), roots)
    except ValueError as error:
        return Stamp(number, anchor, place, edit, str(error), None)
    if reply.imprint.hex() != anchor.sha256:
        edit = edit or f"the reply is of other bytes than line {anchor.line} of {anchor.of}"
    return Stamp(number, anchor, place, edit, reply.fault, reply)
