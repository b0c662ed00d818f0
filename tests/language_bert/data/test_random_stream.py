"""Instances beside a second, naive form of the reference's algorithm, draw by draw, on words instead of ids.

It was written from a description of `create_pretraining_data.py`, step by step, not from instances.py.
"""

import hashlib
import random
from typing import NamedTuple

import pytest

from language_bert.data.instances import InstanceSettings, create_instances
from language_bert.data.wordpiece import Tokenizer, read_documents

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(300))]
SEED = 12345


class Sample(NamedTuple):
    tokens: list[str]
    segments: list[int]
    positions: list[int]
    labels: list[str]
    next_sentence_label: int


class Naive:
    """`num` is the longest sequence in tokens, `most` the most predictions of one."""

    def __init__(self, num, most, masked_lm_prob, dupe_factor, short_seq_prob=0.1):
        self.rng = random.Random(SEED)
        self.num, self.most, self.prob = num, most, masked_lm_prob
        self.dupe_factor, self.short_seq_prob = dupe_factor, short_seq_prob

    def samples(self, text):
        self.documents = [[line.split() for line in part.split("\n")] for part in text.split("\n\n")]
        self.rng.shuffle(self.documents)
        found = []
        for _ in range(self.dupe_factor):
            for number in range(len(self.documents)):
                found.extend(self.visit(number))
        self.rng.shuffle(found)
        return found

    def visit(self, number):
        sentences, found = self.documents[number], []
        room = target = self.num - 3
        if self.rng.random() < self.short_seq_prob:
            target = self.rng.randint(2, room)
        start = 0
        while start < len(sentences):
            stop = start + 1
            while stop < len(sentences) and len(sum(sentences[start:stop], [])) < target:
                stop += 1
            a_end = start + 1
            if stop - start >= 2:
                a_end = start + self.rng.randint(1, stop - start - 1)
            a, label = sum(sentences[start:a_end], []), 0
            if stop - start == 1 or self.rng.random() < 0.5:
                label, stop = 1, a_end  # the sentences behind a are put back
                b = self.other_tokens(number, target - len(a))
            else:
                b = sum(sentences[a_end:stop], [])
            found.append(self.masked(*self.truncated(a, b, room), label))
            start = stop
        return found

    def other_tokens(self, number, wanted):
        for _ in range(10):
            other = self.rng.randint(0, len(self.documents) - 1)
            if other != number:
                break
        document, tokens = self.documents[other], []
        at = self.rng.randint(0, len(document) - 1)
        while at < len(document):
            tokens = tokens + document[at]
            at += 1
            if len(tokens) >= wanted:
                break
        return tokens

    def truncated(self, a, b, room):
        while len(a) + len(b) > room:
            at_front = self.rng.random() < 0.5
            if len(a) > len(b):
                a = a[1:] if at_front else a[:-1]
            else:
                b = b[1:] if at_front else b[:-1]
        return a, b

    def masked(self, a, b, label):
        tokens = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
        segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
        candidates = [place for place, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]
        self.rng.shuffle(candidates)
        num_predictions = min(self.most, max(1, int(round(len(tokens) * self.prob))))
        shown, labels = list(tokens), {}
        for place in candidates[:num_predictions]:
            labels[place] = tokens[place]
            if self.rng.random() < 0.8:
                shown[place] = "[MASK]"
            elif self.rng.random() < 0.5:
                shown[place] = tokens[place]
            else:
                shown[place] = VOCABULARY[self.rng.randint(0, len(VOCABULARY) - 1)]
        places = sorted(labels)
        return Sample(shown, segments, places, [labels[place] for place in places], label)


def make_text():
    """Return documents of one and of many sentences, of one and of many words."""
    rng = random.Random(7)

    def sentence():
        return " ".join(f"word{rng.randrange(300)}" for _ in range(rng.choice((1, 2, 5, 9, 14, 40))))

    sizes = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55)
    return "\n\n".join("\n".join(sentence() for _ in range(size)) for size in sizes)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n")
    return Tokenizer(path)


def instances(tokenizer, num, masked_lm_prob, dupe_factor):
    settings = InstanceSettings(
        max_seq_length=num, masked_fraction=masked_lm_prob, num_duplicates=dupe_factor
    )
    documents = read_documents(make_text().split("\n"), tokenizer)
    return create_instances(documents, tokenizer.vocabulary, settings, random.Random(SEED))


@pytest.mark.parametrize(
    ("num", "most", "masked_lm_prob", "dupe_factor"),
    [(512, 76, 0.15, 10), (512, 102, 0.20, 6), (128, 19, 0.15, 5), (32, 4, 0.15, 20), (8, 1, 0.15, 20)],
)
def test_every_instance_is_that_of_the_description(tokenizer, num, most, masked_lm_prob, dupe_factor):
    expected = Naive(num, most, masked_lm_prob, dupe_factor).samples(make_text())
    found = instances(tokenizer, num, masked_lm_prob, dupe_factor)
    assert len(found) == len(expected) > 50
    assert {len(each.labels) for each in expected} >= {1, most}
    for one, other in zip(found, expected, strict=True):
        assert [VOCABULARY[token] for token in one.input_ids] == other.tokens
        assert one.num_a_tokens == other.segments.count(0)
        assert list(one.masked_positions) == other.positions
        assert [VOCABULARY[token] for token in one.masked_ids] == other.labels
        assert one.is_random_next == other.next_sentence_label


def test_the_instances_of_a_text_are_as_they_were(tokenizer):
    digest, found = hashlib.sha256(), instances(tokenizer, 32, 0.15, 2)
    for each in found:
        for values in (each.input_ids, each.masked_positions, each.masked_ids):
            digest.update(",".join(map(str, values)).encode() + b";")
        digest.update(f"{each.num_a_tokens},{each.is_random_next:d}\n".encode())
    assert len(found) == 128
    assert found[0].masked_positions.tolist() == [15, 17, 19, 30]
    assert found[0].masked_ids.tolist() == [92, 82, 79, 76]
    assert digest.hexdigest() == "634ee3ce76fd4551462dbbb9c4271d8383c24082a98ee87799bc4994dcd1ab72"
