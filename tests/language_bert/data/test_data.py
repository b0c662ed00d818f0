"""Instances by the reference algorithm, and their storage."""

import dataclasses
import random
from array import array

import numpy as np
import pytest

from common.commands.data import changed_records
from common.errors import UserError
from common.training.load import load_config
from language_bert.benchmark import Benchmark
from language_bert.data.corpus import documents
from language_bert.data.instances import InstanceSettings, Vocabulary, create_instances
from language_bert.data.prepare import prepare
from language_bert.data.shards import Shards, index_path, shard_path, write_shard

VOCABULARY = Vocabulary(num_tokens=100, cls_id=2, sep_id=3, mask_id=4)
SETTINGS = InstanceSettings(max_seq_length=32, masked_fraction=0.16, num_duplicates=3)


def make_documents():
    rng = random.Random(0)
    return [
        [[rng.randint(5, 99) for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(1, 15))]
        for _ in range(20)
    ]


def make_instances():
    return create_instances(make_documents(), VOCABULARY, SETTINGS, random.Random(12345))


def test_every_instance_is_a_masked_pair_within_the_limits():
    instances = make_instances()
    assert len(instances) > 60
    for instance in instances:
        length = len(instance.input_ids)
        assert 5 <= length <= 32
        assert len(instance.masked_ids) == min(5, max(1, round(length * 0.16)))
        assert list(instance.masked_positions) == sorted(set(instance.masked_positions))
        original = list(instance.input_ids)
        for position, token in zip(instance.masked_positions, instance.masked_ids, strict=True):
            original[position] = token
        assert original[0] == VOCABULARY.cls_id
        assert [i for i, token in enumerate(original) if token == VOCABULARY.sep_id] == [
            instance.num_a_tokens - 1,
            length - 1,
        ]


def test_of_the_masked_tokens_80_percent_are_hidden_and_half_of_the_pairs_are_random():
    many = InstanceSettings(max_seq_length=32, masked_fraction=0.16, num_duplicates=60)
    instances = create_instances(make_documents(), VOCABULARY, many, random.Random(1))
    pairs = [
        (i.input_ids[p], t) for i in instances for p, t in zip(i.masked_positions, i.masked_ids, strict=True)
    ]
    hidden = np.mean([shown == VOCABULARY.mask_id for shown, _ in pairs])
    kept = np.mean([shown == token for shown, token in pairs])
    assert hidden == pytest.approx(0.8, abs=0.02) and kept == pytest.approx(0.1, abs=0.02)
    assert np.mean([i.is_random_next for i in instances]) == pytest.approx(0.55, abs=0.1)


def test_the_same_seed_gives_the_same_instances_and_another_does_not():
    assert make_instances() == make_instances()
    other = create_instances(make_documents(), VOCABULARY, SETTINGS, random.Random(1))
    assert other != make_instances()


def write_part(directory, instances, part="train"):
    index = np.concatenate(
        [
            write_shard(shard_path(directory, part, number), number, instances[number::2])
            for number in range(2)
        ]
    )
    np.save(index_path(directory, part), index)


def test_shards_give_back_what_was_written(tmp_path):
    instances = make_instances()
    write_part(tmp_path, instances)
    shards = Shards(tmp_path, "train")
    assert len(shards) == len(instances)
    stored = instances[::2] + instances[1::2]
    for number in (0, 7, len(shards) - 1):
        record, instance = shards[number], stored[number]
        assert record.input_ids.tolist() == instance.input_ids.tolist()
        assert record.masked_positions.tolist() == instance.masked_positions.tolist()
        assert record.masked_ids.tolist() == instance.masked_ids.tolist()
        assert (record.num_a_tokens, record.is_random_next) == (
            instance.num_a_tokens,
            instance.is_random_next,
        )


def test_a_changed_byte_is_named_with_file_and_record(tmp_path):
    instances = make_instances()
    write_part(tmp_path, instances)
    path = shard_path(tmp_path, "train", 1)
    content = bytearray(path.read_bytes())
    content[2 * (len(instances[1].input_ids) + 2 * len(instances[1].masked_ids))] ^= 1
    path.write_bytes(content)
    shards, first = Shards(tmp_path, "train"), len(instances[::2])
    assert shards[first].num_a_tokens == instances[1].num_a_tokens
    with pytest.raises(UserError, match=r"train-00001\.shard record 1: is corrupt"):
        shards[first + 1]


