"""Instances by the reference's algorithm, draw by draw, and their storage.

instances.json has a digest of all instances for several settings, and the first instance. A second
implementation of the algorithm, written from a description of `create_pretraining_data.py`, gave the same
instances; it is in the history of test_random_stream.py.
"""

import dataclasses
import hashlib
import json
import random
from array import array
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from common.data.preparation import changed_records
from common.errors import UserError
from language_bert.benchmark import Benchmark
from language_bert.data.corpus import HELD_OUT_FRACTION, documents, unicode_data
from language_bert.data.instances import InstanceSettings, create_instances
from language_bert.data.prepare import prepare, split
from language_bert.data.shards import Shards, index_path, shard_path, write_shard
from language_bert.data.wordpiece import Tokenizer, read_documents
from tests.language_bert.configs import mini

GOLDEN = json.loads(Path(__file__).with_name("instances.json").read_text())
UNICODE = "9f9b904079844167fe2d8d2137f6f353551fc78db720490804cb25780407a4f6"
python_documents = cache(documents)  # parsing the standard library takes seconds
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(300))]


def make_lines():
    """Return documents of one and of many sentences, of one and of many words."""
    rng, lines = random.Random(7), []
    for size in (1, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        for _ in range(size):
            words = [f"word{rng.randrange(300)}" for _ in range(rng.choice((1, 2, 5, 9, 14, 40)))]
            lines.append(" ".join(words))
        lines.append("")
    return lines


def make_instances(directory, seed=12345, **settings):
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = Tokenizer(directory / "vocab.txt")
    texts = read_documents(make_lines(), tokenizer)
    return create_instances(texts, tokenizer.vocabulary, InstanceSettings(**settings), seed)


def as_list(instance):
    arrays = (instance.input_ids, instance.masked_positions, instance.masked_ids)
    return [*(values.tolist() for values in arrays), instance.num_a_tokens, instance.is_random_next]


@pytest.mark.parametrize("expected", GOLDEN, ids=lambda expected: str(expected["settings"]))
def test_instances_are_those_of_the_reference(tmp_path, expected):
    values = [as_list(instance) for instance in make_instances(tmp_path, **expected["settings"])]
    assert values[0] == expected["first"]
    assert len(values) == expected["num_instances"]
    assert hashlib.sha256(json.dumps(values).encode()).hexdigest() == expected["sha256"]


@pytest.fixture
def instances(tmp_path):
    return make_instances(tmp_path, max_seq_length=32)


def write_part(directory, instances, part="train"):
    """Write every second instance to the first of two shards, the others to the second."""
    shards = [
        write_shard(shard_path(directory, part, number), number, instances[number::2]) for number in range(2)
    ]
    np.save(index_path(directory, part), np.concatenate(shards))


def test_changed_records_are_named_with_their_file(tmp_path, instances):
    write_part(tmp_path, instances)
    path, rows = shard_path(tmp_path, "train", 1), np.load(index_path(tmp_path, "train"))
    first = len(instances[::2])
    assert changed_records("language_bert", path) == ""
    words = np.fromfile(path, "<u2")
    words[rows["offset"][first:][[3, 8, 9, 20, 30, 40]].astype(int)] ^= 1
    words.tofile(path)
    shards = Shards(tmp_path, "train")
    assert as_list(shards[first + 2]) == as_list(instances[5])
    with pytest.raises(UserError, match=r"train-00001\.shard record 3: is corrupt"):
        shards[first + 3]
    assert changed_records("language_bert", path) == " in record 3, 8, 9, 20, 30 and 1 more"
    words[:-1].tofile(path)  # named by its size
    assert changed_records("language_bert", path) == ""
    assert changed_records("language_bert", tmp_path / "a.txt") == ""
    with pytest.raises(UserError, match=r"train-00001\.shard.*its index says"):
        Shards(tmp_path, "train")
    path.unlink()
    with pytest.raises(UserError, match=r"train-00001\.shard.*cannot be read"):
        Shards(tmp_path, "train")
    np.save(index_path(tmp_path, "train"), np.zeros(3))
    with pytest.raises(UserError, match="not an index"):
        Shards(tmp_path, "train")


def changed(instance, **values):
    return dataclasses.replace(instance, **{name: array("H", numbers) for name, numbers in values.items()})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"masked_positions": [], "masked_ids": []}, "has no masked token"),
        ({"input_ids": range(2, 35)}, "has more than 32 tokens"),
        ({"input_ids": [2, 5, 305, 5, 3]}, "has a token outside of the vocabulary of 305"),
        ({"masked_positions": [1], "masked_ids": [305]}, "has a token outside of the vocabulary of 305"),
        ({"masked_positions": [40], "masked_ids": [7]}, "has a masked position outside of the sequence"),
    ],
)
def test_a_record_that_none_can_be_is_named_with_file_and_place(tmp_path, instances, values, message):
    instances[7] = changed(instances[7], **values)  # the fourth of the second shard
    write_part(tmp_path, instances)
    with pytest.raises(UserError, match=rf"train-00001\.shard record 3: {message}"):
        list(Shards(tmp_path, "train", max_seq_length=32, vocab_size=305))


@pytest.mark.parametrize("name", ["train", "evaluation"])
def test_a_run_reads_no_record_that_its_model_cannot_take(tmp_path, instances, name):
    settings = [f"data.directory={tmp_path}", "data.num_train_samples=64", "data.num_evaluation_samples=64"]
    settings += ["data.max_seq_length=32", "model.vocab_size=305"]
    config = mini("baseline", *settings)
    instances[6] = changed(instances[6], input_ids=[2, 5, 6, 305, 3], masked_positions=[1], masked_ids=[7])
    for part in ("train", "evaluation"):
        write_part(tmp_path, instances[:64], part)
    benchmark = Benchmark(config, seed=0)
    batches = benchmark.train_batches() if name == "train" else benchmark.evaluation_batches()
    with pytest.raises(UserError, match=rf"{name}-00000\.shard record 3: has a token outside"):
        for _ in range(4):  # an epoch
            next(batches)


def test_no_paragraph_of_the_corpus_stands_in_two_documents():
    corpus = python_documents()
    assert len(corpus) > 5000
    sentences = [sentence for document in corpus for sentence in document if len(sentence) > 200]
    assert len(set(sentences)) / len(sentences) > 0.99


def test_the_data_of_unicode_are_the_same_everywhere_and_each_name_stands_once():
    corpus = unicode_data()
    text = "\n\n".join("\n".join(document) for document in corpus)
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == UNICODE
    lines = [line for document in corpus for line in document]
    assert len({line.partition(";")[0] for line in lines}) == len(lines) == 95_156
    assert "LATIN SMALL LETTER A WITH GRAVE;Ll;0;L;N" in lines


def test_no_held_out_document_is_trained_on():
    for texts in (python_documents(), unicode_data()):
        training, held_out = split(texts)
        assert sorted(training + held_out) == sorted(texts)
        assert len(held_out) == int(len(texts) * HELD_OUT_FRACTION) > 0
    trained, evaluated = ({*chain(*part)} for part in split(unicode_data()))
    assert trained and trained.isdisjoint(evaluated)


def test_a_text_that_is_not_embedded_is_refused_with_those_that_are(tmp_path):
    config = mini("baseline", "data.corpus=unicod", f"data.directory={tmp_path / 'made'}")
    with pytest.raises(UserError, match="data.corpus: .*did you mean unicode"):
        prepare(config.data_directory, config)
