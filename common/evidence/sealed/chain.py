"""The chain of a log: each record carries the SHA-256 of the record before it.

A record's `previous`, in its metadata, is over the bytes from the start of the line of the record before (of
the first record: from the start of the file) to the start of its own line. So it covers comment lines, too,
and an edit, a removed line or another order breaks the chain at the next record. The head of a log is over
the bytes from the start of its last record to the end of the file.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

from common.evidence.records import TOKEN

PREVIOUS = "previous"
MARK = f'"{PREVIOUS}": "'.encode()
RECORD = TOKEN.encode()


class Chain(NamedTuple):
    """The hash of the last record; lines of records that state another hash than the file has, or none."""

    head: str
    breaks: tuple[int, ...] = ()
    unchained: tuple[int, ...] = ()


def digest(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def is_chained(data: bytes) -> bool:
    """True if a record of a log carries a hash."""
    return MARK in data and any(MARK in line for line in data.splitlines() if RECORD in line)


def blocks(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield number and line of each record, and the bytes since the one before; at the end an empty line."""
    block, has_record = bytearray(), False
    number = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if RECORD in line:
            yield number, line, bytes(block)
            block.clear()
            has_record = True
        block += line
    if has_record:
        yield number + 1, b"", bytes(block)


def last_block(data: bytes) -> bytes:
    """Return the bytes from the start of the last record on; all bytes without a record."""
    return [(0, b"", data), *blocks(data)][-1][2]


def read_chain(data: bytes) -> Chain:
    """Compute the head of a log, and check the hashes in its records. Only for a log that `is_chained`."""
    head, faults = digest(data), dict[int, str]()
    for number, line, block in blocks(data):
        head = digest(block)
        if line and (hash_stated := read_stated_hash(line)) != head:
            faults[number] = hash_stated
    breaks = tuple(line for line, hash_stated in faults.items() if hash_stated)
    return Chain(head, breaks, tuple(line for line, hash_stated in faults.items() if not hash_stated))


def read_stated_hash(line: bytes) -> str:
    """Read the hash that a record states; '' for none, and for a line that is no record."""
    try:
        value = json.loads(line.rpartition(RECORD)[2])["metadata"][PREVIOUS]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
