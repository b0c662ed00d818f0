"""Wikipedia to shards: text and TFRecords, what is refused, a preparation that is killed and goes on."""

import hashlib
import shutil
import signal
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from common.data import manifest as manifests
from common.errors import UserError
from common.run.loop import TrainingRun
from common.run.mllog import RunLog
from common.run.run_set import Spec
from language_bert import benchmark
from language_bert.benchmark import Benchmark
from language_bert.data import sources, wikipedia
from language_bert.data.instances import InstanceSettings, create_instances, evenly_spaced
from language_bert.data.prepare import prepare, train_vocabulary
from language_bert.data.shards import Shards
from language_bert.data.wordpiece import Tokenizer, read_documents
from tests.command import TTT, start
from tests.language_bert import configs
from tests.language_bert.data.test_data import as_list, python_documents
from tests.language_bert.data.test_tf_checkpoint import google_tensors
from tests.language_bert.data.tf_files import example, write_checkpoint, write_tfrecord

NUM_PARTS, NUM_TRAIN, NUM_EVALUATION, LENGTH = 4, 600, 40, 64
NAMES = [f"part-{number:05}-of-{NUM_PARTS:05}" for number in range(NUM_PARTS)]
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
AT_15 = {"data.masked_fraction": 0.15}
OFFICIAL = {"data.corpus": sources.WIKIPEDIA}
WITH_PAIRS = {"model.next_sentence": "true"}


def settings_of(directory, **changes):
    changed = TINY | {"data.directory": directory} | changes
    return [f"{key}={value}" for key, value in changed.items()]


def config_of(directory, **changes):
    return configs.config_of("baseline", *settings_of(directory, **changes))


def prepared(directory, source, **changes):
    config = config_of(directory, **changes)
    prepare(directory, config, source)
    assert not manifests.verify(directory, config.prepared_with(), hint="")
    return directory


def write_source(folder):
    """Fill a folder as MLCommons' text is laid out, with a checkpoint."""
    (folder / "results4").mkdir()
    prose = [document for document in python_documents() if len(document) > 3]
    texts = [prose[number * 40 : (number + 1) * 40] for number in range(NUM_PARTS)] + [prose[-10:]]
    for name, part in zip([*NAMES, "eval.txt"], texts, strict=True):
        text = "\n\n".join("\n".join(document) for document in part)
        (folder / "results4" / name).write_text(text + "\n", encoding="utf-8")
    train_vocabulary([document for part in texts for document in part], 600, folder)
    torch.manual_seed(3)
    model = Benchmark(config_of(folder, **WITH_PAIRS), seed=1).build_model()
    write_checkpoint(folder / sources.CHECKPOINT, google_tensors(model))
    return folder


def reference(source, name, num_duplicates, masked_fraction):
    """Return all instances that the reference's script makes of a file."""
    tokenizer = Tokenizer(source / "vocab.txt")
    with (source / "results4" / name).open(encoding="utf-8") as lines:
        texts = read_documents(lines, tokenizer)
    settings = InstanceSettings(
        max_seq_length=LENGTH, masked_fraction=masked_fraction, num_duplicates=num_duplicates
    )
    return create_instances(texts, tokenizer.vocabulary, settings)


def test_every_part_gives_the_first_instances_and_the_evaluation_set_equally_spaced_ones(source, full):
    train, evaluation = (list(map(as_list, Shards(full, part))) for part in ("train", "evaluation"))
    borders = np.searchsorted(Shards(full, "train").index["shard"], range(NUM_PARTS + 1)).tolist()
    sizes = []
    for name, (first, last) in zip(NAMES, pairwise(borders), strict=True):
        expected = reference(source, name, 2, 0.2)[: last - first]
        assert train[first:last] == list(map(as_list, expected))
        sizes.append((source / "results4" / name).stat().st_size / (last - first))
    assert borders[-1] == NUM_TRAIN and max(sizes) / min(sizes) < 1.05  # as many as its share of the bytes
    expected = reference(source, "eval.txt", 10, 0.15)
    assert evaluation == [
        as_list(expected[int(i * len(expected) / NUM_EVALUATION)]) for i in range(NUM_EVALUATION)
    ]
    facts = manifests.read_manifest(full, hint="")["facts"]
    assert facts["num_evaluation_masked_tokens"] == sum(
        len(masked_ids) for _, _, masked_ids, *_ in evaluation
    )
    assert sum(facts["train_length_histogram_64"]) == NUM_TRAIN


