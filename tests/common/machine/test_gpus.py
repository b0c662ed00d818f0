"""Checks of GPUs: sick ones are named, missing ones and Xid errors are faults."""

import pytest

from common.errors import UserError
from common.machine import gpus, hardware
from common.machine.line import FAULT, OK, WARNING
from common.machine.load import gpu_state
from tests.common.machine.conftest import refuse


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
        ({"reasons": 0x4}, OK, "no uncorrected"),
        ({"used": 40 * 2**30}, WARNING, "GPU 2: 40.0 GiB of its memory are in use"),
    ],
    ids=str,
)
def test_a_sick_gpu_is_named_and_only_a_visible_one(sick, monkeypatch, answers, state, found):
    sick(**answers)
    (line,) = gpus.check_health()
    assert line.state == state and line.found.startswith(found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [line.state for line in gpus.check_health()] == [OK]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0f,GPU-2f-7")
    assert list(gpus.visible_gpus()) == ["GPU GPU-0f", "GPU GPU-2f-7"]
    assert [line.state for line in gpus.check_health()] == [state]


def test_a_gpu_that_fell_off_its_bus_is_named(sick, monkeypatch):
    sick()
    monkeypatch.setattr(hardware.pynvml, "nvmlDeviceGetHandleByIndex", refuse)
    with pytest.raises(UserError, match="NVIDIA driver: a GPU does not answer"):
        hardware.count_gpus()


@pytest.mark.parametrize(
    ("num_gpus", "size", "environment", "state", "text"),
    [
        (2, "mini", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, FAULT, "CUDA_VISIBLE_DEVICES asks for 3, 2 are there"),
        (2, "mini", {"CUDA_VISIBLE_DEVICES": "9"}, FAULT, "CUDA_VISIBLE_DEVICES asks for 1, 0 are there"),
        (2, "mini", {"SLURM_GPUS_ON_NODE": "8"}, FAULT, "SLURM_GPUS_ON_NODE asks for 8, 2 are there"),
        (0, "mini", {"CUDA_VISIBLE_DEVICES": ""}, OK, "none"),
        (0, "full", {}, FAULT, "--size mini"),
        (2, "full", {}, FAULT, "2 there, torch reaches 0"),
        (2, "mini", {}, WARNING, "2 there, torch reaches 0"),
    ],
)
def test_gpus_that_are_asked_for_but_not_there_are_a_fault(
    sick, monkeypatch, num_gpus, size, environment, state, text
):
    sick(num_gpus)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    line = gpus.check_presence(size, environment)
    assert line.state == state and text in str(line)


@pytest.mark.parametrize(
    ("num_gpus", "xids", "lines"),
    [
        (4, (79, 79, 31), [(FAULT, "Xid 31, 79 during these checks")]),
        (4, (), [(OK, "none during these checks")]),
        (0, (), []),
    ],
)
def test_xid_errors_during_the_checks_are_a_fault(sick, num_gpus, xids, lines):
    registered = sick(num_gpus, xids=xids)
    with gpus.watch_xids() as watched:
        assert watched == [] and registered == list(range(num_gpus))
    assert [(line.state, line.found) for line in watched] == lines


def test_xid_errors_of_the_hardware_are_read_from_the_kernels_log(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python\n")
    assert gpus.kernel_xids(log).state == OK  # of a program
    log.write_text(log.read_text() + "4,2,3,-;NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.\n")
    line = gpus.kernel_xids(log)
    assert line.state == WARNING and "the last Xid 79 of GPU 0000:5e:00" in line.found
    assert gpus.kernel_xids(tmp_path / "none").state == OK
    log.write_text("4,3,4,-;NVRM: Xid (PCI:0000:5e:00 GPU-I:05 GPU-CI:00): 94, pid=7, name=python\n")
    assert "the last Xid 94 of GPU 0000:5e:00" in gpus.kernel_xids(log).found


def test_messages_that_were_replaced_while_the_log_is_read_are_skipped(tmp_path, monkeypatch):
    answers = [BrokenPipeError(), b"NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.\n", b""]

    def read(descriptor, size):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    (tmp_path / "kmsg").touch()
    monkeypatch.setattr(gpus.os, "read", read)
    assert gpus.kernel_xids(tmp_path / "kmsg").state == WARNING


def test_the_models_are_those_of_the_visible_gpus(nvml, monkeypatch):
    nvml(3)
    monkeypatch.setattr(gpus.pynvml, "nvmlDeviceGetName", lambda gpu: ("GT 1030", "H200", "H200")[gpu])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert str(gpus.check_presence("full", {"CUDA_VISIBLE_DEVICES": "1,2"})) == "GPUs: 2 x H200"


@pytest.mark.parametrize(
    ("programs", "others"), [([1, 2, 3], {"other_processes": 2}), (refuse, {})], ids=["told", "refused"]
)
def test_a_gpu_says_its_clock_its_brakes_and_who_else_is_there(nvml, programs, others):
    clocks = {"DeviceGetClockInfo": 900, "DeviceGetMaxClockInfo": 1980}
    state = {"DeviceGetCurrentClocksThrottleReasons": 0x40, "DeviceGetComputeRunningProcesses": programs}
    nvml(1, DeviceGetHandleByPciBusId=0, **clocks, **state)
    expected = {"clock_mhz": 900, "max_clock_mhz": 1980, "reasons": 0x40} | others
    assert gpu_state("00000000:3b:00.0") == expected
