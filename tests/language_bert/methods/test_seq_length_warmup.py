"""Sequence-length warm-up: the lengths, what is cut, what stays."""

import pytest
import torch

from common.errors import UserError
from common.measure.device_run import build
from common.training.method import Batch, Progress
from common.training.registry import build_methods
from language_bert.benchmark import Benchmark
from language_bert.data.batches import IGNORED, weigh_next_sentences
from language_bert.methods.seq_length_warmup import SeqLengthWarmup, sequence_length, shorten
from language_bert.model import next_sentence_loss
from tests.language_bert.configs import mini
from tests.language_bert.test_parity import MAX_LENGTH, make_batch, make_model

LENGTHS = (37, 4, 12, 21)


def test_the_length_grows_linearly_over_the_first_part_of_the_steps():
    lengths = [sequence_length(step, 1000, 512) for step in range(1000)]
    assert lengths[300:] == [512] * 700
    for step in range(300):  # Composer's formula
        assert lengths[step] == max(8, int(8 + (512 - 8) * (step / 300)) // 8 * 8)
    assert sequence_length(0, 10, 512, duration=0) == 512
    assert sequence_length(0, 10, 37, min_length=37, round_to=10) == 37


def test_truncation_keeps_the_first_places_of_every_row():
    batch = make_batch(LENGTHS)
    tensors = batch.inputs | batch.targets
    short = shorten(tensors, 8)
    assert all(short[name].equal(tensors[name][:, :8]) for name in (*batch.inputs, "labels"))
    assert short["next_sentence_label"].equal(batch.targets["next_sentence_label"])


def test_an_unknown_way_to_shorten_is_refused():
    with pytest.raises(UserError, match="unknown way 'segments'"):
        shorten({}, 8, "segments")


@pytest.mark.parametrize("length", range(8, MAX_LENGTH + 8, 8))
def test_segments_are_all_tokens_of_each_sequence_in_their_order(length):
    batch = make_batch(LENGTHS)
    tensors = batch.inputs | batch.targets
    short = shorten(tensors, length, "segment")
    assert ("next_sentence_label" in short) == (length > MAX_LENGTH)
    is_token, was_token = (x["attention_mask"].bool() for x in (short, tensors))
    for name in ("input_ids", "token_type_ids", "labels"):
        assert short[name][is_token].equal(tensors[name][was_token])
    rows = [min(length, tokens - first) for tokens in LENGTHS for first in range(0, tokens, length)]
    assert is_token.sum(dim=1).tolist() == rows  # none of two sequences, none of padding alone
    assert (short["labels"][~is_token] == -100).all()


def method(**settings):
    return SeqLengthWarmup("seq_length_warmup", SeqLengthWarmup.Config(**settings))


def progress(step):
    return Progress(step=step, num_steps=100, epoch=0, num_epochs=1)


@pytest.mark.parametrize("how", ["truncate", "segment"])
def test_training_batches_are_short_at_first_and_evaluation_never(how):
    batch, used = make_batch(LENGTHS), method(how=how)
    assert used.batch(batch, None) is batch and used.batch(batch, progress(30)) is batch
    short = used.batch(batch, progress(0))
    assert short.inputs["input_ids"].shape[1] == 8 and short.targets["labels"].shape[1] == 8
    assert short.num_samples == len(short.inputs["input_ids"]) == (4 if how == "truncate" else 11)


def test_a_batch_that_would_lose_every_masked_token_stays_whole():
    batch = make_batch((37,))
    batch.targets["labels"][0, :8], batch.targets["labels"][0, 9] = -100, 3
    assert method().batch(batch, progress(0)) is batch
    tensors = batch.inputs | batch.targets
    assert shorten(tensors, 8) is tensors
    assert shorten(tensors, 16)["labels"].shape == (1, 16)
    for how in ("truncate", "segment"):
        assert shorten(tensors, MAX_LENGTH, how) is tensors and shorten(tensors, 512, how) is tensors


def configured(*settings, name="optimized"):
    return mini(name, "methods.seq_length_warmup={}", *settings)


def test_a_micro_batch_counts_by_the_masked_tokens_that_it_had(tmp_path):
    settings = ["global_batch_size=4", "micro_batch_size=2", "precision=fp32"]
    run = build(configured(*settings, name="baseline"), tmp_path)
    batch, expected = next(run.benchmark.synthetic_batches()), 0.0
    inputs, targets = (
        {name: torch.cat([values, values]) for name, values in part.items()}
        for part in (batch.inputs, batch.targets)
    )
    targets["labels"][:2, 8:], targets["labels"][:, 1] = -100, 7
    whole = Batch(inputs=inputs, targets=targets, num_samples=4)
    counts = [run.benchmark.num_targets(part) for part in whole.parts(2)]
    assert counts[0] < counts[1]
    loss = run.forward_backward(whole, 0)
    for part, count in zip(whole.parts(2), counts, strict=True):
        short = method().batch(part, run.progress(0))
        assert short.inputs["input_ids"].shape[1] == 8
        expected += run.loss(run.model(**short.inputs), short.targets).item() * count / sum(counts)
    run.log.close()
    assert loss.item() == pytest.approx(expected)


@torch.no_grad()
@pytest.mark.parametrize("num_parts", [1, 2])
def test_cut_sequences_keep_their_share_of_the_next_sentence_loss(num_parts):
    model, whole = make_model(True), make_batch(LENGTHS)
    whole.targets["labels"][:, 1] = 7
    num_masked = int((whole.targets["labels"] != IGNORED).sum())
    expected = next_sentence_loss(model(**method().batch(whole, progress(0)).inputs), whole.targets)
    found = 0.0
    for part in weigh_next_sentences(whole, num_masked, whole.num_samples).parts(num_parts):
        short = method().batch(part, progress(0))
        count, left = (int((each.targets["labels"] != IGNORED).sum()) for each in (part, short))
        assert left < count
        found += float(next_sentence_loss(model(**short.inputs), short.targets)) * count / num_masked
    assert found == pytest.approx(float(expected), rel=1e-6)  # weights are float32


def test_it_is_moved_before_the_packing_and_packed_batches_are_short():
    config = configured()
    assert list(config.methods)[:2] == ["seq_length_warmup", "unpad"]
    batch = next(Benchmark(config, seed=0).synthetic_batches())
    lengths = batch.inputs["attention_mask"].sum(dim=1)
    for used in build_methods(config)[:2]:
        batch = used.batch(batch, progress(0))
    packed = batch.inputs["sequences"].cu_seqlens.diff()[: len(lengths)]
    assert packed.tolist() == lengths.clamp(max=8).tolist()


def test_warm_up_sees_all_lengths_up_to_the_full_one(tmp_path):
    run = build(configured(name="baseline"), tmp_path, warms_up=False)
    batches = [run.prepare_batch(batch, run.progress(step)) for batch, step in run.shapes()]
    run.log.close()
    assert [batch.inputs["input_ids"].shape[1] for batch in batches] == [8, 40, 80, 120, 160]