@pytest.mark.parametrize("next_sentence", ["false", "true"])
def test_a_run_starts_from_the_checkpoints_weights(full, next_sentence):
    run = Benchmark(config_of(full, **{"model.next_sentence": next_sentence}), seed=1)
    torch.manual_seed(3)
    original = Benchmark(config_of(full, **WITH_PAIRS), seed=1).build_model().eval()
    torch.manual_seed(4)
    model = run.build_model(from_scratch=False).eval()
    batch = next(run.train_batches())
    with torch.no_grad():
        assert torch.equal(model(**batch.inputs)[0], original(**batch.inputs)[0])


def test_a_starting_accuracy_that_is_not_the_published_one_is_told(full, tmp_path, monkeypatch, capsys):
    config = config_of(full, **OFFICIAL)  # as if it were that
    evaluated = {"max_seq_length": LENGTH, "num_evaluation_samples": NUM_EVALUATION}
    monkeypatch.setattr(benchmark, "EVALUATED", benchmark.EVALUATED | evaluated)

    def first_evaluation():
        log = RunLog(tmp_path / "result_0.txt", state="run")
        spec = Spec(config={}, seed=1, system="test", result="", expected_s=None)
        run = TrainingRun(spec, config, Benchmark(config, seed=1), log)
        run.initialize()
        quality = run.evaluate()
        log.close()
        return quality, (tmp_path / "result_0.txt").read_text(), capsys.readouterr().out

    quality, log, screen = first_evaluation()
    doubt = f"have {quality:.5f} before the first step, expected 0.34085"
    assert quality < 0.3 and doubt in log and doubt in " ".join(screen.split())
    assert f"masked-LM accuracy {quality:.5f} (target 0.72)" in screen
    monkeypatch.setattr(benchmark, "STARTING_ACCURACY", quality)
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
    for name in NAMES:
        write_tfrecord(folder / name, map(payload, reference(source, name, 2, 0.15)))
    picked = evenly_spaced(reference(source, "eval.txt", 10, 0.15), NUM_EVALUATION)
    write_tfrecord(folder / sources.RECORDS, map(payload, picked))
    for path in source.glob(f"{sources.CHECKPOINT}*"):
        shutil.copy(path, folder)
    return folder


