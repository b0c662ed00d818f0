"""The build of PyTorch for a machine's NVIDIA driver, and the line that installs it.

A build needs a driver of its major version of CUDA. PyPI's builds are for CUDA 13 (13.2 in torch 2.15). For
CUDA 12 download.pytorch.org has 12.6 up to torch 2.14, for GPUs up to Hopper, and 12.8 up to torch 2.11, with
Blackwell. Sources: "CUDA support matrix" in https://github.com/pytorch/pytorch/issues/178665 (torch 2.12),
/190385 (2.15) and https://github.com/pytorch/pytorch/pull/175253 (architectures, 2.11).
"""

import importlib.util

import pynvml

from common.machine import hardware
from common.repository import install_hint

INDEX = "https://download.pytorch.org/whl"
OLDEST_DRIVER = "update the NVIDIA driver to 525 or newer, which has CUDA 12; 580 has CUDA 13"
BLACKWELL = 10  # major compute capability


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def driver_cuda() -> str:
    """Return the CUDA of the driver, such as 12.8; '' without a driver or GPU."""
    return hardware.driver().get("CUDA driver", "")


def install_line(cuda: str) -> str:
    """Return the line that installs torch and the suite's extras; `cuda` is the driver's, '' without one."""
    if not cuda:
        return install_hint("train")
    major, _, minor = cuda.partition(".")
    if int(major) < 12:
        return OLDEST_DRIVER
    if int(major) > 12:
        index, torch = "cu130", "torch>=2.11"
    elif newest_capability() < BLACKWELL:
        index, torch = "cu126", "torch>=2.11,<2.15"
    elif int(minor or 0) < 8:
        return "update the NVIDIA driver: these GPUs need CUDA 12.8 or newer"
    else:
        index, torch = "cu128", "torch>=2.11,<2.12"
    extras = "train,dali-cu12" if major == "12" else "train,dali"
    return f"pip install '{torch}' torchvision --index-url {INDEX}/{index}, then {install_hint(extras)}"


def newest_capability() -> int:
    """Ask for the highest major compute capability of the GPUs; 0 where the driver does not tell."""
    ask = pynvml.nvmlDeviceGetCudaComputeCapability
    answers = [hardware.ask_nvml(ask, handle) for handle in hardware.gpus()]
    return max((int(answer[0]) for answer in answers if answer), default=0)


def is_for_driver(build: str | None, cuda: str) -> bool:
    """True if torch, built for CUDA `build` (None: CPUs), works with the driver's `cuda` ('': no driver)."""
    return not cuda or (build is not None and int(build.split(".")[0]) <= int(cuda.split(".")[0]))


def dali_package(build: str | None) -> str:
    """Return NVIDIA's package for torch built for CUDA `build`; the one of CUDA 13 for CPUs (None)."""
    return f"nvidia-dali-cuda{'120' if (build or '').startswith('12.') else '130'}"
