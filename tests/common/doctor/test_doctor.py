"""`ttt doctor`: faults of data, kernels, trainings and devices are found; a sound machine has none."""

import json
import shutil
import threading

import psutil
import pytest

from common.commands.data import prepare
from common.doctor import devices, first_steps, recipe
from common.errors import UserError
from common.machine import host
from common.machine.line import FAULT, OK, WARNING
from common.repository import ROOT, benchmarks, configurations
from common.training.load import load_config
from tests.command import ttt
from tests.committed import committed_results
from tests.runs import until


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """The data of size mini."""
    for name in benchmarks():
        prepare(load_config(name, "baseline", size="mini", settings=[]).config)


def states(lines):
    return {line.check: line.state for line in lines}


@pytest.fixture
def config(tmp_path):
    """The optimized BERT on a copy of its data."""
    shutil.copytree(ROOT / "data/language_bert/mini", tmp_path / "data")
    return load_config(
        "language_bert", "optimized", size="mini", settings=[f"data.directory={tmp_path / 'data'}"]
    ).config


def test_a_corrupted_byte_of_the_data_is_a_fault_and_none_a_warning_with_the_command(config, tmp_path):
    line, manifest = recipe.check_data(config, committed_results())
    assert line.state in (OK, WARNING) and host.read_rate("bert", tmp_path / "data", manifest).state == OK
    shard = tmp_path / "data/train-00000.shard"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    line, manifest = recipe.check_data(config, committed_results())
    assert (line.state, manifest) == (FAULT, None) and "train-00000.shard: content changed" in line.found
    shutil.rmtree(tmp_path / "data")
    line, _ = recipe.check_data(config, committed_results())
    command = "run: ttt data prepare language_bert --size mini --configuration optimized"
    assert line.state == WARNING and line.advice.startswith(f"{command} --set data.directory=")


def test_a_kernel_that_computes_something_else_is_a_fault(config, monkeypatch):
    assert set(states(recipe.check_kernels(config)).values()) == {OK}
    from language_bert import attention

    def unscaled(query, key, value, sequences, slopes):
        return grouped(1.1 * query, key, value, sequences, slopes)

    grouped = attention.grouped_attention
    monkeypatch.setattr(attention, "grouped_attention", unscaled)
    assert states(recipe.check_kernels(config)) == {"kernel attention": FAULT, "kernel loss in chunks": OK}


def test_a_kernel_that_answers_nothing_but_nan_is_a_fault(config, monkeypatch):
    from language_bert import probes

    def broken(hidden, weight, bias, *others):
        return (hidden.sum() + weight.sum() + bias.sum()) * float("nan")

    monkeypatch.setattr(probes, "chunked_cross_entropy", broken)
    assert states(recipe.check_kernels(config))["kernel loss in chunks"] == FAULT


@pytest.mark.slow
def test_the_loss_of_the_first_steps_lies_in_the_band_and_another_recipes_outside():
    lines = []
    for settings in ([], ["optimizer.learning_rate=1.0e-5"], ["data.max_seq_length=160", "target=0.5"]):
        config = load_config("language_bert", "optimized", size="mini", settings=settings).config
        lines += first_steps.check("loss", config)
    assert [line.state for line in lines] == [OK, FAULT, OK], list(map(str, lines))
    assert "outside the band" in lines[1].found and lines[0].values["samples_per_s"] > 1


def test_each_benchmark_has_bands_of_honest_trainings():
    for benchmark in benchmarks():
        bands = first_steps.read_bands(benchmark)
        assert set(bands) <= set(configurations(benchmark)) and len(bands) >= 2
        for band in bands.values():
            (low, high), (_, first_high) = first_steps.limits(band.last), first_steps.limits(band.first)
            assert len(band.last) == len(band.first) >= 5 and low < min(band.last) < max(band.last) < high
            assert high < first_high  # the training has to have learned something


def test_a_loss_that_is_no_number_lies_in_no_band():
    band = first_steps.read_bands("language_bert")["optimized"]
    taken = first_steps.FirstSteps(first=band.first[0], last=float("nan"), samples_per_s=1.0)
    assert first_steps.compare("loss", taken, band).state == FAULT
    with pytest.raises(UserError, match="no band; ttt doctor --store-bands"):
        first_steps.limits([1.0, 2.0])


