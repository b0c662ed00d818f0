"""Wikipedia to shards: text and TFRecords, what is refused, a preparation that is killed and goes on."""

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch

from common.data import manifest as fingerprint
from common.errors import UserError
from common.repository import ROOT
from common.run.loop import Spec, TrainingRun
from common.run.mllog import RunLog
from common.training.load import load_config
from language_bert.benchmark import Benchmark
from language_bert.data import sources, wikipedia
from language_bert.data.corpus import documents
from language_bert.data.instances import InstanceSettings, create_instances
from language_bert.data.prepare import prepare, train_vocabulary
from language_bert.data.shards import Shards
from language_bert.data.wordpiece import Tokenizer, read_documents
from tests.language_bert.data.test_tf_checkpoint import google_tensors
from tests.language_bert.data.tf_files import example, write_checkpoint, write_tfrecord

NUM_PARTS, NUM_TRAIN, NUM_EVALUATION, LENGTH = 4, 600, 40, 64
TINY = {
    "model.vocab_size": 600,
    "model.hidden_size": 16,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 2,
    "model.intermediate_size": 24,
    "data.num_train_samples": NUM_TRAIN,
    "data.num_evaluation_samples": NUM_EVALUATION,
    "data.max_seq_length": LENGTH,
    "data.masked_fraction": 0.2,
    "data.num_duplicates": 2,
    "data.corpus": "made-up",
    "global_batch_size": 8,
    "schedule": "{name: linear, warmup: 1ba}",
}


def settings_of(directory, **changes):
    changed = TINY | {"data.directory": directory} | changes
    return [f"{key}={value}" for key, value in changed.items()]


def config_of(directory, **changes):
    return load_config(
        "language_bert", "baseline", size="full", settings=settings_of(directory, **changes)
    ).config


def prepared(directory, source, **changes):
    config = config_of(directory, **changes)
    prepare(directory, config, source)
    assert not fingerprint.verify(directory, config.prepared_with(), hint="")


def content_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def texts():
    """The documents of each part, and of the evaluation set."""
    prose = [document for document in documents() if len(document) > 3]
    parts = [prose[number * 40 : (number + 1) * 40] for number in range(NUM_PARTS)]
    return [*parts, prose[-10:]]


@pytest.fixture(scope="module")
def source(texts, tmp_path_factory):
    """A folder as MLCommons' text is laid out, with a checkpoint."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "results4").mkdir()
    names = [f"part-{number:05}-of-{NUM_PARTS:05}" for number in range(NUM_PARTS)] + ["eval.txt"]
    for name, part in zip(names, texts, strict=True):
        text = "\n\n".join("\n".join(document) for document in part)
        (folder / "results4" / name).write_text(text + "\n", encoding="utf-8")
    train_vocabulary([document for part in texts for document in part], 600, folder)
    torch.manual_seed(3)
    model = Benchmark(config_of(folder, **{"model.next_sentence": "true"}), seed=1).build_model()
    write_checkpoint(folder / sources.CHECKPOINT, google_tensors(model))
    return folder


def reference(source, name, num_duplicates, masked_fraction):
    """Return all instances that the reference's script makes of a file."""
    tokenizer = Tokenizer(source / "vocab.txt")
    with (source / "results4" / name).open(encoding="utf-8") as lines:
        found = read_documents(lines, tokenizer)
    settings = InstanceSettings(
        max_seq_length=LENGTH, masked_fraction=masked_fraction, num_duplicates=num_duplicates
    )
    return create_instances(found, tokenizer.vocabulary, settings, random.Random(12345))


def same(record, instance):
    return (
        record.input_ids.tolist() == list(instance.input_ids)
        and record.masked_positions.tolist() == list(instance.masked_positions)
        and record.masked_ids.tolist() == list(instance.masked_ids)
        and (record.num_a_tokens, record.is_random_next) == (instance.num_a_tokens, instance.is_random_next)
    )


def test_every_part_gives_the_first_instances_of_the_reference(source, tmp_path):
    prepared(tmp_path / "full", source)
    train = Shards(tmp_path / "full", "train")
    assert len(train) == NUM_TRAIN
    position, sizes = 0, []
    for number in range(NUM_PARTS):
        name = f"part-{number:05}-of-{NUM_PARTS:05}"
        expected = reference(source, name, 2, 0.2)
        quota = int((train.index["shard"] == number).sum())
        assert all(same(train[position + i], expected[i]) for i in range(quota))
        position += quota
        sizes.append((source / "results4" / name).stat().st_size / quota)
    assert max(sizes) / min(sizes) < 1.05  # as many as its share of the bytes
    assert int(train.index["num_masked"].max()) == int(LENGTH * 0.2)