def check_same_instances(folder, other):
    indexes = [Shards(directory, "train").index for directory in (folder, other)]
    for shard in range(NUM_PARTS):  # the shares of the bytes differ a little
        a, b = (index["crc32"][index["shard"] == shard][:40] for index in indexes)
        assert a.tolist() == b.tolist() and len(a) == 40
    for name in ("evaluation-00000.shard", "evaluation.index.npy", "model.safetensors"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_tfrecords_give_the_instances_of_the_text(source, records, tmp_path):
    with pytest.raises(UserError, match=r"masked at 0\.15, not at 0\.2; prepare from the text"):
        prepared(tmp_path / "full", records)
    text, full = prepared(tmp_path / "text", source, **AT_15), prepared(tmp_path / "full", records, **AT_15)
    check_same_instances(text, full)


@pytest.fixture
def copied(source, tmp_path):
    return shutil.copytree(source, tmp_path / "source")


PART, CHECKPOINT_DATA = f"results4/{NAMES[1]}", "model.ckpt-28252.data-00000-of-00001"


@pytest.mark.parametrize(
    ("action", "names", "message"),
    [
        (shutil.move, (PART, "moved"), "there is no part-00001-of-00004"),
        (shutil.copy, (PART, "."), "part-00001-of-00004 is there twice"),
        (shutil.copy, (PART, "part-00001-of-00009"), "parts of 2 sets"),
        (shutil.copy, (PART, "eval_10k"), "both eval.txt and eval_10k"),
        (shutil.move, ("vocab.txt", "words"), "no vocab.txt"),
        (shutil.move, ("model.ckpt-28252.index", "index"), r"no model\.ckpt-28252\.index"),
        (shutil.move, (CHECKPOINT_DATA, "data"), f"{CHECKPOINT_DATA}: no such file, beside its index"),
        (shutil.move, ("results4/eval.txt", "text"), "has neither eval.txt"),
        (lambda part: part.write_bytes(b""), (PART,), "part-00001-of-00004: is empty"),
        (shutil.rmtree, ("results4",), "has no part of a training set and no table of text"),
    ],
)
def test_an_incomplete_or_ambiguous_source_is_refused(copied, action, names, message):
    action(*(copied / name for name in names))
    with pytest.raises(UserError, match=message):
        sources.list_source(copied, is_official=False, has_checkpoint=True)


def test_a_cut_index_of_the_checkpoint_is_refused_before_any_sample_is_made(copied, tmp_path, monkeypatch):
    (index,) = copied.rglob("model.ckpt-28252.index")
    index.write_bytes(index.read_bytes()[:-20])
    monkeypatch.setattr(wikipedia, "plan", None)
    with pytest.raises(UserError, match=r"model\.ckpt-28252\.index"):
        prepared(tmp_path / "full", copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.vocab_size": 601}, r"600 tokens, model\.vocab_size is 601"),
        ({"data.num_train_samples": 200_000}, r"gives \d+ instances, \d+ are asked; lower data.num_train"),
        ({"data.num_evaluation_samples": 200_000}, r"200000 are asked; lower data.num_evaluation_samples"),
        ({"model.hidden_size": 32}, r"model\.ckpt-28252: .* is \(.*, expected"),
        (OFFICIAL, "4 parts, expected 500; this benchmark is defined on one dump"),
    ],
)
def test_settings_that_the_source_cannot_follow_are_refused(source, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        prepared(tmp_path / "full", source, **changes)
    assert not (tmp_path / "full").exists()


def test_another_dump_is_refused_by_name_and_hash(source, tmp_path, monkeypatch):
    for module, name, value, message in (
        (sources, "NUM_PARTS", NUM_PARTS, r"MD5 [0-9a-f]{32}, expected 2a220f790517"),
        (sources, "OFFICIAL_MD5", {}, "40 samples, expected 10,000"),
        (
            wikipedia,
            "OFFICIAL_EVALUATION",
            {"samples": NUM_EVALUATION, "masked tokens": 5},
            r"\d+ masked tokens, expected 5",
        ),
    ):
        monkeypatch.setattr(module, name, value)
        with pytest.raises(UserError, match=rf"eval\.txt: {message}"):
            prepared(tmp_path / "full", source, **OFFICIAL)


def test_equal_shards_are_noticed(copied, tmp_path):
    shutil.copy(copied / "results4" / NAMES[0], copied / "results4" / NAMES[3])
    message = rf"\d+% of the instances.*{NAMES[0]} and {NAMES[3]}"
    with pytest.raises(UserError, match=message):
        prepared(tmp_path / "full", copied)


def test_of_two_checkpoints_the_one_of_tensorflow_1_is_read(copied, monkeypatch):
    """MLCommons has both, of one name; the one that is read is known by its MD5, not by its folder."""
    one, other, index = copied / "tf1", copied / "another", sources.CHECKPOINT + sources.INDEX_SUFFIX
    for folder in (one, other):
        folder.mkdir()
    for path in copied.glob(f"{sources.CHECKPOINT}*"):
        path.rename(one / path.name)
    write_checkpoint(other / sources.CHECKPOINT, {"model/layer-0/.ATTRIBUTES/VARIABLE_VALUE": np.ones(2)})
    with pytest.raises(UserError, match=r"model\.ckpt-28252\.index is there twice: .*another.* and .*tf1"):
        sources.list_source(copied, is_official=False, has_checkpoint=True)
    monkeypatch.setitem(sources.OFFICIAL_MD5, index, hashlib.md5((one / index).read_bytes()).hexdigest())
    listed = sources.list_source(copied, is_official=False, has_checkpoint=True)
    assert listed.checkpoint == one / sources.CHECKPOINT


def test_a_converted_checkpoint_stands_for_the_data_of_tensorflows(full, copied, tmp_path):
    """The prepared folder has the conversion; a source needs only the small index beside it."""
    (copied / f"{sources.CHECKPOINT}{sources.DATA_SUFFIX}").unlink()
    shutil.copy(full / sources.WEIGHTS, copied)
    again = prepared(tmp_path / "full", copied)
    assert (again / sources.WEIGHTS).read_bytes() == (full / sources.WEIGHTS).read_bytes()
    content = bytearray((full / sources.WEIGHTS).read_bytes())
    content[-1] ^= 1
    (copied / sources.WEIGHTS).write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: .* is not .*28252\.index \(CRC differs\)"):
        prepared(tmp_path / "other", copied)


def test_full_size_needs_a_source(tmp_path):
    with pytest.raises(
        UserError, match="no intact Wikipedia here; run: ttt data prepare language_bert.*ttt data fetch"
    ):
        prepare(tmp_path / "full", config_of(tmp_path / "full"))


@pytest.fixture
def started(source, tmp_path):
    """A preparation as a process of its own that has written a shard, and its workers."""
    directory, changes = tmp_path / "full", {"data.num_duplicates": 10}  # slow enough to be stopped
    settings = settings_of(directory, **changes)
    process = start(TTT, "data", "prepare", "language_bert", "--source", source, "--set", *settings)
    work = tmp_path / ".full.part"
    while not list(work.glob("rows/train-*")) and process.poll() is None:
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
    finished = [path.name for path in work.glob("rows/[te]*.npy")]
    assert 1 <= len(finished) < NUM_PARTS + 1 and not directory.exists()
    first = next(work.glob(f"data/{finished[0].rpartition('-')[0]}.shard"))
    number = first.stat().st_ino
    prepared(directory, source, **changes)
    assert (directory / first.name).stat().st_ino == number and not work.exists()
    whole = prepared(tmp_path / "whole", source, **changes)
    one, other = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (directory, whole)
    )
    assert one == other


