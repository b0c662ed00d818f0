"""One record of a log: bytes are not trusted, and bad content becomes a `Problem`, never an exception.

The grammar is that of the official parser (mlperf_logging 4.1): a record is what follows the last `:::MLLOG `
of a line, one JSON object; every other line is ignored. Text shown to a person passes through `printable`.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

TOKEN = ":::MLLOG "
SPACED_COLON = re.compile(r'"\s+:')
LOOKALIKE = re.compile(r":::\s*MLLOG", re.IGNORECASE)
MAX_BRACKETS = 200  # a record nests two or three deep; json and repr recurse once per bracket
MAX_TIME_MS = 10**15
YEAR_2000_MS, YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000


class Event(NamedTuple):
    """One record. `time_ms` is wall clock since 1970, `line` counts from 1."""

    time_ms: int
    key: str
    value: object
    event_type: str
    metadata: Mapping[str, object]
    line: int


class Problem(NamedTuple):
    """A line that cannot be read. kind: file, record, time, duplicate or token."""

    kind: str
    line: int
    text: str


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


def parse_record(payload: str, line: int, problems: list[Problem]) -> Event | Problem:
    if payload.count("[") + payload.count("{") > MAX_BRACKETS:
        return Problem("record", line, f"more than {MAX_BRACKETS} brackets")
    try:
        record = json.loads(payload)
        if _may_repeat_a_key(payload, record):
            record = json.loads(payload, object_pairs_hook=partial(_unique, line, problems))
    except ValueError as error:  # not JSON, or an integer of more than 4300 digits
        return Problem("record", line, getattr(error, "msg", "a number is too long"))
    if not isinstance(record, dict):
        return Problem("record", line, "not a JSON object")
    missing = [name for name in ("time_ms", "key", "value", "metadata") if name not in record]
    if missing:
        return Problem("record", line, f"lacks {', '.join(missing)}")
    time_ms, key, metadata = record["time_ms"], record["key"], record["metadata"]
    if not isinstance(key, str) or not isinstance(metadata, dict):
        return Problem("record", line, "key is not text, or metadata is not an object")
    if type(time_ms) is not int or not 0 <= time_ms < MAX_TIME_MS:
        return Problem("time", line, printable(time_ms, 40))
    return Event(time_ms, key, record["value"], str(record.get("event_type", "")), metadata, line)


def _may_repeat_a_key(payload: str, record: object) -> bool:
    """False where the number of `":` proves that no key stands twice."""
    if not isinstance(record, dict) or SPACED_COLON.search(payload):
        return True
    inner = sum(len(value) for value in record.values() if isinstance(value, dict))
    return payload.count('":') != len(record) + inner


def _unique(line: int, problems: list[Problem], pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(record := dict(pairs)) < len(pairs):
        problems.append(Problem("duplicate", line, "the last value counts"))
    return record