def test_the_evaluation_set_is_picked_as_in_the_reference(source, tmp_path):
    prepared(tmp_path / "full", source)
    evaluation, expected = Shards(tmp_path / "full", "evaluation"), reference(source, "eval.txt", 10, 0.15)
    assert len(evaluation) == NUM_EVALUATION < len(expected)
    for i in range(NUM_EVALUATION):
        assert same(evaluation[i], expected[int(i * len(expected) / NUM_EVALUATION)])
    manifest = fingerprint.read_manifest(tmp_path / "full", hint="")
    counted = sum(len(evaluation[i].masked_ids) for i in range(NUM_EVALUATION))
    assert manifest["facts"]["num_evaluation_masked_tokens"] == counted
    assert sum(manifest["facts"]["train_length_histogram_64"]) == NUM_TRAIN


@pytest.mark.parametrize("next_sentence", ["false", "true"])
def test_a_run_starts_from_the_checkpoints_weights(source, tmp_path, next_sentence):
    prepared(tmp_path / "full", source)
    benchmark = Benchmark(config_of(tmp_path / "full", **{"model.next_sentence": next_sentence}), seed=1)
    torch.manual_seed(3)
    original = Benchmark(config_of(tmp_path, **{"model.next_sentence": "true"}), seed=1).build_model().eval()
    torch.manual_seed(4)
    model = benchmark.build_model(from_scratch=False).eval()
    batch = next(benchmark.train_batches())
    with torch.no_grad():
        assert torch.equal(model(**batch.inputs)[0], original(**batch.inputs)[0])


def test_an_accuracy_of_the_starting_weights_that_is_not_the_published_one_is_told(
    source, tmp_path, monkeypatch, capsys
):
    prepared(tmp_path / "full", source)
    config = config_of(tmp_path / "full", **{"data.corpus": sources.WIKIPEDIA})  # as if it were that
    data = config.data
    found = (data.corpus, data.max_seq_length, data.evaluation_masked_fraction, data.num_evaluation_samples)
    monkeypatch.setattr("language_bert.benchmark.EVALUATED", found)

    def first_evaluation():
        path = tmp_path / "result_0.txt"
        log = RunLog(path, state="run")
        spec = Spec(config={}, seed=1, system="test", result="", label="", expected_s=None)
        run = TrainingRun(spec, config, Benchmark(config, seed=1), log)
        run.initialize()
        quality = run.evaluate()
        log.close()
        return quality, path.read_text(), capsys.readouterr().out

    quality, log, screen = first_evaluation()
    told = f"have {quality:.5f} before the first step, expected 0.34085"
    assert quality < 0.3 and told in log and told in " ".join(screen.split())
    assert f"masked-LM accuracy {quality:.5f} (target 0.72)" in screen
    monkeypatch.setattr("language_bert.benchmark.STARTING_ACCURACY", quality)
    _, log, screen = first_evaluation()
    assert log.count("starting_doubt") == 1 and "before the first step" not in screen  # the one of above


def payload(instance):
    """Return an instance as the reference pads and writes it."""
    length, most = len(instance.input_ids), int(LENGTH * 0.15)
    columns = {
        "input_ids": (instance.input_ids, LENGTH),
        "input_mask": ([1] * length, LENGTH),
        "segment_ids": ([0] * instance.num_a_tokens + [1] * (length - instance.num_a_tokens), LENGTH),
        "masked_lm_positions": (instance.masked_positions, most),
        "masked_lm_ids": (instance.masked_ids, most),
        "masked_lm_weights": ([1] * len(instance.masked_ids), most),
        "next_sentence_labels": ([int(instance.is_random_next)], 1),
    }
    lists = {name: [*values] + [0] * (size - len(values)) for name, (values, size) in columns.items()}
    return example(lists | {"masked_lm_weights": np.array(lists["masked_lm_weights"], np.float32)})