def test_a_worker_that_dies_is_one_clear_line(started):
    process, workers, directory, _ = started
    for worker in workers:
        if "spawn_main" in " ".join(worker.cmdline()):
            worker.kill()
    error = process.communicate(timeout=20)[1]
    assert "has died" in error and error.count("\n") == 1 and not directory.exists()


def test_ctrl_c_ends_at_once_without_a_trace_of_workers(started):
    process, workers, directory, _ = started
    process.send_signal(signal.SIGINT)
    error, work = process.communicate(timeout=10)[1], directory.with_name(".full.part")
    num_finished = len(list(work.glob("rows/*-*.npy")))
    kept = f"note: {num_finished} finished shards are kept in {work}; the same command goes on\n"
    assert error == f"{kept}error: interrupted\n" and process.returncode == 130
    assert not psutil.wait_procs(workers, timeout=10)[1] and not directory.exists()


def test_as_many_processes_write_as_the_container_has_cores(tmp_path, monkeypatch):
    def stop(max_workers, **options):
        raise UserError(f"{max_workers} processes")

    monkeypatch.setattr(wikipedia, "usable_cores", lambda: 2.5)
    monkeypatch.setattr(wikipedia, "ProcessPoolExecutor", stop)
    (tmp_path / "part").touch()
    with pytest.raises(UserError, match="^2 processes"):
        wikipedia.write_missing([SimpleNamespace(file=tmp_path / "part")] * 4, 4)
