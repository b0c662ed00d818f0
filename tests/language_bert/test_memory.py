"""The micro-batch that `auto` takes: the bytes that it counts with, and the sizes that follow."""

import importlib.util

import pytest
import torch

from common.errors import UserError
from common.measure.device_run import load
from common.measure.without_gpu.compile_for import build_training, make_host_batches, open_compiler
from common.measure.without_gpu.pretend import find_gpu
from common.training import memory
from common.training.load import load_config
from common.training.ranks import RankInfo, read_rank_info
from language_bert.benchmark import Benchmark
from language_bert.methods.unpad import resolve_rounding
from tests.language_bert.configs import config_of

DEVICES = {"A100 40GB": 42.4e9, "A100 80GB": 85.0e9, "H100": 85.0e9, "H200": 150.0e9}  # as torch counts them

GATED = "+gated_linear_units"


def count_kept_bytes(name, num_layers):
    """Return the bytes that are kept for the backward pass of 8 sequences, and their tokens."""
    config = load("language_bert", f"{name}+model.num_hidden_layers={num_layers}", size="full", batch_size=8)
    with open_compiler(find_gpu("sm_90")):
        run = build_training(Benchmark(config, seed=0))
        parameters, kept = {id(parameter) for parameter in run.model.parameters()}, {}

        def keep(value):
            if id(value) not in parameters:
                kept[id(value.untyped_storage())] = value.untyped_storage()
            return value

        (batch,) = make_host_batches(run.benchmark).values()
        batch = run.prepare_batch(batch, run.progress(0))
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value)
        with hooks, run.autocast(config.precision):
            run.model(**batch.inputs)
        return sum(storage.nbytes() for storage in kept.values()), batch.inputs["input_ids"].numel()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
@pytest.mark.parametrize(
    ("changes", "num_weights"),
    [
        ("", 12),
        ("+methods.low_precision_layernorm=false", 12),
        (f"{GATED}+model.start=random", 12),  # three matrices, two thirds as wide, instead of two
        (f"{GATED}.width_factor=1+model.start=random", 16),
    ],
)
def test_a_layer_keeps_the_bytes_that_auto_counts_with(changes, num_weights):
    name = f"optimized+methods.compile_layers=false{changes}"
    (one, tokens), (other, _) = (count_kept_bytes(name, num_layers) for num_layers in (2, 3))
    of_weights = 2 * num_weights * 1024**2  # copies in 16 bits, counted with the parameters
    each = (other - one - of_weights) / tokens / 1024
    counted = config_of(name).layer_bytes / 1024
    assert counted * 0.9 < each < counted * 1.01


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_products_in_8_bits_keep_less_than_auto_counts_with():
    name = "optimized+methods.compile_layers=false+fp8"
    (two, tokens), (three, _) = (count_kept_bytes(name, num_layers) for num_layers in (2, 3))
    assert (three - two) / tokens < config_of(name).layer_bytes


@pytest.mark.parametrize(
    ("device", "settings", "num_ranks", "expected"),
    [
        ("A100 40GB", (), 1, 112),
        ("A100 80GB", (), 1, 224),
        ("A100 80GB", (), 8, 56),
        ("A100 80GB", ("micro_batch_size=32",), 1, 32),
        ("A100 80GB", ("micro_batch_size=null", "methods.compile_layers=false"), 1, 448),
        ("H100", ("methods.low_precision_layernorm=false",), 1, 224),
        ("H200", (), 1, 448),
        ("H200", (), 3, 150),
    ],
)
def test_auto_takes_the_largest_part_that_fits_in_at_most_64_forms(
    device, settings, num_ranks, expected, monkeypatch
):
    monkeypatch.setattr(memory, "usable_bytes", lambda *_: int(memory.USABLE * DEVICES[device]))
    monkeypatch.setattr(Benchmark, "device", torch.device("cuda"))  # what it would warm up there
    config = config_of("optimized", *settings)
    rank_info = RankInfo(rank=num_ranks - 1, world_size=num_ranks)
    benchmark = Benchmark(config, seed=0, rank_info=rank_info)
    assert benchmark.micro_batch_sizes == [expected]
    benchmark.prepare_loader()  # refuses more forms


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(1, 512), (56, 512), (57, 1024), (112, 1024), (224, 2048), (448, 4096)]
)
def test_automatic_rounding_grows_with_the_micro_batch(num_samples, expected):
    assert resolve_rounding("auto", num_samples) == expected
    assert resolve_rounding(96, num_samples) == 96


@pytest.mark.parametrize("benchmark", ["image_classification", "language_bert"])
def test_auto_is_refused_where_nobody_counted(benchmark):
    with pytest.raises(
        UserError, match="^micro_batch_size: auto: not known for .*; --set micro_batch_size=N$"
    ):
        load_config(benchmark, "baseline", size="full", settings=["micro_batch_size=auto"])


def test_auto_is_refused_where_not_even_one_sample_fits():
    config = config_of("optimized")
    least = config.training_bytes(1)
    assert memory.fitting_size(448, least, config.training_bytes) == 1
    with pytest.raises(
        UserError, match="^micro_batch_size: auto: a sample takes 6.* GB, .*micro_batch_size=N$"
    ):
        memory.fitting_size(448, least - 1, config.training_bytes)


def test_ranks_of_a_machine_without_gpus_share_its_memory(monkeypatch):
    alone = memory.usable_bytes(torch.device("cpu"), read_rank_info().num_local)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert memory.usable_bytes(torch.device("cpu"), read_rank_info().num_local) == alone // 4


@pytest.mark.parametrize("value", ["0", "many"])
def test_a_micro_batch_is_a_number_or_auto(value):
    with pytest.raises(UserError, match="micro_batch_size"):
        config_of("optimized", f"micro_batch_size={value}")
