"""Checks of GPUs on a fake NVML: sick ones are named, missing ones and Xid errors are faults."""

import sys
from types import SimpleNamespace

import pytest

from common.machine import gpus
from common.machine.line import FAULT, OK, WARNING


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
