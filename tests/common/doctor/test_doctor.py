"""`ttt doctor`: real faults are found and said, and `ttt run` refuses them unless it is forced."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from common.commands.data import prepare
from common.doctor import devices, first_steps, recipe
from common.errors import UserError
from common.machine import gpus, host
from common.machine.line import FAULT, OK, WARNING
from common.repository import ROOT, benchmarks, configurations
from common.training.load import load_config
from tests.committed import committed_results

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
TTT = [sys.executable, "-m", "common.cli"]
TINY = ("max_duration=20ba", "evaluate_every=10ba", "evaluate_from=10ba", "schedule.warmup=5ba")
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """The data of size mini."""
    for name in benchmarks():
        prepare(load_config(name, "baseline", size="mini", settings=[]).config)


def run(*command, timeout=120):
    command = list(map(str, command))
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False
    )


def states(lines):
    return {line.check: line.state for line in lines}


# The host.


def on_a_small_disk(folder, script, *arguments):
    """Run a shell script where `folder` is a disk of 2 MiB, which ends with it."""
    if run("unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=2m", "none", folder).returncode:
        pytest.skip("this system mounts nothing for a user")
    mount = f'mount -t tmpfs -o size=2m none "{folder}" && {script}'
    return run("unshare", "-rm", "sh", "-c", mount, "sh", *arguments)


@pytest.mark.slow
def test_a_run_is_refused_on_a_full_disk_and_forced_says_so_in_its_log(tmp_path):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    sets = [part for setting in (*TINY, "target=0.01") for part in ("--set", setting)]
    where = ["--results", disk / "results", "--systems", tmp_path / "systems"]
    command = [*TTT, "run", "language_bert", "optimized", "--size", "mini", *where, *sets]
    done = on_a_small_disk(disk, '"$@"; code=$?; ls -R . > /dev/null; exit $code', *command)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: room for results: 2.0 MiB free at ") and line.endswith("with --force")
    assert not (tmp_path / "systems").exists()
    keep = f'"$@"; code=$?; cp -r "{disk}" "{kept}"; exit $code'
    done = on_a_small_disk(disk, keep, *command, "--force")
    assert done.returncode == 0, done.stderr
    (path,) = kept.rglob("result_0.txt")
    text = path.read_text()
    assert "\n# preflight: fault, forced: room for results: 2.0 MiB free" in text
    assert '"status": "success"' in text
    audit = run(*TTT, "check", path)
    assert audit.returncode == 0, audit.stdout


def test_a_full_or_unwritable_folder_is_a_fault(tmp_path):
    assert host.space("results", tmp_path / "not/there/yet").state == OK
    file = tmp_path / "file"
    file.touch()
    line = host.space("results", file / "results")
    assert line.state == FAULT and "cannot be written (Not a directory)" in line.found
    assert os.listdir(tmp_path) == ["file"]
    code = f"""
import pathlib
from common.machine import host
pathlib.Path({str(tmp_path)!r}, "filler").write_bytes(bytes(3 * 2**19))
print(host.space("results", pathlib.Path({str(tmp_path)!r})))
"""
    done = on_a_small_disk(tmp_path, '"$@"', sys.executable, "-c", code)
    assert "cannot be written (No space left on device)" in done.stdout, done.stderr


@pytest.mark.slow
def test_few_open_files_are_a_fault_with_what_to_type():
    limited = run("sh", "-c", 'ulimit -n 100; exec "$@"', "sh", *TTT, "doctor", "--quick", "--json")
    assert limited.returncode == 1, limited.stderr
    found = json.loads(limited.stdout)
    (line,) = [line for line in found["lines"] if line["state"] == FAULT]
    assert line["check"] == "open files" and line["values"]["limit"] == 100
    assert line["advice"] == "ulimit -n 1024, for which the hard limit has to be raised"
    assert found["faults"] == 1


def test_little_shared_memory_is_a_fault_for_full_size(tmp_path):
    code = f"""
import pathlib
from common.machine import host
print([host.shared_memory(size, pathlib.Path({str(tmp_path)!r})).state for size in ("full", "mini")])
"""
    assert "['fault', 'warning']" in on_a_small_disk(tmp_path, '"$@"', sys.executable, "-c", code).stdout
    assert host.shared_memory("full", tmp_path / "none").state == OK


def test_shared_memory_that_holds_no_batch_is_a_fault_for_workers_of_size_mini(tmp_path):
    code = f"""
