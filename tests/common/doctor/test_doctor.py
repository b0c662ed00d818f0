"""`ttt doctor`: faults of data, kernels, trainings and devices are found; a sound machine has none."""

import itertools
import json
import shutil
import threading

import psutil
import pytest

from common.doctor import checks, devices, first_steps
from common.errors import UserError
from common.machine import host, system
from common.machine.line import FAULT, OK, WARNING
from common.machine.load import Load
from common.repository import ROOT, benchmarks, configurations
from common.training.load import load_config
from tests.command import ttt
from tests.committed import committed_results
from tests.runs import until

pytestmark = pytest.mark.usefixtures("prepared_data", "no_record")


def load(benchmark, *settings, size="mini"):
    return load_config(benchmark, "optimized", size=size, settings=list(settings)).config


@pytest.fixture
def config(tmp_path):
    """The optimized BERT on a copy of its data."""
    shutil.copytree(ROOT / "data/language_bert/mini", tmp_path / "data")
    return load("language_bert", f"data.directory={tmp_path / 'data'}")


def test_a_corrupted_byte_of_the_data_is_a_fault_and_none_a_warning_with_the_command(config, tmp_path):
    line, manifest = checks.check_data(config, committed_results())
    assert line.state in (OK, WARNING) and host.read_rate("bert", tmp_path / "data", manifest).state == OK
    shard = tmp_path / "data/train-00000.shard"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    line, manifest = checks.check_data(config, committed_results())
    assert (line.state, manifest) == (FAULT, None) and "train-00000.shard: content changed" in line.found
    shutil.rmtree(tmp_path / "data")
    line, _ = checks.check_data(config, committed_results())
    command = "run: ttt data prepare language_bert --size mini --configuration optimized"
    assert line.state == WARNING and line.advice.startswith(f"{command} --set data.directory=")


def test_a_kernel_that_computes_something_else_or_nan_is_a_fault(config, monkeypatch):
    from language_bert import attention, probes

    def states():
        return {line.check.removeprefix("kernel "): line.state for line in checks.check_kernels(config)}

    def unscaled(query, *others):
        return grouped(1.1 * query, *others)

    def broken(hidden, weight, bias, *others):
        return (hidden.sum() + weight.sum() + bias.sum()) * float("nan")

    losses = ("loss in chunks, float32", "loss in chunks, bfloat16")
    assert set(states().values()) == {OK}
    grouped = attention.grouped_attention
    monkeypatch.setattr(attention, "grouped_attention", unscaled)
    assert states() == {"attention": FAULT} | dict.fromkeys(losses, OK)
    monkeypatch.setattr(probes, "chunked_cross_entropy", broken)
    assert states() == {"attention": FAULT} | dict.fromkeys(losses, FAULT)


@pytest.mark.on_demand
def test_the_loss_of_the_first_steps_lies_in_the_band_and_another_recipes_outside():
    lines = []
    for settings in ([], ["optimizer.learning_rate=1.0e-5"], ["data.max_seq_length=160", "target=0.5"]):
        lines += first_steps.check("loss", load("language_bert", *settings))
    assert [line.state for line in lines] == [OK, FAULT, OK], list(map(str, lines))
    assert "outside the band" in lines[1].found and lines[0].values["samples_per_s"] > 1


def test_each_benchmark_has_bands_of_honest_trainings_and_no_other_number_lies_in_them():
    for benchmark in benchmarks():
        bands = first_steps.read_bands(benchmark)
        assert set(bands) <= set(configurations(benchmark)) and len(bands) >= 2
        for band in bands.values():
            (low, high), (_, first_high) = first_steps.limits(band.last), first_steps.limits(band.first)
            assert len(band.last) == len(band.first) >= 5 and low < min(band.last) < max(band.last) < high
            assert high < first_high  # the training has to have learned something
            for last, state in ((band.last[0], OK), (1.01 * high, FAULT), (float("nan"), FAULT)):
                taken = first_steps.FirstSteps(first=band.first[0], last=last, samples_per_s=1.0)
                assert first_steps.compare("loss", taken, band).state == state
    with pytest.raises(UserError, match="no band; ttt doctor --size mini --store-bands"):
        first_steps.limits([1.0, 2.0])


def test_a_benchmark_without_bands_is_told_how_to_get_them_and_gets_them(tmp_path, monkeypatch):
    monkeypatch.setattr(first_steps, "ROOT", tmp_path)
    losses = itertools.count()
    monkeypatch.setattr(
        first_steps,
        "train_first_steps",
        lambda config, **_: first_steps.FirstSteps(first=next(losses), last=1.0, samples_per_s=1.0),
    )
    (tmp_path / "language_bert").mkdir()
    named = checks.load_configs(["language_bert"], "mini")["language_bert"]
    with pytest.raises(UserError, match="no band; ttt doctor --size mini --store-bands"):
        first_steps.limits(first_steps.read_bands("language_bert")["optimized"].last)
    first_steps.store("language_bert", named, 3)
    bands = first_steps.read_bands("language_bert")
    assert [*bands] == configurations("language_bert") and bands["baseline"].first == [0, 1, 2]


@pytest.mark.parametrize("text", ['{"size": "full", "projected": {"optimized": 5}}', "{}", "[" * 100_000])
def test_damaged_figures_of_a_bench_are_named_in_one_line(text, tmp_path):
    path = tmp_path / "throughput" / system.hardware_name() / "language_bert_0.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(UserError, match="language_bert_0.json: no(t the expected)? figures"):
        checks.predict_from_bench("minutes", load("language_bert", size="full"), tmp_path, 1)
    path.write_text('{"size": "full", "projected": {"optimized": {"minutes": 10.0, "assuming": "much"}}}')
    line = checks.predict_from_bench("minutes", load("language_bert", size="full"), tmp_path, 1)
    assert line.found == "80.0 min on 1 device, much"


