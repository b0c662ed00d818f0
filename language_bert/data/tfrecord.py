"""Read the MLPerf reference's TFRecord files of BERT instances without TensorFlow.

A record is a length (8 bytes), its masked CRC-32C (4), the payload, and its masked CRC-32C (4). The payload
is a `tf.train.Example`, a map from names to lists of numbers, here padded with zeros.
"""

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.errors import UserError
from language_bert.data.instances import Instance
from language_bert.data.protobuf import masked_crc, parse, read_varints

HEAD = struct.Struct("<QI")  # length of the payload, checksum of the length
CHECKSUM = struct.Struct("<I")
FEATURES, ENTRY, NAME, FEATURE, FLOATS, INTEGERS, NUMBERS = 1, 1, 1, 2, 2, 3, 1  # field numbers


def read_payloads(path: Path) -> Iterator[bytes]:
    """Yield the payload of every record. Raises UserError that names file and record for damage."""
    with path.open("rb") as file:
        for number in itertools.count():
            if not (head := file.read(HEAD.size)):
                return
            where = f"{path} record {number}"
            if len(head) < HEAD.size:
                raise UserError("is truncated", where=where)
            length, checksum = HEAD.unpack(head)
            if masked_crc(head[:8]) != checksum:
                raise UserError("has a corrupt length (CRC differs)", where=where)
            payload, tail = file.read(length), file.read(CHECKSUM.size)
            if len(tail) < CHECKSUM.size:
                raise UserError("is truncated", where=where)
            if masked_crc(payload) != CHECKSUM.unpack(tail)[0]:
                raise UserError("is corrupt (CRC differs)", where=where)
            yield payload


def parse_example(payload: bytes) -> dict[str, np.ndarray]:
    """Return the lists of a `tf.train.Example` by name, int64 or float32. Raises ValueError if it is none."""
    lists = {}
    try:
        for entry in parse(parse(payload)[FEATURES][0])[ENTRY]:
            fields = parse(entry)
            for kind, values in parse(fields[FEATURE][0]).items():
                read = {INTEGERS: read_varints, FLOATS: lambda content: np.frombuffer(content, "<f4")}[kind]
                lists[bytes(fields[NAME][0]).decode()] = read(parse(values[0])[NUMBERS][0])
    except (KeyError, TypeError) as error:
        raise ValueError("is no example of lists of numbers") from error
    return lists


def to_instance(lists: dict[str, np.ndarray], *, vocab_size: int, max_seq_length: int) -> Instance:
    """Return the instance without its padding. Raises ValueError for lists that cannot be an instance."""
    try:
        length = int(lists["input_mask"].sum())
        num_masked = int(lists["masked_lm_weights"].sum())
        ids, segments = lists["input_ids"][:length], lists["segment_ids"][:length]
        positions, masked_ids = lists["masked_lm_positions"][:num_masked], lists["masked_lm_ids"][:num_masked]
        is_random_next = bool(lists["next_sentence_labels"][0])
    except (KeyError, IndexError) as error:
        raise ValueError(f"has no {error}") from error
    num_a_tokens = int((segments == 0).sum())
    if not (0 < length <= max_seq_length and len(ids) == len(segments) == length):
        raise ValueError(f"is {length} tokens long, expected 1 to {max_seq_length}")
    if not (lists["input_mask"][:length] == 1).all() or (segments[:num_a_tokens] != 0).any():
        raise ValueError("has padding or segments in the middle")
    for name, values in {"token": ids, "masked token": masked_ids}.items():
        if ((values < 0) | (values >= vocab_size)).any():
            raise ValueError(f"has a {name} outside of the vocabulary of {vocab_size}")
    if not num_masked or len(positions) != num_masked or len(masked_ids) != num_masked:
        raise ValueError("has no masked token, or not as many ids as positions")
    if (np.diff(positions, prepend=0) <= 0).any() or positions[-1] >= length:
        raise ValueError("has masked positions out of order or outside of the sequence")
    return Instance(
        input_ids=ids.astype(np.uint16),
        num_a_tokens=num_a_tokens,
        masked_positions=positions.astype(np.uint16),
        masked_ids=masked_ids.astype(np.uint16),
        is_random_next=is_random_next,
    )


def read_instances(path: Path, *, vocab_size: int, max_seq_length: int) -> Iterator[Instance]:
    """Yield the instances of a file. Raises UserError that names file and record for damage."""
    for number, payload in enumerate(read_payloads(path)):
        try:
            yield to_instance(parse_example(payload), vocab_size=vocab_size, max_seq_length=max_seq_length)
        except ValueError as error:
            raise UserError(str(error), where=f"{path} record {number}") from error
