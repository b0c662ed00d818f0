"""The parts of the wire format of protocol buffers, and TensorFlow's checksum, that its files here need.

Sources: https://protobuf.dev/programming-guides/encoding; tensorflow/core/lib/hash/crc32c.h.
"""

import google_crc32c
import numpy as np

Value = int | memoryview
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5  # wire types
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


def parse(message: bytes | memoryview) -> dict[int, list[Value]]:
    """Return the values of each field, numbers or bytes. Raises ValueError if it is not a message."""
    content, position = memoryview(message), 0
    fields: dict[int, list[Value]] = {}
    while position < len(content):
        key, position = read_varint(content, position)
        wire_type = key & 7
        if wire_type == VARINT:
            value, position = read_varint(content, position)
            fields.setdefault(key >> 3, []).append(value)
            continue
        if wire_type == BYTES:
            length, position = read_varint(content, position)
        elif wire_type in (FIXED_32, FIXED_64):
            length = 4 if wire_type == FIXED_32 else 8
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        if position + length > len(content):
            raise ValueError("it is cut off")
        fields.setdefault(key >> 3, []).append(content[position : position + length])
        position += length
    return fields