def test_the_time_is_that_of_earlier_runs_else_predicted_from_speed_and_samples():
    def line(benchmark, hardware, samples_per_s=None, others=0.0, size="mini"):
        config = load(benchmark, f"submission.hardware={hardware}", size=size)
        return checks.check_minutes(config, committed_results(), samples_per_s, 8, Load(2, others, 0.0))

    measured, predicted = line("language_bert", "reference-2cpu"), line("language_bert", "nowhere", 1300.0)
    assert measured.state == OK and "the median of this system's runs" in measured.found
    assert predicted.values["minutes"] == pytest.approx(measured.values["minutes"], rel=0.3)
    assert line("language_bert", "nowhere").state == WARNING
    images = line("image_classification", "nowhere", 270.0)  # at 56 px, most of the training is at 84
    assert 1.5 < images.values["minutes"] / (3_500 / 270 / 60) < 2.5
    published = line("image_classification", "nowhere", size="full")
    assert published.state == WARNING and "published: 23.8 min on 8x A100 80 GB" in published.found
    busy, slow = line("language_bert", "nowhere", 1290.0, others=1.3), line("language_bert", "nowhere", 60.0)
    assert busy.state == WARNING and "1.3 of 2 cores" in busy.advice
    assert slow.state == WARNING and "21.7 times as fast" in slow.found


def measured(*rates, device="H200", **changes):
    ranks = [
        {"device": device, "flops_per_s": rate, "bytes_per_s": rate, "checksum": 7, "reasons": 0}
        | {"clock_mhz": 1900, "max_clock_mhz": 1980}
        for rate in rates
    ]
    return {"ranks": ranks, "backend": "nccl", "bus_bytes_per_s": 2e11, "message_bytes": 2**28} | changes


@pytest.mark.parametrize(
    ("device", "rates", "state", "text"),
    [
        ("H200", (7e14, 7.1e14, 6.9e14, 7e14), OK, "700 710 690 700 TFLOP/s"),
        ("H200", (7e14, 7.1e14, 6.5e14, 7e14), WARNING, "GPU of rank 2 has 93%"),
        ("H200", (7e14, 3.1e14, 6.9e14, 7e14), FAULT, "GPU of rank 1 has 44%"),
        ("H200", (3e14, 7e14), FAULT, "GPU of rank 0 has"),
        ("H200", (3e14,), OK, "one H200 has nothing to compare"),
        ("cpu", (3e11, 1e11), OK, "0.4 TFLOP/s of this processor's 2 ranks"),
    ],
)
def test_a_slow_gpu_is_named(device, rates, state, text):
    line = devices.check_rates("product", measured(*rates, device=device)["ranks"], "flops_per_s")
    assert line.state == state and text in line.found
    assert ("stragglers" in line.values) == (state != OK)
    if state == OK:  # half of this machine's best is a warning
        halved = measured(*(rate / 2 for rate in rates), device=device)["ranks"]
        assert devices.check_rates("product", halved, "flops_per_s").state == WARNING


def test_wrong_products_wrong_sums_and_slow_messages_are_told():
    ranks = measured(1e14, 1e14, 1e14)["ranks"]
    assert devices.check_products(ranks) == []
    ranks[1]["checksum"] = 8
    (line,) = devices.check_products(ranks)
    assert line.state == FAULT and line.found.startswith("rank 1 computed")
    for num_wrong, per_s, state in ((0, 2e11, OK), (0, 1e9, WARNING), (2, 2e11, FAULT)):
        messages = measured(1e14, 1e14, num_wrong_ranks=num_wrong, bus_bytes_per_s=per_s)
        assert devices.judge_messages(messages, 2).state == state


def probes():
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and "common.doctor.probe" in process.cmdline()
    ]


@pytest.mark.on_demand
def test_a_rank_that_dies_is_a_fault_and_leaves_nothing():
    lines = []
    thread = threading.Thread(target=lambda: lines.extend(devices.check_devices(2)))
    thread.start()
    (rank_1,) = until(lambda: [probe for probe in probes() if probe.environ().get("RANK") == "1"])
    rank_1.kill()
    thread.join(60)
    assert [line.state for line in lines] == [FAULT] and "SIGKILL" in lines[0].found, lines
    assert probes() == []


@pytest.mark.on_demand
def test_a_rank_that_hangs_is_a_fault_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(devices, "TIMEOUT_S", 3)  # less than two ranks need to start
    (line,) = devices.check_devices(2)
    assert (line.state, line.found) == (FAULT, "no answer within 3 s: a rank hangs, or needs longer")
    until(lambda: not probes(), seconds=10)


@pytest.mark.on_demand
def test_a_sound_machine_has_no_fault():
    done = ttt("doctor", "--benchmarks", "language_bert", "--size", "mini", "--json")
    answer = json.loads(done.stdout)
    faults = [line for line in answer["lines"] if line["state"] == FAULT]
    assert (done.returncode, answer["faults"], faults) == (0, 0, [])
    lines = {line["check"]: line for line in answer["lines"]}
    general = {"versions", "open files", "shared memory", "matrix product", "device copy", "all-reduce"}
    benchmark = {"data of language_bert", "kernel attention", "first steps of language_bert optimized"}
    assert lines.keys() >= general | benchmark | {"time of language_bert baseline"}
    assert all(line["found"] for line in lines.values())
    assert lines["all-reduce"]["values"]["bus_bytes_per_s"] > 1e6
    assert lines["all-reduce"]["values"]["num_ranks"] >= 1
