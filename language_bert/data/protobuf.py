"""Parse the protocol buffers in TensorFlow's files, and compute TensorFlow's checksum.

Sources: https://protobuf.dev/programming-guides/encoding; tensorflow/core/lib/hash/crc32c.h.
"""

from typing import Any

import google_crc32c
import numpy as np

VARINT, BYTES, FIXED_BYTES = 0, 2, {1: 8, 5: 4}  # wire types
MAX_VARINT_BYTES = 10


def masked_crc(content: bytes) -> int:
    """Return the CRC-32C of `content` as TensorFlow stores it: rotated, and a constant added."""
    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_varint(content: memoryview, position: int) -> tuple[int, int]:
    """Return an unsigned number and the position behind it. Raises ValueError for a truncated one."""
    value = 0
    for index, byte in enumerate(content[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("a number does not end")


def read_varints(content: memoryview) -> np.ndarray:
    """Return the numbers (count,) int64 of a packed list. Raises ValueError for a truncated one."""
    coded = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(coded < 0x80)
    lengths = np.diff(ends, prepend=-1)
    if lengths.sum() != len(coded) or lengths.max(initial=0) > MAX_VARINT_BYTES:
        raise ValueError("a number does not end")
    starts = ends - lengths + 1
    shifts = 7 * (np.arange(len(coded)) - np.repeat(starts, lengths))
    return np.add.reduceat((coded & 0x7F).astype(np.int64) << shifts, starts) if len(coded) else ends


def parse(message: bytes | memoryview) -> dict[int, list[Any]]:
    """Return the values of each field, int or memoryview. Raises ValueError if it is not a message."""
    content, position = memoryview(message), 0
    fields: dict[int, list[Any]] = {}
    while position < len(content):
        key, position = read_varint(content, position)
        values, wire_type = fields.setdefault(key >> 3, []), key & 7
        if wire_type == VARINT:
            value, position = read_varint(content, position)
            values.append(value)
            continue
        if wire_type == BYTES:
            length, position = read_varint(content, position)
        elif wire_type in FIXED_BYTES:
            length = FIXED_BYTES[wire_type]
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        if position + length > len(content):
            raise ValueError("it is cut off")
        values.append(content[position : position + length])
        position += length
    return fields
