"""The reference's TFRecords, read without TensorFlow."""

import itertools

import numpy as np
import pytest

from common.errors import UserError
from language_bert.data.protobuf import masked_crc, read_varints
from language_bert.data.tfrecord import parse_example, read_instances, read_payloads, to_instance
from tests.language_bert.data.tf_files import example, varint, write_tfrecord

LIMITS = {"vocab_size": 30522, "max_seq_length": 16}


def lists(**changes):
    """Return a record as the reference pads it: 7 of 16 tokens, 2 of 4 predictions."""
    found = {
        "input_ids": [101, 2000, 103, 102, 30521, 103, 102] + [0] * 9,
        "input_mask": [1] * 7 + [0] * 9,
        "segment_ids": [0] * 4 + [1] * 3 + [0] * 9,
        "masked_lm_positions": [2, 5, 0, 0],
        "masked_lm_ids": [128, 3000, 0, 0],
        "masked_lm_weights": np.array([1, 1, 0, 0], np.float32),
        "next_sentence_labels": [1],
    }
    return found | changes


def test_the_masked_checksum_is_tensorflows():
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_numbers_of_every_length_are_read():
    values = [0, 1, 127, 128, 30521, 2**31, 2**62, -1]
    assert read_varints(memoryview(b"".join(map(varint, values)))).tolist() == values
    assert read_varints(memoryview(b"")).tolist() == []
    for cut in (b"\x80", b"\x01\xff"):
        with pytest.raises(ValueError, match="does not end"):
            read_varints(memoryview(cut))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [30522] + [0] * 15}, "has a token outside of the vocabulary of 30522"),
        ({"masked_lm_ids": [128, 30522, 0, 0]}, "has a masked token outside of the vocabulary"),
        ({"masked_lm_ids": [128, -1, 0, 0]}, "has a masked token outside of the vocabulary"),
        ({"input_mask": [1] * 17, "input_ids": [1] * 17, "segment_ids": [0] * 17}, "is 17 tokens long"),
        ({"input_mask": [0] * 16}, "is 0 tokens long, expected 1 to 16"),
        ({"input_mask": [1, 0, *[1] * 6] + [0] * 8}, "has padding or segments in the middle"),
        ({"segment_ids": [1, 0] * 8}, "has padding or segments in the middle"),
        ({"masked_lm_weights": np.zeros(4)}, "has no masked token"),
        ({"masked_lm_positions": [2, 7, 0, 0]}, "has masked positions .* outside of the sequence"),
        ({"masked_lm_positions": [5, 2, 0, 0]}, "has masked positions out of order"),
        ({"next_sentence_labels": []}, "has no"),
        ({"input_mask": np.zeros(0)}, "is 0 tokens long"),
    ],
    ids=str,
)
def test_a_record_that_is_no_instance_is_named_with_its_file(tmp_path, changes, message):
    path = tmp_path / "part-00007-of-00500"
    write_tfrecord(path, [example(lists()), example(lists()), example(lists(**changes))])
    records = read_instances(path, **LIMITS)
    assert len(list(itertools.islice(records, 2))) == 2
    with pytest.raises(UserError, match=f"part-00007-of-00500 record 2: {message}"):
        next(records)


def test_records_come_in_order_and_damage_names_file_and_record(tmp_path):
    path = tmp_path / "part-00000-of-00500"
    payloads = [example(lists(next_sentence_labels=[number % 2])) for number in range(3)]
    write_tfrecord(path, payloads)
    assert list(read_payloads(path)) == payloads
    content = path.read_bytes()
    second = len(content) // 3
    for position, message in ((second + 2, "corrupt length"), (second + 30, "is corrupt")):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"part-00000-of-00500 record 1.*{message}"):
            list(read_payloads(path))
    for length in (second + 5, second + 40, 2 * second - 2):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"record 1.*truncated"):
            list(read_payloads(path))


@pytest.mark.parametrize(
    "payload",
    [b"\x00", b"\x0a\x05ab", b"", b"no example", example({})[:1], example({"input_ids": [101]})],
)
def test_another_message_is_no_instance(payload):
    with pytest.raises(ValueError, match=r"."):
        to_instance(parse_example(payload), **LIMITS)
