"""The configurations and what the benchmark derives from them."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.evidence.compare.reported import read_facts
from common.methods.compile import MAX_SHAPES
from common.repository import ROOT
from common.training.optim import schedule_factor
from common.training.ranks import RankInfo, part
from common.training.registry import build_methods
from language_bert.benchmark import Benchmark
from language_bert.data.batches import typical_lengths
from language_bert.methods.position_rows import copy_rows
from tests.language_bert.configs import config_of, mini

TO_512 = "methods.unpad.round_to=512 methods.sparse_head.round_to=512"


class OnGpu(Benchmark):
    device = torch.device("cuda")  # what it would warm up there; nothing is computed


class OnCpu(Benchmark):
    device = torch.device("cpu")  # also on a machine with a GPU


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 0), (40, 0.5), (80, 1), (399, 1), (400, 0.9), (800, 0.6561), (1000, 0.43046721), (1200, 0.31381),
     (1375, 0.150095), (1400, 0.135085), (1599, 0.135085), (1600, 0.121577), (5999, 0.121577)],
)  # fmt: skip
def test_the_schedule_is_the_published_one(step, factor):
    config = config_of("baseline")
    assert schedule_factor(step, config.schedule, config.plan()) == pytest.approx(factor, rel=1e-4)


def test_target_batch_and_evaluations_are_the_published_ones_and_one_before_training():
    config, reported = config_of("baseline"), read_facts(ROOT / "language_bert/reported.yaml")
    plan = config.plan()
    assert plan.evaluation_steps[:3] == (0, 55, 110) and plan.num_steps == 6000
    assert config.target == reported["quality_target"] and config.data.masked_fraction == 0.2
    for runs in reported["sets"]:
        size, every = runs["global_batch_size"], runs["evaluated_every"]
        assert config.global_batch_size == config.evaluation_batch_size == size == every / 55


@pytest.mark.parametrize("name", ["optimized", "mosaic", "eager", "compiled"])
def test_hyperparameters_are_those_of_the_baseline(name):
    keys = {"target", "max_duration", "evaluate_every", "global_batch_size", "optimizer", "schedule", "data"}
    one, other = (config_of(configuration).model_dump(include=keys) for configuration in ("baseline", name))
    assert one == other


def test_efficient_says_that_they_differ():
    assert "HYPERPARAMETERS DIFFER" in (ROOT / "language_bert/efficient.yaml").read_text()
    config = config_of("efficient")
    assert config.data.masked_fraction == 0.3 and config.data.evaluation_masked_fraction == 0.15
    assert config.prepared_hint == (
        "run: ttt data prepare language_bert --size full --configuration efficient"
        " --set data.directory=data/language_bert/full-masked-30 --source DIR"
    )
    small = mini("efficient")
    assert small.data == mini("baseline").data  # committed runs were masked so
    assert small.prepared_hint == "run: ttt data prepare language_bert --size mini"
    plan = config.plan()
    assert plan.num_steps == 2250 and schedule_factor(2249, config.schedule, plan) < 0.001
    assert [method.name for method in build_methods(config)][-2:] == ["position_rows", "ema"]


@pytest.mark.parametrize(
    ("quality", "settings", "is_doubted"),
    [
        (0.34085, (), False),
        (0.34180, (), False),  # rounding
        (0.34190, (), True),
        (0.0001, (), True),  # the weights were not read
        (0.0001, ("data.corpus=other",), False),
        (0.3, ("data.max_seq_length=128",), False),
        (0.3, ("data.evaluation_masked_fraction=0.2",), False),
        (0.3, ("data.num_evaluation_samples=100", "evaluation_batch_size=100"), False),
        (0.0001, ("model.start=random",), False),
        (0.0001, ("model.activation=gelu",), False),
        (0.0001, ("methods.position_rows={}",), False),
    ],
)
def test_the_published_weights_are_known_by_their_accuracy(quality, settings, is_doubted):
    doubt = Benchmark(config_of("baseline", *settings), seed=0).check_initial_quality(quality)
    assert bool(doubt) == is_doubted and (f"{quality:.5f}" in doubt) == is_doubted


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ("micro_batch_size=112", False),
        (f"micro_batch_size=150 {TO_512}", True),  # of two sizes, 150 and 149
        ("methods.last_layer_subset=false methods.chunked_head=false methods.unpad.round_to=96", False),
        (
            f"micro_batch_size=448 {TO_512}",
            True,
        ),  # eight times the tokens, and as much difference
        (f"micro_batch_size=448 {TO_512} methods.compile_layers=false", False),
        ("micro_batch_size=448", False),
        ("micro_batch_size=448 methods.unpad.round_to=4096 methods.sparse_head.round_to=4096", False),
        ("methods.unpad.round_to=64", True),
        ("methods.unpad.balance_ranks=false", False),
        ("methods.unpad.balance_ranks=false methods.unpad.round_to=256", True),
    ],
)
def test_more_shapes_than_a_compiler_takes_are_refused_at_the_start(settings, is_refused):
    benchmark = OnGpu(config_of("optimized", "micro_batch_size=56", *settings.split()), seed=0)
    message = r"methods\.unpad\.round_to: a layer would be compiled in \d+ forms for training, more than 62"
    with pytest.raises(UserError, match=message) if is_refused else nullcontext():
        benchmark.prepare_loader()


def test_on_a_cpu_no_form_is_compiled_while_the_clock_runs():
    """Its last layer has a form for each number of masked tokens, too: more than are compiled."""

    def cpu(*settings):
        return OnCpu(mini("optimized", *settings), seed=0)

    rounded = "methods.unpad.round_to=256", "methods.sparse_head.round_to=128"
    assert len(list(cpu().synthetic_counts())) == 1
    compiled = cpu("methods.compile_layers={}", *rounded)
    compiled.prepare_loader()
    assert len(list(compiled.synthetic_counts())) > 10
    with pytest.raises(UserError, match=r"a layer would be compiled in \d+ forms"):
        next(cpu("methods.compile_layers={}").synthetic_batches())
    with pytest.raises(UserError, match=r"methods\.compile: would compile every packed batch"):
        cpu("methods.compile={mode: default}", *rounded).prepare_loader()


def test_position_rows_are_copies():
    weight = torch.randn(10, 3)
    trained = weight[:4].clone()
    copy_rows(weight, 4)
    assert torch.equal(weight, torch.cat([trained, trained, trained[:2]]))


def micro_batches(benchmark, lengths, fraction):
    """Yield tokens and masked tokens of this rank's micro-batches."""
    lengths = benchmark.rank_part(lengths, lengths)
    masked = [min(int(512 * fraction), max(1, round(length * fraction))) for length in lengths.tolist()]
    for number in range(benchmark.num_micro_batches):
        members = part(len(lengths), number, benchmark.num_micro_batches)
        yield lengths[members.start : members.stop].sum(), sum(masked[members.start : members.stop])


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 448), (3, 448), (8, 448), (4, 7), (2, 3)])
def test_the_micro_batches_of_all_ranks_are_the_batch(world_size, batch_size):
    config = config_of("optimized", f"global_batch_size={batch_size}", "micro_batch_size=20")
    lengths, indices = typical_lengths(batch_size, 512), np.arange(batch_size) + 1000
    rank_infos = [RankInfo(rank=rank, world_size=world_size) for rank in range(world_size)]
    benchmarks = [Benchmark(config, seed=0, rank_info=rank_info) for rank_info in rank_infos]
    parts = [benchmark.rank_part(indices, lengths) for benchmark in benchmarks]
    assert [len(each) for each in parts] == [benchmark.num_rank_samples for benchmark in benchmarks]
    assert sorted(np.concatenate(parts)) == indices.tolist()


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize(
    ("name", "size", "round_to", "forms_of_layers", "expected_padding"),
    [
        ("optimized", 56, 256, (18, 25), (0.009, 0.045)),
        ("optimized", 56, "auto", (10, 14), (0.018, 0.074)),
        ("optimized", 56, 1024, (6, 8), (0.036, 0.078)),
        ("optimized", 56, 2048, (4, 5), (0.073, 0.426)),
        ("efficient", 56, "auto", (10, 14), (0.018, 0.063)),
    ],
)
def test_training_sees_no_form_of_a_layer_that_warm_up_has_not_compiled(
    name, world_size, size, round_to, forms_of_layers, expected_padding
):
    """Micro-batches are partitioned by length, whether 8 ranks take one of 56 each or one rank takes 8."""
    rounding = [f"methods.{method}.round_to={round_to}" for method in ("unpad", "sparse_head")]
    config = config_of(name, f"micro_batch_size={size}", *rounding)
    benchmark = OnGpu(config, seed=0, rank_info=RankInfo(rank=world_size - 1, world_size=world_size))

    round_to = benchmark.rounding(size)[0]

    def rounded(counts):
        return -(-counts // round_to) * round_to

    counts = [(lengths.sum(), masked.sum()) for lengths, masked in benchmark.synthetic_counts()]
    compiled = list(map(tuple, rounded(np.array(counts)).tolist()))
    assert len(compiled) == len(set(compiled)) and compiled == sorted(compiled, reverse=True)
    rng, population = np.random.default_rng(0), typical_lengths(100_000, 512)
    fraction = config.data.masked_fraction
    batches = (rng.choice(population, 448) for _ in range(1000))
    counts = np.array([pair for batch in batches for pair in micro_batches(benchmark, batch, fraction)])
    assert set(map(tuple, rounded(counts).tolist())) <= set(compiled), "compiled while the clock runs"
    assert (len({tokens for tokens, _ in compiled}), len(compiled)) == forms_of_layers
    assert sum(forms_of_layers) < MAX_SHAPES
    padding = rounded(counts).sum(axis=0) / counts.sum(axis=0) - 1
    assert padding == pytest.approx(expected_padding, abs=0.005)


def test_a_synthetic_batch_has_the_tokens_that_its_form_says():
    benchmark = OnGpu(config_of("optimized", "micro_batch_size=56"), seed=0)
    forms = zip(benchmark.synthetic_batches(), benchmark.synthetic_counts(), strict=True)
    for batch, (lengths, masked) in itertools.islice(forms, 3):
        assert int(batch.inputs["attention_mask"].sum()) == lengths.sum()
        assert benchmark.num_targets(batch) == masked.sum()
