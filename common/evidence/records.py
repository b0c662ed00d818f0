"""Untrusted files and records of a log, whose bad content becomes a `Problem`, never an exception.

The grammar is that of the official parser (mlperf_logging 4.1): a record is what follows the last `:::MLLOG `
of a line, one JSON object; every other line is ignored. Text shown to a person passes through `printable`.
"""

import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = ":::MLLOG "
LOOKALIKE = re.compile(r":::\s*MLLOG", re.IGNORECASE)
MAX_BRACKETS = 200  # a record nests two or three deep; json and repr recurse once per bracket
BETWEEN_OBJECTS = re.compile(r"\} *, *\{")
TOO_DEEP = f"more than {MAX_BRACKETS} brackets"
MAX_TIME_MS = 10**15
AT_ONCE = 10_000  # records in one call; a long log of NVIDIA has as many
COARSE = 2**12  # a mantissa of at most 12 bits was rounded: float16 has 11
NEEDED = ("time_ms", "key", "value", "metadata")
YEAR_2000_MS, YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 run`, `2 runs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Event(NamedTuple):
    """One record. `time_ms` is wall clock since 1970, `line` counts from 1."""

    time_ms: int
    key: str
    value: object
    event_type: str
    metadata: Mapping[str, object]
    line: int

    def number(self, name: str) -> float | None:
        """Return a number of the metadata; None for anything else."""
        return finite(self.metadata.get(name))


class Problem(NamedTuple):
    """A line that cannot be read. kind: file, record, time, duplicate or token."""

    kind: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


def is_rounded(number: float) -> bool:
    """True for a value of up to six digits, or of half precision."""
    mantissa, _ = math.frexp(number)
    return float(f"{number:.6g}") == number or (mantissa * COARSE).is_integer()


def printable(value: object, limit: int = 200) -> str:
    """Return text that is safe to show: one line, no terminal or bidirectional control characters."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "..."


def finite(value: object) -> float | None:
    """Return a number as float; None for text, bool, NaN, and beyond 1e18, where no real value lies."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e18 < value < 1e18 else None


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file. Raises ValueError for any other, and for more than `limit`."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError("not a regular file; links are refused")
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise ValueError(error.strerror or "cannot be read") from error
    if len(data) > limit:
        raise ValueError(f"larger than {limit // 2**20} MiB")
    return data


class RepeatedKeyError(ValueError):
    """A key stands twice in a JSON object."""


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object of its pairs (json's object_pairs_hook). Raises RepeatedKeyError."""
    record = dict(pairs)
    if len(record) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise RepeatedKeyError(f"'{printable(repeated, 64)}' is written twice")
    return record


needed_fields = itemgetter(*NEEDED)
STRICT_DECODER = json.JSONDecoder(object_pairs_hook=unique)


def has_many_brackets(text: str) -> bool:
    return text.count("[") + text.count("{") > MAX_BRACKETS


def decode_all(payloads: Sequence[str]) -> list[object] | None:
    """Decode the records of a log in one call; None if one call per record might give another result.

    Payloads and JSON strings hold no newline, so no separator lies inside a string. Two payloads that form
    one object together are noticed by the count, unless another payload holds two objects: those are refused.
    No key is repeated if there are as many `":` as keys and no space before a colon. No record has too many
    brackets if every `{` begins a record, value or metadata and all records together have few `[`.
    """
    text = ",\n".join(payloads)
    if " :" in text or "\t" in text or text.count("[") > MAX_BRACKETS // 2 or BETWEEN_OBJECTS.search(text):
        return None
    try:
        records: list[Any] = json.loads(f"[{text}]")
    except (ValueError, RecursionError):
        return None
    if len(records) != len(payloads) or not all(type(record) is dict for record in records):
        return None
    fields = [record.get(name) for record in records for name in ("value", "metadata")]
    objects = [value for value in (*records, *fields) if type(value) is dict]
    is_plain = text.count('":') == sum(map(len, objects)) and text.count("{") == len(objects)
    return records if is_plain else None


def parse_records(payloads: Sequence[tuple[int, str]], problems: list[Problem]) -> Iterator[Event | Problem]:
    """Yield the event of each record, or its problem; repeated keys are appended to `problems`.

    The records are decoded in parts, so that a reader who stops early has spent little memory.
    """
    for first in range(0, len(payloads), AT_ONCE):
        some = payloads[first : first + AT_ONCE]
        decoded = decode_all([payload for _, payload in some])
        if decoded is None:
            yield from (parse_record(payload, line, problems) for line, payload in some)
        else:
            yield from (make_event(record, line) for (line, _), record in zip(some, decoded, strict=True))


def parse_record(payload: str, line: int, problems: list[Problem]) -> Event | Problem:
    if has_many_brackets(payload):
        return Problem("record", line, TOO_DEEP)
    try:
        try:
            record = STRICT_DECODER.decode(payload)
        except RepeatedKeyError:
            record = json.loads(payload)
            problems.append(Problem("duplicate", line, "the last value counts"))
    except ValueError as error:  # not JSON, or an integer of more than 4300 digits
        return Problem("record", line, getattr(error, "msg", "a number is too long"))
    return make_event(record, line)


def make_event(record: object, line: int) -> Event | Problem:
    if not isinstance(record, dict):
        return Problem("record", line, "not a JSON object")
    try:
        time_ms, key, value, metadata = needed_fields(record)
    except KeyError:
        return Problem("record", line, f"lacks {', '.join(name for name in NEEDED if name not in record)}")
    if not isinstance(key, str) or not isinstance(metadata, dict):
        return Problem("record", line, "key is not text, or metadata is not an object")
    if type(time_ms) is not int or not 0 <= time_ms < MAX_TIME_MS:
        return Problem("time", line, f"time_ms is {printable(time_ms, 40)}")
    return Event(time_ms, key, value, str(record.get("event_type", "")), metadata, line)