def test_the_time_is_that_of_earlier_runs_else_predicted_from_speed_and_samples():
    settings = ["submission.hardware=reference-2cpu"]
    config = load_config("language_bert", "optimized", size="mini", settings=settings).config
    line = recipe.check_minutes(config, committed_results(), None, 1)
    assert line.state == OK and "the median of this system's runs" in line.found
    elsewhere = load_config(
        "language_bert", "optimized", size="mini", settings=["submission.hardware=x"]
    ).config
    predicted = recipe.check_minutes(elsewhere, committed_results(), 1300.0, 1)
    assert predicted.values["minutes"] == pytest.approx(line.values["minutes"], rel=0.3)
    assert recipe.check_minutes(elsewhere, committed_results(), None, 1).state == WARNING
    full = load_config(
        "image_classification", "optimized", size="full", settings=["submission.hardware=x"]
    ).config
    line = recipe.check_minutes(full, committed_results(), None, 8)
    assert line.state == WARNING and "published: 23.8 min on 8x A100 80 GB" in line.found


def measured(*rates, device="H200", **changes):
    ranks = [
        {"device": device, "flops_per_s": rate, "bytes_per_s": rate, "checksum": 7, "reasons": 0}
        | {"clock_mhz": 1900, "max_clock_mhz": 1980}
        for rate in rates
    ]
    return {"ranks": ranks, "backend": "nccl", "bus_bytes_per_s": 2e11, "message_bytes": 2**28} | changes


def test_a_slow_gpu_is_named():
    for rates, state, stragglers in (
        ((7e14, 7.1e14, 6.9e14, 7e14), OK, None),
        ((7e14, 7.1e14, 6.5e14, 7e14), WARNING, [2]),
        ((7e14, 3.1e14, 6.9e14, 7e14), FAULT, [1]),
        ((3e14, 7e14), FAULT, [0]),
        ((3e14,), OK, None),
    ):
        line = devices.compare_rates("product", measured(*rates)["ranks"], "flops_per_s")
        assert (line.state, line.values.get("stragglers")) == (state, stragglers)
        assert all(f"GPU of rank {rank} has" in line.found for rank in stragglers or [])
    line = devices.compare_rates("p", measured(3e11, 1e11, device="cpu")["ranks"], "flops_per_s")
    assert line.state == OK and "0.4 TFLOP/s of this processor's 2 ranks" in line.found


def test_wrong_products_wrong_sums_and_slow_messages_are_told():
    found = measured(1e14, 1e14, 1e14)
    assert devices.check_products(found["ranks"]) == []
    found["ranks"][1]["checksum"] = 8
    (line,) = devices.check_products(found["ranks"])
    assert line.state == FAULT and line.found.startswith("rank 1 computed")
    for changes, state in (
        ({"num_wrong_ranks": 0}, OK),
        ({"num_wrong_ranks": 0, "bus_bytes_per_s": 1e9}, WARNING),
        ({"num_wrong_ranks": 2}, FAULT),
    ):
        assert devices.judge_messages(measured(1e14, 1e14, **changes), 2).state == state


def probes():
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if each.status() != psutil.STATUS_ZOMBIE and "common.doctor.probe" in each.cmdline()
    ]


@pytest.mark.slow
def test_a_rank_that_dies_is_a_fault_and_leaves_nothing(tmp_path):
    lines = []
    thread = threading.Thread(target=lambda: lines.extend(devices.check_devices(2)))
    thread.start()
    (rank_1,) = until(lambda: [probe for probe in probes() if probe.environ().get("RANK") == "1"])
    rank_1.kill()
    thread.join(60)
    assert [line.state for line in lines] == [FAULT] and "SIGKILL" in lines[0].found, lines
    assert probes() == []


@pytest.mark.slow
def test_a_rank_that_hangs_is_a_fault_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(devices, "TIMEOUT_S", 3)  # less than two ranks need to start
    (line,) = devices.check_devices(2)
    assert (line.state, line.found) == (FAULT, "no answer within 3 s: a rank hangs")
    until(lambda: not probes(), seconds=10)


@pytest.mark.slow
def test_a_sound_machine_has_no_fault():
    done = ttt("doctor", "--benchmarks", "language_bert", "--json")
    found = json.loads(done.stdout)
    faults = [line for line in found["lines"] if line["state"] == FAULT]
    assert (done.returncode, found["faults"], faults) == (0, 0, [])
    lines = {line["check"]: line for line in found["lines"]}
    for check in (
        "versions",
        "open files",
        "shared memory",
        "matrix product",
        "device copy",
        "data of language_bert",
        "kernel attention",
        "first steps of language_bert optimized",
        "time of language_bert baseline",
    ):
        assert lines[check]["found"]
    assert lines["all-reduce"]["values"]["bus_bytes_per_s"] > 1e6
    assert lines["all-reduce"]["values"]["num_ranks"] >= 1
