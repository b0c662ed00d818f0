"""The line that installs torch for a driver: by drivers that NVML only pretends to have."""

import sys

import pytest

from common.machine import gpus, host, torch_build
from common.machine.line import FAULT, OK, WARNING


def driver(nvml, cuda, capability=(9, 0)):
    nvml(
        2,
        SystemGetDriverVersion="of a test",
        SystemGetCudaDriverVersion=cuda,
        DeviceGetCudaComputeCapability=capability,
    )


@pytest.mark.parametrize(
    ("cuda", "capability", "words"),
    [
        (12040, (8, 0), ["'torch>=2.11,<2.15'", "/cu126,", "'.[train,dali-cu12]'"]),
        (12080, (9, 0), ["'torch>=2.11,<2.15'", "/cu126,", "'.[train,dali-cu12]'"]),
        (12080, (10, 0), ["'torch>=2.11,<2.12'", "/cu128,", "'.[train,dali-cu12]'"]),
        (12040, (10, 0), ["update the NVIDIA driver", "12.8"]),
        (13000, (9, 0), ["'torch>=2.11'", "/cu130,", "'.[train,dali]'"]),
        (13020, (10, 3), ["'torch>=2.11'", "/cu130,", "'.[train,dali]'"]),
        (11080, (8, 0), ["update the NVIDIA driver to 525"]),
    ],
)
def test_the_doctor_prints_the_line_for_the_driver_that_is_there(nvml, monkeypatch, cuda, capability, words):
    driver(nvml, cuda, capability)
    monkeypatch.setitem(sys.modules, "torch", None)
    line = host.versions()
    assert line.state == FAULT and "no torch" in line.found
    assert f"CUDA driver {cuda // 1000}.{cuda % 1000 // 10}" in line.found
    for word in words:
        assert word in line.advice


def test_a_torch_for_another_driver_is_named_with_the_line_for_this_one(nvml, monkeypatch):
    import torch

    driver(nvml, 12040)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    versions, presence = host.versions(), gpus.check_presence("full")
    assert versions.state == WARNING and "torch for CUDA 13.2 needs a newer driver" in versions.found
    assert presence.state == FAULT
    assert all("whl/cu126" in line.advice and "dali-cu12" in line.advice for line in (versions, presence))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch for CPUs alone" in host.versions().found
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert host.versions().state not in (WARNING, FAULT)


def test_without_gpus_any_torch_will_do(nvml):
    nvml(0)
    assert host.versions().state == OK and "'.[train]'" in torch_build.install_line("")


def test_dali_is_named_for_the_cuda_of_torch():
    names = [torch_build.dali_package(build) for build in ("12.6", "13.2", None)]
    assert names == ["nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-dali-cuda130"]
