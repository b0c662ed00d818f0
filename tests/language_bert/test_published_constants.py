"""Every constant of the published benchmark and recipe that the code relies on, written out."""

import numpy as np
import pytest
import torch
from torch import nn

from common.training.load import load_config
from common.training.optim import build_optimizer, build_schedule
from language_bert import benchmark
from language_bert.benchmark import Benchmark
from language_bert.data import sources, tf_checkpoint, wikipedia, wordpiece
from language_bert.data.batches import typical_lengths
from language_bert.data.instances import NUM_SPECIAL, InstanceSettings
from language_bert.model import bert_config, build_bert
from language_bert.probes import Probes

BASELINE = {
    "target": 0.72,
    "max_duration": "2688000sp",
    "evaluate_every": "55ba",
    "evaluate_untrained": True,
    "global_batch_size": 448,
    "micro_batch_size": 56,
    "evaluation_batch_size": 448,
    "precision": "bf16",
    "model.vocab_size": 30_522,
    "model.hidden_size": 1024,
    "model.num_hidden_layers": 24,
    "model.num_attention_heads": 16,
    "model.intermediate_size": 4096,
    "model.dropout": 0.0,
    "model.initializer_range": 0.02,
    "model.attention": "sdpa",
    "model.activation": "gelu_pytorch_tanh",
    "model.start": "checkpoint",
    "model.next_sentence": False,
    "data.num_evaluation_samples": 10_000,
    "data.corpus": "wikipedia-20200101",
    "data.max_seq_length": 512,
    "data.num_duplicates": 10,
    "data.masked_fraction": 0.20,
    "data.evaluation_masked_fraction": 0.15,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 1e-4,
    "optimizer.momentum": 0.9,
    "optimizer.beta2": 0.98,
    "optimizer.epsilon": 1e-6,
    "optimizer.weight_decay": 0.1,
    "schedule.warmup": "80ba",
    "schedule.factor": 0.9,
    "schedule.milestones": [
        f"{step}ba"
        for step in (400, 600, 650, 800, 850, 900, 950, 1000, 1100, 1150)
        + (1200, 1225, 1250, 1275, 1300, 1325, 1350, 1375, 1400, 1600)
    ],
    "methods": {},
}
MOSAIC = BASELINE | {
    "precision": "fp16",
    "model.activation": "gelu",
    "methods": {
        "unpad": {"balance_ranks": False},
        "fused_qkv": {},
        "sparse_head": {},
        "last_layer_subset": {},
    },
}
CONSTANTS = {  # what the code has, what is published
    "sequences": (InstanceSettings().max_seq_length, 512),
    "most predictions at 15 %": (InstanceSettings().max_predictions, 76),
    "most predictions at 20 %": (InstanceSettings(masked_fraction=0.2).max_predictions, 102),
    "masked": (InstanceSettings().masked_fraction, 0.15),
    "short sequences": (InstanceSettings().short_sequence_fraction, 0.1),
    "visits to a document": (InstanceSettings().num_duplicates, 10),
    "tokens of a pair": (InstanceSettings().max_seq_length - NUM_SPECIAL, 509),
    "seed": (wikipedia.SEED, 12345),
    "characters of a word": (wordpiece.MAX_WORD_CHARACTERS, 200),
    "parts": (sources.NUM_PARTS, 500),
    "evaluated samples": (wikipedia.OFFICIAL_EVALUATION["samples"], 10_000),
    "evaluated tokens": (wikipedia.OFFICIAL_EVALUATION["masked tokens"], 428_235),
    "samples with fewer than 76": (wikipedia.OFFICIAL_EVALUATION["samples with fewer masked"], 6_946),
    "accuracy of the starting weights": (benchmark.STARTING_ACCURACY, 0.34085),
    "tokens of a phase-1 sequence": (tf_checkpoint.TRAINED, 128),
    "magic number of an index": (tf_checkpoint.MAGIC, 0xDB4775248B80FB57),
    "bytes of its footer": (tf_checkpoint.FOOTER_BYTES, 48),
}
MD5 = {
    "vocab.txt": "64800d5d8528ce344256daf115d4965e",
    "eval.txt": "2a220f790517261547b1b45ed3ada07a",
    "part-00000-of-00500": "a64a7c31eff5cd38ae6d94f7a6229dab",
    "part-00499-of-00500": "b3b087ad24e3770d879a351664cebc5a",
    "model.ckpt-28252.data-00000-of-00001": "50797acd537880bfb5a7ade80d976129",  # of TensorFlow 1
    "model.ckpt-28252.index": "f97de3ae180eb8d479555c939d50d048",
}
NAMES = {  # in the checkpoint, in Hugging Face's model
    "bert/embeddings/word_embeddings": "bert.embeddings.word_embeddings.weight",
    "bert/embeddings/position_embeddings": "bert.embeddings.position_embeddings.weight",
    "bert/embeddings/token_type_embeddings": "bert.embeddings.token_type_embeddings.weight",
    "bert/embeddings/LayerNorm/gamma": "bert.embeddings.LayerNorm.weight",
    "bert/embeddings/LayerNorm/beta": "bert.embeddings.LayerNorm.bias",
    "bert/encoder/layer_0/attention/self/query/kernel": "bert.encoder.layer.0.attention.self.query.weight",
    "bert/encoder/layer_9/attention/self/key/bias": "bert.encoder.layer.9.attention.self.key.bias",
    "bert/encoder/layer_10/attention/self/value/kernel": "bert.encoder.layer.10.attention.self.value.weight",
    "bert/encoder/layer_23/attention/output/dense/kernel": (
        "bert.encoder.layer.23.attention.output.dense.weight"
    ),
    "bert/encoder/layer_1/attention/output/LayerNorm/beta": (
        "bert.encoder.layer.1.attention.output.LayerNorm.bias"
    ),
    "bert/encoder/layer_2/intermediate/dense/kernel": "bert.encoder.layer.2.intermediate.dense.weight",
    "bert/encoder/layer_2/output/dense/bias": "bert.encoder.layer.2.output.dense.bias",
    "bert/encoder/layer_2/output/LayerNorm/gamma": "bert.encoder.layer.2.output.LayerNorm.weight",
    "bert/pooler/dense/kernel": "bert.pooler.dense.weight",
    "cls/predictions/transform/dense/kernel": "cls.predictions.transform.dense.weight",
    "cls/predictions/transform/LayerNorm/gamma": "cls.predictions.transform.LayerNorm.weight",
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
}


