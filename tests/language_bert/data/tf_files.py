"""Writes what TensorFlow would: TFRecord files and checkpoints, byte by byte."""

import struct
from os.path import commonprefix
from pathlib import Path

import numpy as np

from language_bert.data.protobuf import masked_crc

BLOCK_ENTRIES = 3  # few, so that a small table has several blocks
MAGIC = 0xDB4775248B80FB57


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    coded = bytearray()
    while value >= 0x80:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*coded, value])


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(lists: dict[str, list[int] | np.ndarray]) -> bytes:
    entries = b""
    for name, values in lists.items():
        if isinstance(values, np.ndarray):
            feature = field(2, field(1, values.astype("<f4").tobytes()))
        else:
            feature = field(3, field(1, b"".join(map(varint, values))))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def write_tfrecord(path: Path, payloads: list[bytes]) -> None:
    with path.open("wb") as file:
        for payload in payloads:
            length = struct.pack("<Q", len(payload))
            file.write(length + struct.pack("<I", masked_crc(length)))
            file.write(payload + struct.pack("<I", masked_crc(payload)))


def block(entries: list[tuple[bytes, bytes]]) -> bytes:
    """Keys share what they have in common with the one before; one restart point, at the start."""
    content, last = b"", b""
    for key, value in entries:
        shared = len(commonprefix([key, last]))
        content += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return content + struct.pack("<II", 0, 1)


def write_checkpoint(prefix: Path, tensors: dict[str, np.ndarray]) -> None:
    data, entries = b"", [(b"", field(1, 1))]  # a header, then the tensors by name
    for name, values in sorted(tensors.items()):
        content = values.astype("<f4").tobytes()
        shape = b"".join(field(2, field(1, size)) for size in values.shape)
        entry = field(1, 1) + field(2, shape) + field(4, len(data)) + field(5, len(content))
        entries.append((name.encode(), entry + varint(6 << 3 | 5) + struct.pack("<I", masked_crc(content))))
        data += content
    table, handles = b"", []
    for first in range(0, len(entries), BLOCK_ENTRIES):
        part = entries[first : first + BLOCK_ENTRIES]
        table, handle = append_block(table, block(part))
        handles.append((part[-1][0], handle))
    table, meta = append_block(table, block([]))
    table, index = append_block(table, block(handles))
    footer = (meta + index).ljust(40, b"\0") + struct.pack("<Q", MAGIC)
    prefix.with_name(f"{prefix.name}.index").write_bytes(table + footer)
    prefix.with_name(f"{prefix.name}.data-00000-of-00001").write_bytes(data)


def append_block(table: bytes, content: bytes) -> tuple[bytes, bytes]:
    handle = varint(len(table)) + varint(len(content))
    return table + content + b"\0" + struct.pack("<I", masked_crc(content + b"\0")), handle