import pathlib
from common.machine import host
place = pathlib.Path({str(tmp_path)!r})
print([host.shared_memory("mini", place, is_needed=needed).state for needed in (True, False)])
"""
    assert "['fault', 'warning']" in on_a_small_disk(tmp_path, '"$@"', sys.executable, "-c", code).stdout


# Data, kernels, first steps, time.


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


# Processes.


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
    deadline = time.monotonic() + 60
    while not (found := [each for each in probes() if each.environ().get("RANK") == "1"]):
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(found[0].pid, signal.SIGKILL)
    thread.join(60)
    assert [line.state for line in lines] == [FAULT] and "SIGKILL" in lines[0].found, lines
    assert probes() == []


@pytest.mark.slow
def test_a_rank_that_hangs_is_a_fault_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(devices, "TIMEOUT_S", 3)  # less than two ranks need to start
    (line,) = devices.check_devices(2)
    assert (line.state, line.found) == (FAULT, "no answer within 3 s: a rank hangs")
    deadline = time.monotonic() + 10
    while probes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert probes() == []


@pytest.mark.slow
def test_a_sound_machine_has_no_fault():
    done = run(*TTT, "doctor", "--benchmarks", "language_bert", "--json", timeout=170)
    found = json.loads(done.stdout)
    assert (done.returncode, found["faults"]) == (0, 0), [
        line for line in found["lines"] if line["state"] == FAULT
    ]
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


# GPUs, as NVML tells of them.


class FakeNVML(SimpleNamespace):
    """NVML's module with four GPUs; `changes` are what it answers for one of them."""

    class NVMLError(Exception):
        pass

    nvmlClocksThrottleReasonApplicationsClocksSetting = 0x2
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, num_gpus=4, sick=2, xids=(), **changes):
        usual = {"ecc": 0, "rows": (0, 0, 0, 0), "reasons": 0x4, "used": 2**28} | changes

        def told(name, usual_value):
            return lambda gpu, *_: usual[name] if gpu == sick else usual_value

        self.registered, pending = [], list(xids)
        super().__init__(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: num_gpus,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetName=lambda gpu: "NVIDIA H200",
            nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}f-7",
            nvmlDeviceGetTotalEccErrors=told("ecc", 0),
            nvmlDeviceGetRemappedRows=told("rows", (0, 0, 0, 0)),
            nvmlDeviceGetCurrentClocksThrottleReasons=told("reasons", 1),
            nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=told("used", 2**28)(gpu)),
            nvmlSystemGetDriverVersion=lambda: "580.1",
            nvmlSystemGetCudaDriverVersion=lambda: 13000,
            nvmlEventSetCreate=lambda: "events",
            nvmlDeviceRegisterEvents=lambda gpu, kind, events: self.registered.append(gpu),
            nvmlEventSetWait_v2=lambda events, timeout_ms: self.next_event(pending),
            nvmlEventSetFree=lambda events: None,
        )

    def next_event(self, pending):
        if not pending:
            raise self.NVMLError("timeout")
        return SimpleNamespace(eventData=pending.pop(0))


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(**answers):
        fake = FakeNVML(**answers)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


@pytest.mark.parametrize(
    ("answers", "state", "found"),
    [
        ({}, OK, "no uncorrected memory error"),
        ({"ecc": 3}, FAULT, "GPU 2: 3 uncorrected memory errors (ECC)"),
        ({"rows": (0, 1, 0, 1)}, FAULT, "GPU 2: a memory row could not be remapped"),
        ({"rows": (0, 1, 1, 0)}, WARNING, "GPU 2: a memory row waits"),
        ({"reasons": 0x48}, FAULT, "GPU 2: too hot"),
        ({"reasons": 0x88}, FAULT, "GPU 2: braked by its power supply"),
        ({"reasons": 0x8}, FAULT, "GPU 2: slowed down by its hardware"),
        ({"reasons": 0x20}, WARNING, "GPU 2: slowed down by its temperature"),
        ({"reasons": 0x2}, WARNING, "GPU 2: its clocks are set below"),
        ({"used": 40 * 2**30}, WARNING, "GPU 2: 40.0 GiB of its memory are in use"),
    ],
    ids=str,
)
def test_a_sick_gpu_is_named_and_only_a_visible_one(nvml, monkeypatch, answers, state, found):
    nvml(**answers)
    (line,) = gpus.check_health()
    assert line.state == state and line.found.startswith(found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [line.state for line in gpus.check_health()] == [OK]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0f,GPU-2f-7")
    assert list(gpus.visible_gpus()) == ["GPU GPU-0f", "GPU GPU-2f-7"]
    assert [line.state for line in gpus.check_health()] == [state]


def test_gpus_that_are_asked_for_but_not_there_are_a_fault(nvml, monkeypatch):
    nvml(num_gpus=2)
    for environment, found in (
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, "CUDA_VISIBLE_DEVICES asks for 3, 2 are there"),
        ({"CUDA_VISIBLE_DEVICES": "9"}, "CUDA_VISIBLE_DEVICES asks for 1, 0 are there"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE asks for 8, 2 are there"),
    ):
        line = gpus.check_presence("mini", environment)
        assert (line.state, line.found) == (FAULT, found)
    nvml(num_gpus=0)
    assert gpus.check_presence("mini", {"CUDA_VISIBLE_DEVICES": ""}).state == OK
    line = gpus.check_presence("full", {})
    assert line.state == FAULT and "--size mini" in line.advice
    nvml(num_gpus=2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for size, state in (("full", FAULT), ("mini", WARNING)):
        line = gpus.check_presence(size, {})
        assert (line.state, line.found) == (state, "2 there, torch reaches 0")


def test_xid_errors_during_the_checks_are_a_fault(nvml):
    fake = nvml(xids=(79, 79, 31))
    with gpus.watch_xids() as lines:
        assert lines == []
    assert fake.registered == [0, 1, 2, 3]
    assert (lines[0].state, lines[0].found) == (FAULT, "Xid 31, 79 during these checks")
    nvml()
    with gpus.watch_xids() as lines:
        pass
    assert lines[0].state == OK
    nvml(num_gpus=0)
    with gpus.watch_xids() as lines:
        pass
    assert lines == []


def test_xid_errors_of_the_hardware_are_read_from_the_kernels_log(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python\n")
    assert gpus.kernel_xids(log).state == OK  # of a program
    log.write_text(log.read_text() + "4,2,3,-;NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.\n")
    line = gpus.kernel_xids(log)
    assert line.state == WARNING and "the last Xid 79 of GPU 0000:5e:00" in line.found
    assert gpus.kernel_xids(tmp_path / "none").state == OK