def config_of(name, *settings):
    return load_config("language_bert", name, size="full", settings=settings).config


def value_of(config, key):
    value = config.model_dump()
    for name in key.split("."):
        value = value[name]
    return value


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [(name, key, value) for name, table in {"baseline": BASELINE, "mosaic": MOSAIC}.items()
     for key, value in table.items()],
)  # fmt: skip
def test_a_configuration_has_the_published_value(name, key, expected):
    assert value_of(config_of(name), key) == expected


@pytest.mark.parametrize(("found", "expected"), CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_is_the_published_one(found, expected):
    assert found == expected


@pytest.mark.parametrize(("name", "expected"), MD5.items())
def test_a_file_is_known_by_its_published_md5(name, expected):
    assert sources.OFFICIAL_MD5[name] == expected


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_a_variable_of_the_checkpoint_has_its_place(name, expected):
    assert tf_checkpoint.hugging_face_name(name) == expected
    assert not tf_checkpoint.OPTIMIZER.search(name)
    with torch.device("meta"):
        model = build_bert(bert_config(config_of("baseline")), next_sentence=True)
    assert expected in dict(model.named_parameters())


@pytest.mark.parametrize(
    "name",
    ["a/kernel/LAMB", "a/kernel/LAMB_1", "a/adam_m", "a/adam_v", "beta1_power", "beta2_power", "global_step"],
)
def test_what_the_optimizer_left_in_the_checkpoint_is_passed_over(name):
    assert tf_checkpoint.OPTIMIZER.search(name)


def test_the_model_is_bert_large():
    config = bert_config(config_of("baseline"))
    with torch.device("meta"):
        model = build_bert(config, next_sentence=True)
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(336.2e6, abs=0.05e6)
    encoder = sum(each.numel() for each in model.bert.encoder.parameters() if each.ndim == 2)
    assert encoder == 24 * 12 * 1024**2
    assert (config.layer_norm_eps, config.type_vocab_size) == (1e-12, 2)


@pytest.mark.parametrize(
    ("by_mosaic", "true"), [(0.7200, 0.71546), (0.7203, 0.7158), (0.72447, 0.7200)], ids=str
)
def test_the_arithmetic_of_the_published_accuracy(by_mosaic, true):
    evaluated = Benchmark(config_of("baseline"), seed=0)
    evaluated.manifest = {"facts": {"num_evaluation_short": 6_946}}  # in the place of the prepared data's
    found = evaluated.extra_metrics(round(true * 428_235), 428_235)["mlm_accuracy_mosaic"]
    assert found == pytest.approx(by_mosaic, abs=5e-5)
    assert (by_mosaic * 435_181 - 6_946) / 428_235 == pytest.approx(true, abs=5e-5)


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


@pytest.mark.parametrize(("masked", "most", "mean"), [(0.15, 76, 38.2), (0.20, 102, 51.1)])
def test_typical_sequences_have_the_published_number_of_masked_tokens(masked, most, mean):
    counts = np.minimum(most, np.round(typical_lengths(100_000, 512) * masked))
    assert counts.mean() == pytest.approx(mean, abs=0.3)
    if masked == 0.15:
        assert np.mean(counts < 76) == pytest.approx(0.761, abs=0.005)


def test_the_optimizer_is_mosaics_decoupled_adamw():
    """Its step, written out: decay by 1e-5 times the schedule's factor, bias corrections, all parameters."""
    config = config_of("baseline")
    torch.manual_seed(0)
    layer = nn.LayerNorm(7).double()
    nn.init.normal_(layer.weight)
    optimizer = build_optimizer(layer, config.optimizer)
    set_rate = build_schedule(optimizer, config.schedule, config.plan())
    weight = layer.weight.detach().clone()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
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