@pytest.fixture
def records(source, tmp_path):
    """The same source as the reference's TFRecords."""
    folder = tmp_path / "records"
    folder.mkdir()
    for number in range(NUM_PARTS):
        name = f"part-{number:05}-of-{NUM_PARTS:05}"
        write_tfrecord(folder / name, [payload(each) for each in reference(source, name, 2, 0.15)])
    found = reference(source, "eval.txt", 10, 0.15)
    picked = [found[i * len(found) // NUM_EVALUATION] for i in range(NUM_EVALUATION)]
    write_tfrecord(folder / sources.RECORDS, [payload(each) for each in picked])
    for path in source.glob(f"{sources.CHECKPOINT}*"):
        shutil.copy(path, folder)
    return folder


def test_tfrecords_give_the_instances_of_the_text(source, records, tmp_path):
    changes = {"data.masked_fraction": 0.15}
    prepared(tmp_path / "text", source, **changes)
    prepared(tmp_path / "full", records, **changes)
    one, other = Shards(tmp_path / "text", "train"), Shards(tmp_path / "full", "train")
    for shard in range(NUM_PARTS):  # the shares of the bytes differ a little
        a, b = (np.flatnonzero(part.index["shard"] == shard)[:40] for part in (one, other))
        assert len(a) == len(b) == 40
        assert (one.index["crc32"][a] == other.index["crc32"][b]).all()
    for name in ("evaluation-00000.shard", "evaluation.index.npy", "model.safetensors"):
        assert (tmp_path / "text" / name).read_bytes() == (tmp_path / "full" / name).read_bytes()


def test_tfrecords_are_masked_at_15_percent_only(records, tmp_path):
    with pytest.raises(UserError, match=r"masked at 0\.15, not at 0\.2; prepare from the text"):
        prepared(tmp_path / "full", records)


def test_a_damaged_record_is_named(records, tmp_path):
    path = records / f"part-00002-of-{NUM_PARTS:05}"
    content = bytearray(path.read_bytes())
    content[len(content) // 50] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"part-00002-of-00004 record \d+: .*CRC differs"):
        prepared(tmp_path / "full", records, **{"data.masked_fraction": 0.15})
    assert not (tmp_path / "full").exists()


@pytest.fixture
def copied(source, tmp_path):
    return shutil.copytree(source, tmp_path / "source")


PART = f"results4/part-00001-of-{NUM_PARTS:05}"


@pytest.mark.parametrize(
    ("action", "names", "message"),
    [
        (shutil.move, (PART, "moved"), r"3 of 4 parts, part-00001-of-00004 is missing"),
        (shutil.copy, (PART, "."), "part-00001-of-00004 is there twice"),
        (shutil.copy, (PART, "part-00001-of-00009"), "parts of 2 sets"),
        (shutil.copy, (PART, "eval_10k"), "both eval.txt and eval_10k"),
        (shutil.move, ("vocab.txt", "words"), "no vocab.txt"),
        (shutil.move, ("model.ckpt-28252.index", "index"), r"no model\.ckpt-28252\.index"),
    ],
)
def test_an_incomplete_or_ambiguous_source_is_refused(copied, action, names, message):
    action(*(copied / name for name in names))
    with pytest.raises(UserError, match=message):
        sources.list_source(copied, is_official=False, has_checkpoint=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.vocab_size": 601}, r"600 tokens, model\.vocab_size is 601"),
        ({"data.num_train_samples": 200_000}, r"gives \d+ instances, \d+ are asked; lower"),
        ({"model.hidden_size": 32}, r"model\.ckpt-28252: .* is \(.*, expected"),
        ({"data.corpus": sources.WIKIPEDIA}, "4 parts, expected 500; this benchmark is defined on one dump"),
    ],
)
def test_settings_that_the_source_cannot_follow_are_refused(source, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        prepared(tmp_path / "full", source, **changes)
    assert not (tmp_path / "full").exists()


def test_another_dump_is_refused_by_name_and_hash(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "NUM_PARTS", NUM_PARTS)
    with pytest.raises(UserError, match=r"eval\.txt: MD5 [0-9a-f]{32}, expected 2a220f790517"):
        prepared(tmp_path / "full", source, **{"data.corpus": sources.WIKIPEDIA})
    monkeypatch.setattr(sources, "OFFICIAL_MD5", {})
    with pytest.raises(UserError, match=r"eval\.txt: 40 samples, expected 10,000"):
        prepared(tmp_path / "full", source, **{"data.corpus": sources.WIKIPEDIA})
    found = {"samples": NUM_EVALUATION, "masked tokens": 5}
    monkeypatch.setattr(wikipedia, "OFFICIAL_EVALUATION", found)
    with pytest.raises(UserError, match=r"eval\.txt: \d+ masked tokens, expected 5"):
        prepared(tmp_path / "full", source, **{"data.corpus": sources.WIKIPEDIA})


def test_equal_shards_are_noticed(copied, tmp_path):
    first = copied / "results4" / f"part-00000-of-{NUM_PARTS:05}"
    shutil.copy(first, first.with_name(f"part-00003-of-{NUM_PARTS:05}"))
    with pytest.raises(
        UserError, match=r"\d+% of the instances.*part-00000-of-00004 and part-00003-of-00004"
    ):
        prepared(tmp_path / "full", copied)


def test_of_two_checkpoints_the_one_of_tensorflow_1_is_read(copied, tmp_path, monkeypatch):
    """MLCommons has both, of one name; the one that is read is known by its MD5, not by its folder."""
    one, other, index = copied / "tf1", copied / "another", sources.CHECKPOINT + sources.INDEX_SUFFIX
    for folder in (one, other):
        folder.mkdir()
    for path in copied.glob(f"{sources.CHECKPOINT}*"):
        path.rename(one / path.name)
    write_checkpoint(other / sources.CHECKPOINT, {"model/layer-0/.ATTRIBUTES/VARIABLE_VALUE": np.ones(2)})
    with pytest.raises(UserError, match=r"model\.ckpt-28252\.index is there twice: .*another.* and .*tf1"):
        prepared(tmp_path / "full", copied)
    md5 = hashlib.md5((one / index).read_bytes()).hexdigest()
    monkeypatch.setitem(sources.OFFICIAL_MD5, index, md5)
    listed = sources.list_source(copied, is_official=False, has_checkpoint=True)
    assert listed.checkpoint == one / sources.CHECKPOINT
    prepared(tmp_path / "full", copied)


def test_full_size_needs_a_source(tmp_path):
    with pytest.raises(UserError, match="cannot be downloaded; run: ttt data prepare language_bert"):
        prepare(tmp_path / "full", config_of(tmp_path / "full"))


PREPARE = """
import json, sys
from pathlib import Path
from common.training.load import load_config
from language_bert.data.prepare import prepare
if __name__ == "__main__":
    settings, source = json.loads(sys.argv[1]), Path(sys.argv[2])
    config = load_config("language_bert", "baseline", size="full", settings=settings).config
    prepare(Path(config.data.directory), config, source)
"""


@pytest.fixture
def started(source, tmp_path):
    """A preparation as a process of its own that has written a shard, and its workers."""
    directory, changes = tmp_path / "full", {"data.num_duplicates": 10}  # slow enough to be stopped
    script = tmp_path / "prepare.py"
    script.write_text(PREPARE)
    settings = json.dumps(settings_of(str(directory), **changes))
    process = subprocess.Popen(
        [sys.executable, str(script), settings, str(source)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    work = tmp_path / ".full.part"
    while len(list(work.glob("rows/train-*"))) < 1 and process.poll() is None:
        time.sleep(0.001)
    yield process, psutil.Process(process.pid).children(recursive=True), directory, changes
    process.kill()
    process.communicate()


def test_a_killed_preparation_goes_on_to_the_same_bytes(started, source, tmp_path):
    process, workers, directory, changes = started
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not psutil.wait_procs(workers, timeout=10)[1]  # none outlives it
    work = tmp_path / ".full.part"
    finished = {path: path.stat().st_mtime_ns for path in work.glob("rows/[te]*.npy")}
    assert 1 <= len(finished) < NUM_PARTS + 1 and not directory.exists()
    first = work / "data" / "train-00000.shard"
    before = first.stat().st_ino if any("train-00000" in path.name for path in finished) else None
    prepared(directory, source, **changes)
    assert before in (None, (directory / first.name).stat().st_ino)
    prepared(tmp_path / "whole", source, **changes)
    assert content_of(directory) == content_of(tmp_path / "whole")
    assert not work.exists()


def test_a_worker_that_dies_is_one_clear_line(started):
    process, workers, directory, _ = started
    for worker in workers:
        if "spawn_main" in " ".join(worker.cmdline()):
            worker.kill()
    error = process.communicate(timeout=20)[1]
    assert "has died" in error and not directory.exists()


def test_ctrl_c_ends_at_once_without_a_trace_of_workers(started):
    process, workers, directory, _ = started
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=10)[1]
    assert error.strip().endswith("KeyboardInterrupt") and "spawn_main" not in error
    assert not psutil.wait_procs(workers, timeout=10)[1] and not directory.exists()
