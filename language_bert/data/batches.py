"""Padded batches, as an unmodified Hugging Face model takes them, from records or random tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from common.training.method import Batch
from language_bert.data.shards import Record

IGNORED = -100  # the label of a token that was not masked
MIN_LENGTH = 5  # [CLS] a [SEP] b [SEP]


def padded_batch(records: Sequence[Record], max_seq_length: int) -> Batch:
    """Pad B records to S = max_seq_length.

    Inputs: `input_ids`, `token_type_ids`, `attention_mask`, all (B, S) int64. Targets: `labels` (B, S) int64,
    -100 where no token was masked, and `next_sentence_label` (B,) int64.
    """
    shape = (len(records), max_seq_length)
    input_ids, token_type_ids, attention_mask = (np.zeros(shape, np.int64) for _ in range(3))
    labels = np.full(shape, IGNORED, np.int64)
    for row, record in enumerate(records):
        length = len(record.input_ids)
        input_ids[row, :length] = record.input_ids
        token_type_ids[row, record.num_a_tokens : length] = 1
        attention_mask[row, :length] = 1
        labels[row, record.masked_positions] = record.masked_ids
    is_random_next = np.array([record.is_random_next for record in records], np.int64)
    return Batch(
        inputs={
            "input_ids": torch.from_numpy(input_ids),
            "token_type_ids": torch.from_numpy(token_type_ids),
            "attention_mask": torch.from_numpy(attention_mask),
        },
        targets={"labels": torch.from_numpy(labels), "next_sentence_label": torch.from_numpy(is_random_next)},
        num_samples=len(records),
    )


# Cumulative distribution of the lengths of Wikipedia's training sequences, of at most 512 tokens. Source: the
# histogram of https://github.com/graphcore/tutorials, blogs_code/packedBERT: mean 255.8, 23.4 % at 512.
LENGTH_CDF = (
    (0.0, 5),
    (0.05, 36),
    (0.10, 48),
    (0.25, 84),
    (0.369, 128),
    (0.50, 204),
    (0.566, 256),
    (0.683, 384),
    (0.75, 484),
    (0.766, 512),
    (1.0, 512),
)


def typical_lengths(num_samples: int, max_seq_length: int) -> np.ndarray:
    """Return lengths (num_samples,) distributed like Wikipedia's, in a fixed shuffled order."""
    shares, lengths = np.array(LENGTH_CDF).T
    quantiles = np.interp((np.arange(num_samples) + 0.5) / num_samples, shares, lengths)
    scaled = np.maximum(MIN_LENGTH, quantiles * max_seq_length / lengths[-1]).round().astype(np.int64)
    return np.random.default_rng(0).permutation(scaled)


def shift_lengths(
    lengths: np.ndarray, num_tokens: int, max_seq_length: int, *, shortest: int = MIN_LENGTH
) -> np.ndarray:
    """Shift all lengths by the same number, so that their sum is `num_tokens`.

    Each is clipped to `shortest` and `max_seq_length`, so the sum can differ where most lengths are clipped.
    """
    low, high = -max_seq_length, max_seq_length
    while high - low > 1:
        middle = (low + high) // 2
        enough = np.clip(lengths + middle, shortest, max_seq_length).sum() >= num_tokens
        low, high = (low, middle) if enough else (middle, high)
    moved = np.clip(lengths + high, shortest, max_seq_length)
    is_longer = moved > np.clip(lengths + low, shortest, max_seq_length)
    moved[np.flatnonzero(is_longer)[: max(0, moved.sum() - num_tokens)]] -= 1
    return moved


def random_record(rng: np.random.Generator, *, length: int, vocab_size: int, num_masked: int) -> Record:
    """Return a record of random tokens, for warm-up and tests."""
    positions = np.sort(rng.choice(length - 2, size=min(num_masked, length - 2), replace=False)) + 1
    return Record(
        input_ids=rng.integers(0, vocab_size, length),
        num_a_tokens=max(2, length // 2),
        masked_positions=positions,
        masked_ids=rng.integers(0, vocab_size, len(positions)),
        is_random_next=bool(rng.integers(2)),
    )