def test_verify_names_changed_records(tmp_path):
    rows = write_shard(shard_path(tmp_path, "train", 0), 0, make_instances())
    np.save(index_path(tmp_path, "train"), rows, allow_pickle=False)
    path = shard_path(tmp_path, "train", 0)
    assert changed_records("language_bert", path) == ""
    words = np.fromfile(path, "<u2")
    words[rows["offset"][[3, 8, 9, 20, 30, 40]].astype(int)] ^= 1
    words.tofile(path)
    assert changed_records("language_bert", path) == " in record 3, 8, 9, 20, 30 and 1 more"
    words[:-1].tofile(path)  # named by its size
    assert (
        changed_records("language_bert", path) == changed_records("language_bert", tmp_path / "a.txt") == ""
    )


def test_a_truncated_or_missing_shard_or_another_index_is_refused(tmp_path):
    write_part(tmp_path, make_instances())
    path = shard_path(tmp_path, "train", 1)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train-00001\.shard.*its index says"):
        Shards(tmp_path, "train")
    path.unlink()
    with pytest.raises(UserError, match=r"train-00001\.shard.*cannot be read"):
        Shards(tmp_path, "train")
    np.save(index_path(tmp_path, "train"), np.zeros(3))
    with pytest.raises(UserError, match="not an index"):
        Shards(tmp_path, "train")


def changed(instance, **values):
    return dataclasses.replace(instance, **{name: array("H", each) for name, each in values.items()})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"masked_positions": [], "masked_ids": []}, "has no masked token"),
        ({"input_ids": range(2, 35)}, "has more than 32 tokens"),
        ({"input_ids": [2, 5, 100, 5, 3]}, "has a token outside of the vocabulary of 100"),
        ({"masked_positions": [1], "masked_ids": [100]}, "has a token outside of the vocabulary of 100"),
        ({"masked_positions": [40], "masked_ids": [7]}, "has a masked position outside of the sequence"),
    ],
)
def test_a_record_that_none_can_be_is_named_with_file_and_place(tmp_path, values, message):
    instances = make_instances()
    instances[7] = changed(instances[7], **values)  # the fourth of the second shard
    write_part(tmp_path, instances)
    with pytest.raises(UserError, match=rf"train-00001\.shard record 3: {message}"):
        shards = Shards(tmp_path, "train", max_seq_length=32, vocab_size=100)
        list(map(shards.__getitem__, range(len(shards))))


@pytest.mark.parametrize("name", ["train", "evaluation"])
def test_a_run_reads_no_record_that_its_model_cannot_take(tmp_path, name):
    settings = [f"data.directory={tmp_path}", "data.num_train_samples=64", "data.num_evaluation_samples=64"]
    settings += ["data.max_seq_length=32", "model.vocab_size=100"]
    config = load_config("language_bert", "baseline", size="mini", settings=settings).config
    instances = make_instances()[:64]
    instances[6] = changed(instances[6], input_ids=[2, 5, 6, 100, 3], masked_positions=[1], masked_ids=[7])
    for part in ("train", "evaluation"):
        write_part(tmp_path, instances, part)
    benchmark = Benchmark(config, seed=0)
    batches = benchmark.train_batches() if name == "train" else benchmark.evaluation_batches()
    with pytest.raises(UserError, match=rf"{name}-00000\.shard record 3: has a token outside"):
        for _ in range(4):  # an epoch
            next(batches)


def test_no_paragraph_of_the_corpus_stands_in_two_documents():
    corpus = documents()
    assert len(corpus) > 5000
    sentences = [sentence for document in corpus for sentence in document if len(sentence) > 200]
    assert len(set(sentences)) / len(sentences) > 0.99


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    config = load_config(
        "language_bert", "baseline", size="mini", settings=[f"data.directory={tmp_path}"]
    ).config
    with pytest.raises(UserError, match="not replaced"):
        prepare(tmp_path, config)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
