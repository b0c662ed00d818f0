"""`ttt bench`: the parts that it times alone, its JSON, and the memory of a configuration."""

import json
from types import SimpleNamespace

import pytest
import torch

from common.cli import dispatch
from common.measure import points, throughput
from common.measure.device_run import build
from common.study.predict import sources
from common.training.method import Batch
from common.training.step import DTYPES
from image_classification import probes
from image_classification.benchmark import Benchmark
from image_classification.data.dali import has_dali
from image_classification.probes import BENCH_SIZES_PX, Probes, SyntheticImages, decoder_parts
from tests.image_classification.loading import config_of

GB = 10**9


def test_every_loader_and_decoder_of_this_machine_is_timed_alone():
    config = config_of("optimized", "mini", "global_batch_size=2")
    names = []
    for part in Probes(Benchmark(config, seed=0)).bench_parts():
        part.call()
        assert part.num_samples in (2, 32, 4 * 32)  # decoders work three batches ahead
        names.append(" ".join(part.name.split(",")[0].split()[:2]))
    dali = ["loader dali", "decoder dali"] if has_dali() else []
    expected = ["loader workers", "decoder threads", *dali]
    assert set(expected) == {name for name in names if name.startswith(("loader", "decoder"))}
    assert names[-3:] == ["crop and", "blurred shortcut", "blurred shortcut"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="nvJPEG works there")
def test_a_decoder_that_does_not_work_on_a_gpu_is_left_out(monkeypatch):
    monkeypatch.setattr(probes, "has_dali", lambda: False)
    data = Benchmark(config_of("optimized", "mini"), seed=0).data
    (part,) = decoder_parts(SyntheticImages(), data, torch.device("cuda"))
    assert part.name.startswith("decoder threads")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_crop_and_blur_are_timed_in_the_precision_of_the_step(precision):
    config = config_of("optimized", "mini", "global_batch_size=2", f"precision={precision}")
    *_, crop, _, blur = Probes(Benchmark(config, seed=0)).bench_parts()
    (layer,) = blur.call.__defaults__
    assert crop.call.keywords["dtype"] == layer[1].weight.dtype == DTYPES[precision]


@pytest.mark.on_demand
def test_a_bench_of_the_full_size_ends_with_minutes_and_what_they_assume(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(BENCH_SIZES_PX, "full", (96, 176))
    monkeypatch.setattr(sources, "batch_of", lambda figures, name: 256)  # as if it were a device's share
    name = (
        "optimized+methods.compile=false+methods.ema=false"  # an average of every 20 steps makes turns of 20
    )
    options = ["--batch-size", "1", "--seconds", "0.01", "--results", str(tmp_path)]
    assert dispatch(["bench", "image_classification", name, *options]) == 0
    (path,) = tmp_path.rglob("*.json")
    projected = json.loads(path.read_text())["projected"][name]
    assert projected["minutes"] > 1
    minutes, low, high = (f"{projected[key]:.1f}" for key in ("minutes", "low", "high"))
    line = f"{name}: {minutes} min ({low} to {high}) on 8 of it, {projected['assuming']}"
    assert line in capsys.readouterr().out and "4 evaluations" in line


def test_the_memory_of_a_configuration_is_what_it_takes_beside_the_others(monkeypatch):
    """A stand-in for a GPU's allocator: 5 GB lie there before, a step takes 1 GB for each of its samples."""
    reserved = {"now": 12 * GB, "most": 0}

    def empty():
        reserved["now"] = 7 * GB  # 5 of others, 2 of weights

    def reset():
        reserved["most"] = reserved["now"]

    def step(batch, number):
        reserved["now"] = 7 * GB + batch.num_samples * GB
        reserved["most"] = max(reserved["most"], reserved["now"])

    for name, stand_in in {
        "empty_cache": empty,
        "memory_reserved": lambda: reserved["now"],
        "max_memory_reserved": lambda: reserved["most"],
        "reset_peak_memory_stats": reset,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    batches = {f"{n} px": Batch(inputs={}, targets={}, num_samples=n) for n in (4, 2)}
    probes = SimpleNamespace(
        bench_batches=lambda num_samples: batches,
        phases=lambda: [("4 px", range(50)), ("2 px", range(50, 100))],
        loaded_shape=lambda step: "4 px" if step < 50 else "2 px",
    )
    for module in (throughput, points):
        monkeypatch.setattr(module, "probes_of", lambda benchmark: probes)
    run = SimpleNamespace(
        device=torch.device("cuda"),
        config=SimpleNamespace(global_batch_size=4),
        benchmark=None,
        methods=[],
        plan=SimpleNamespace(num_steps=100),
        train_step=step,
    )
    assert throughput.step_memory(run, 5 * GB) == {"4 px": 6.0, "2 px": 4.0}
    run.device = torch.device("cpu")
    assert throughput.step_memory(run, 0) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_larger_images_take_more_memory_on_a_gpu(tmp_path):
    before = throughput.reserved_bytes()
    config = config_of("baseline", "full", "global_batch_size=16")
    run = build(config, tmp_path)
    memory = throughput.step_memory(run, before)
    run.log.close()
    weights = 3 * 25_557_032 * 4 / 1e9  # gradients and momentum, too
    assert weights < memory["96 px"] < memory["160 px"] < memory["224 px"] < 20
