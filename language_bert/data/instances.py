"""Turn documents into BERT training instances, drawing random numbers in the MLPerf reference's order.

A document is a list of sentences, a sentence a list of token ids. Source: `create_pretraining_data.py` of the
MLPerf Training BERT reference; the order of the random draws is part of the definition.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Document = Sequence[Sequence[int]]
Ids = array | np.ndarray
SEED = 12345  # of the reference, for every file
NUM_SPECIAL = 3  # [CLS] and two [SEP]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    num_tokens: int
    cls_id: int
    sep_id: int
    mask_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """Lengths in tokens, fractions in [0, 1]; the defaults are those of the reference."""

    max_seq_length: int = 512
    masked_fraction: float = 0.15
    short_sequence_fraction: float = 0.1
    num_duplicates: int = 10

    @property
    def max_predictions(self) -> int:
        """The most masked tokens of a sequence: 76 of 512 at 15 %, 102 at 20 %."""
        return int(self.max_seq_length * self.masked_fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One sample: [CLS] a [SEP] b [SEP] with some tokens replaced, and the original tokens there.

    The numbers are arrays of uint16 where instances are made, because the 300,000 of a part of Wikipedia are
    shuffled in memory, and of int64 where a shard is read.
    """

    input_ids: Ids
    num_a_tokens: int  # [CLS] + a + [SEP]: segment 0; the rest is segment 1
    masked_positions: Ids
    masked_ids: Ids
    is_random_next: bool


def create_instances(
    documents: list[Document], vocabulary: Vocabulary, settings: InstanceSettings, seed: int = SEED
) -> list[Instance]:
    """Create the instances of all documents, `num_duplicates` times with different masks and pairs, shuffled.

    `documents` is shuffled in place, as the reference does. It must have at least two documents, because a
    random next sentence comes from another one, and no empty document.
    """
    rng = random.Random(seed)
    rng.shuffle(documents)
    instances = [
        instance
        for _ in range(settings.num_duplicates)
        for index in range(len(documents))
        for instance in document_instances(documents, index, vocabulary, settings, rng)
    ]
    rng.shuffle(instances)
    return instances


def evenly_spaced(instances: list[Instance], count: int) -> list[Instance]:
    """Return `count` of the instances, as the reference picks its evaluation set."""
    return [instances[i * len(instances) // count] for i in range(count)]


def document_instances(
    documents: list[Document],
    index: int,
    vocabulary: Vocabulary,
    settings: InstanceSettings,
    rng: random.Random,
) -> Iterator[Instance]:
    document = documents[index]
    max_tokens = settings.max_seq_length - NUM_SPECIAL
    target = max_tokens
    if rng.random() < settings.short_sequence_fraction:
        target = rng.randint(2, max_tokens)
    chunk: list[Sequence[int]] = []
    position = 0
    while position < len(document):
        chunk.append(document[position])
        position += 1
        if position < len(document) and sum(map(len, chunk)) < target:
            continue
        num_a = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
        tokens_a = [token for sentence in chunk[:num_a] for token in sentence]
        is_random_next = len(chunk) == 1 or rng.random() < 0.5
        if is_random_next:
            tokens_b = random_sentences(documents, index, target - len(tokens_a), rng)
            position -= len(chunk) - num_a  # unused sentences start the next chunk
        else:
            tokens_b = [token for sentence in chunk[num_a:] for token in sentence]
        truncate_pair(tokens_a, tokens_b, max_tokens, rng)
        yield masked_instance(tokens_a, tokens_b, is_random_next, vocabulary, settings, rng)
        chunk = []


def random_sentences(documents: list[Document], index: int, num_tokens: int, rng: random.Random) -> list[int]:
    """Draw consecutive sentences of another document, of at least `num_tokens` tokens if it has as many."""
    other = index
    for _ in range(10):
        other = rng.randint(0, len(documents) - 1)
        if other != index:
            break
    tokens: list[int] = []
    for sentence in documents[other][rng.randint(0, len(documents[other]) - 1) :]:
        tokens.extend(sentence)
        if len(tokens) >= num_tokens:
            break
    return tokens


def truncate_pair(tokens_a: list[int], tokens_b: list[int], max_tokens: int, rng: random.Random) -> None:
    """Shorten the longer list by one token, at its front or back, until both together fit."""
    while len(tokens_a) + len(tokens_b) > max_tokens:
        longer = tokens_a if len(tokens_a) > len(tokens_b) else tokens_b
        del longer[0 if rng.random() < 0.5 else -1]


def masked_instance(
    tokens_a: list[int],
    tokens_b: list[int],
    is_random_next: bool,
    vocabulary: Vocabulary,
    settings: InstanceSettings,
    rng: random.Random,
) -> Instance:
    """Join the pair and mask it: of the drawn tokens 80 % become [MASK], 10 % stay, 10 % become any token."""
    tokens = [vocabulary.cls_id, *tokens_a, vocabulary.sep_id, *tokens_b, vocabulary.sep_id]
    num_a_tokens = len(tokens_a) + 2
    candidates = [*range(1, num_a_tokens - 1), *range(num_a_tokens, len(tokens) - 1)]
    rng.shuffle(candidates)
    num_masked = min(settings.max_predictions, max(1, round(len(tokens) * settings.masked_fraction)))
    input_ids = list(tokens)
    for position in candidates[:num_masked]:
        if rng.random() < 0.8:
            input_ids[position] = vocabulary.mask_id
        elif rng.random() >= 0.5:
            input_ids[position] = rng.randint(0, vocabulary.num_tokens - 1)
    positions = sorted(candidates[:num_masked])
    return Instance(
        input_ids=array("H", input_ids),
        num_a_tokens=num_a_tokens,
        masked_positions=array("H", positions),
        masked_ids=array("H", (tokens[position] for position in positions)),
        is_random_next=is_random_next,
    )
