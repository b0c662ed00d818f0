"""Padded batches, as an unmodified Hugging Face model takes them, from instances or random tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from common.training.method import Batch
from language_bert.data.instances import Instance

IGNORED = -100  # the label of a token that was not masked
MIN_LENGTH = 5  # [CLS] a [SEP] b [SEP]
# Cumulative distribution of the lengths of Wikipedia's training sequences, of at most 512 tokens. Source: the
# histogram of https://github.com/graphcore/tutorials, blogs_code/packedBERT: mean 255.8, 23.4 % at 512.
SHARES = (0.00, 0.05, 0.10, 0.25, 0.369, 0.50, 0.566, 0.683, 0.75, 0.766, 1.0)
LENGTHS = (5, 36, 48, 84, 128, 204, 256, 384, 484, 512, 512)


def padded_batch(instances: Sequence[Instance], max_seq_length: int) -> Batch:
    """Pad B instances to S = max_seq_length.

    Inputs: `input_ids`, `token_type_ids`, `attention_mask`, all (B, S) int64. Targets: `labels` (B, S) int64,
    -100 where no token was masked, and `next_sentence_label` (B,) int64.
    """
    shape = (len(instances), max_seq_length)
    input_ids, token_type_ids, attention_mask = (np.zeros(shape, np.int64) for _ in range(3))
    labels = np.full(shape, IGNORED, np.int64)
    for row, instance in enumerate(instances):
        length = len(instance.input_ids)
        input_ids[row, :length] = instance.input_ids
        token_type_ids[row, instance.num_a_tokens : length] = 1
        attention_mask[row, :length] = 1
        labels[row, instance.masked_positions] = instance.masked_ids
    inputs = {"input_ids": input_ids, "token_type_ids": token_type_ids, "attention_mask": attention_mask}
    is_random_next = torch.tensor([instance.is_random_next for instance in instances], dtype=torch.int64)
    return Batch(
        inputs={name: torch.from_numpy(values) for name, values in inputs.items()},
        targets={"labels": torch.from_numpy(labels), "next_sentence_label": is_random_next},
        num_samples=len(instances),
    )


def weigh_next_sentences(batch: Batch, num_masked: int, num_samples: int) -> Batch:
    """Return a part of a batch with `next_sentence_weight` (B,), for a loss that averages over masked tokens.

    A weight is the mean number of masked tokens of a sequence in the whole batch, which has `num_masked` in
    `num_samples` sequences: parts that are weighted by their masked tokens then add up to the mean over all
    sequences.
    """
    weights = torch.full((batch.num_samples,), num_masked / num_samples)
    return replace(batch, targets=batch.targets | {"next_sentence_weight": weights})


def random_batch(
    rng: np.random.Generator,
    lengths: Sequence[int] | np.ndarray,
    num_masked: Sequence[int] | np.ndarray,
    vocab_size: int,
    max_seq_length: int,
) -> Batch:
    """Return a padded batch of random tokens; `lengths` and `num_masked` have a number for each sequence."""
    instances = []
    for length, count in zip(map(int, lengths), map(int, num_masked), strict=True):
        inner = length - 2  # neither the first nor the last token is masked
        positions = np.sort(rng.choice(inner, size=min(count, inner), replace=False)) + 1
        instance = Instance(
            input_ids=rng.integers(0, vocab_size, length),
            num_a_tokens=max(2, length // 2),
            masked_positions=positions,
            masked_ids=rng.integers(0, vocab_size, len(positions)),
            is_random_next=bool(rng.integers(2)),
        )
        instances.append(instance)
    return padded_batch(instances, max_seq_length)


def typical_lengths(num_samples: int, max_seq_length: int) -> np.ndarray:
    """Return lengths (num_samples,) distributed like Wikipedia's, in a fixed shuffled order."""
    quantiles = np.interp((np.arange(num_samples) + 0.5) / num_samples, SHARES, LENGTHS)
    scaled = np.maximum(MIN_LENGTH, quantiles * max_seq_length / LENGTHS[-1]).round().astype(np.int64)
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
