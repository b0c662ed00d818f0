"""The configurations have the published values; model, work and optimizer follow from them."""

import numpy as np
import pytest
import torch
from torch import nn

from common.evidence.compare.reported import read_facts
from common.repository import ROOT
from common.training.optim import build_optimizer, build_schedule
from language_bert.benchmark import Benchmark
from language_bert.config import LENGTH_DEVIATION
from language_bert.data.batches import shift_lengths, typical_lengths
from language_bert.data.wikipedia import OFFICIAL_EVALUATION
from language_bert.model import bert_config, build_bert
from language_bert.probes import Probes
from tests.language_bert.configs import config_of


def test_the_model_is_bert_large():
    config = bert_config(config_of("baseline"))
    with torch.device("meta"):
        model = build_bert(config, next_sentence=True)
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(336.2e6, abs=0.05e6)
    encoder = sum(each.numel() for each in model.bert.encoder.parameters() if each.ndim == 2)
    assert encoder == 24 * 12 * 1024**2
    assert (config.layer_norm_eps, config.type_vocab_size, config.num_attention_heads) == (1e-12, 2, 16)


def test_the_official_counts_are_those_of_the_published_logs():
    """MosaicML counted one more token of each sample with fewer masked tokens than the most."""
    reported = read_facts(ROOT / "language_bert/reported.yaml")
    (counted,) = {runs["masked_tokens"] for runs in reported["sets"]}
    assert OFFICIAL_EVALUATION["masked tokens"] + OFFICIAL_EVALUATION["samples with fewer masked"] == counted


@pytest.mark.parametrize(
    ("by_mosaic", "true"), [(0.7200, 0.71546), (0.7203, 0.7158), (0.72447, 0.7200)], ids=str
)
def test_the_arithmetic_of_the_published_accuracy(by_mosaic, true):
    benchmark, num_tokens = Benchmark(config_of("baseline"), seed=0), OFFICIAL_EVALUATION["masked tokens"]
    num_short = OFFICIAL_EVALUATION["samples with fewer masked"]
    benchmark.manifest = {"facts": {"num_evaluation_short": num_short}}  # in place of the prepared data's
    metrics = benchmark.extra_metrics(round(true * num_tokens), num_tokens)
    assert metrics == {"mlm_accuracy_mosaic": pytest.approx(by_mosaic, abs=5e-5)}
    other_text = Benchmark(config_of("baseline", "data.corpus=other"), seed=0)
    assert other_text.extra_metrics(1, 2) == {}


@pytest.mark.parametrize(("masked", "gflop"), [(0.15, 500.0), (0.20, 502.6)])
def test_the_work_of_a_sequence(masked, gflop):
    config = config_of("baseline", f"data.masked_fraction={masked}")
    assert Probes(Benchmark(config, seed=0)).work("512 tokens").flops == pytest.approx(gflop * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("first", "last", "sequences", "tokens"),
    [(1, 128, 0.369, 0.100), (129, 256, 0.197, 0.143), (257, 384, 0.117, 0.145), (385, 511, 0.082, 0.143),
     (512, 512, 0.234, 0.469)],
)  # fmt: skip
def test_typical_lengths_lie_where_wikipedias_do(first, last, sequences, tokens):
    lengths = typical_lengths(100_000, 512)
    chosen = lengths[(lengths >= first) & (lengths <= last)]
    assert len(chosen) / len(lengths) == pytest.approx(sequences, abs=0.005)
    assert chosen.sum() / lengths.sum() == pytest.approx(tokens, abs=0.005)


def test_typical_lengths_have_the_deviation_and_the_masked_tokens_of_wikipedias():
    lengths = typical_lengths(10_000, 512)
    assert np.std(lengths) == pytest.approx(LENGTH_DEVIATION * 512, abs=3)
    counts = np.minimum(76, np.round(lengths * 0.15))
    assert counts.mean() == pytest.approx(38.2, abs=0.3)
    assert np.mean(counts < 76) == pytest.approx(0.761, abs=0.005)
    moved = shift_lengths(typical_lengths(448, 512), 100_000, 512)
    assert moved.sum() == pytest.approx(100_000, abs=448) and moved.max() <= 512


def test_the_optimizer_is_mosaics_decoupled_adamw():
    """Its step, written out: decay by 1e-5 times the schedule's factor, bias corrections, all parameters."""
    config = config_of("baseline")
    torch.manual_seed(0)
    layer = nn.LayerNorm(7).double()
    nn.init.normal_(layer.weight)
    optimizer = build_optimizer(layer, config.optimizer)
    set_rate = build_schedule(optimizer, config.schedule, config.plan())
    weight, mean, square = layer.weight.detach().clone(), 0, 0
    for count, (step, factor) in enumerate({40: 0.5, 80: 1.0, 400: 0.9, 1000: 0.9**8}.items(), 1):
        gradient = torch.randn(7, dtype=torch.float64)
        layer.weight.grad = gradient.clone()
        set_rate(step)
        optimizer.step()
        weight = weight * (1 - 1e-5 * factor)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.98 * square + 0.02 * gradient**2
        denominator = square.sqrt() / (1 - 0.98**count) ** 0.5 + 1e-6
        weight = weight - 1e-4 * factor / (1 - 0.9**count) * mean / denominator
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-12, atol=1e-14)
    assert len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) == 2
