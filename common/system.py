"""This machine, in the fields of an MLPerf system description."""

import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import cpuinfo
import psutil

from common.config import NAME, ROOT, RunConfig
from common.errors import UserError

NOT_COLLECTED = "not collected: a person has to state it"
NO_ACCELERATOR = "none"
PERSONAL = (  # fields that no program can know
    "host_processor_interconnect",
    "host_networking",
    "host_networking_topology",
    "host_memory_configuration",
    "host_storage_type",
    "cooling",
)
ACCELERATOR = (
    "accelerator_model_name",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_memory_capacity",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
)
FRAMEWORK = ("torch", "torchvision", "transformers", "tokenizers", "mlperf-logging")


def accelerators() -> list[str]:
    """Return the names of the GPUs that the NVIDIA driver shows."""
    import pynvml  # the module of nvidia-ml-py

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: no GPU
        return []
    count = pynvml.nvmlDeviceGetCount()
    return [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]


def hardware_name() -> str:
    """Return a short name of the hardware, such as `2cpu-EPYC` or `1xH200`."""
    gpus = accelerators()
    if gpus:
        return f"{len(gpus)}x{short_name(gpus[0])}"
    return (
        f"{psutil.cpu_count()}cpu-{short_name(cpuinfo.get_cpu_info().get('brand_raw', platform.machine()))}"
    )


def short_name(model: str) -> str:
    """Return what tells one processor from another: `AMD EPYC 7513 32-Core Processor` -> `EPYC-7513`."""
    words = re.sub(r"\((R|TM)\)|@.*|\d+-Core", " ", model).split()
    dropped = {"AMD", "Intel", "NVIDIA", "CPU", "Processor", "Graphics"}
    name = "-".join(word for word in words if word not in dropped)
    return re.sub(r"[^A-Za-z0-9._-]", "", name)[:32] or "unknown"


def system_id(config: RunConfig) -> str:
    """Return `<hardware>[-mini]-<configuration>`, the name of the system and of its folder in results."""
    size = "-mini" if config.size == "mini" else ""
    hardware = config.submission.hardware
    name = f"{hardware_name() if hardware == 'auto' else hardware}{size}-{config.configuration}"
    if not NAME.fullmatch(name):
        raise UserError(f"system name '{name}' is not {NAME.pattern}", where="submission.hardware")
    return name


def versions() -> dict[str, str]:
    """Return the versions of what a run depends on."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in FRAMEWORK}


def describe(config: RunConfig) -> dict[str, Any]:
    """Return the system description; what cannot be collected says so instead of staying empty."""
    cpu, gpus = cpuinfo.get_cpu_info(), accelerators()
    caches = [f"{level}: {cpu[key]} bytes" for level, key in CACHES.items() if key in cpu]
    frequency = cpu.get("hz_advertised_friendly") or cpu.get("hz_actual_friendly")
    software = versions()
    return {
        "submitter": config.submission.org,
        "division": "open",
        "status": "Research, Development, or Internal (RDI)",
        "system_name": system_id(config),
        "number_of_nodes": "1",
        "host_processors_per_node": str(num_sockets()),
        "host_processor_model_name": cpu.get("brand_raw", NOT_COLLECTED),
        "host_processor_core_count": str(psutil.cpu_count(logical=False) or psutil.cpu_count()),
        "host_processor_vcpu_count": str(psutil.cpu_count()),
        "host_processor_frequency": frequency or NOT_COLLECTED,
        "host_processor_caches": ", ".join(caches) or NOT_COLLECTED,
        "host_memory_capacity": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "host_storage_capacity": f"{psutil.disk_usage(str(ROOT)).total / 2**30:.0f} GiB",
        **dict.fromkeys(PERSONAL, NOT_COLLECTED),
        "accelerators_per_node": str(len(gpus)),
        **dict.fromkeys(ACCELERATOR, NOT_COLLECTED if gpus else NO_ACCELERATOR),
        **({"accelerator_model_name": gpus[0]} if gpus else {}),
        "hw_notes": "size mini: a proxy, not a submission" if config.size == "mini" else "",
        "framework": f"PyTorch {software['torch']}",
        "other_software_stack": ", ".join(f"{name} {version}" for name, version in software.items()),
        "operating_system": f"{platform.system()} {platform.release()}",
        "sw_notes": "",
    }


CACHES = {"L1d": "l1_data_cache_size", "L2": "l2_cache_size", "L3": "l3_cache_size"}


def num_sockets() -> int:
    """Return the number of processor packages; 1 where the kernel does not tell."""
    packages = set()
    for cpu in range(psutil.cpu_count() or 1):
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")
        if path.is_file():
            packages.add(path.read_text().strip())
    return len(packages) or 1


def write_description(config: RunConfig, directory: Path) -> Path:
    """Write `<system id>.json` once; an existing one is a person's and stays as it is."""
    path = directory / f"{system_id(config)}.json"
    if not path.exists():
        description = json.dumps(describe(config), indent=4) + "\n"
        temporary = path.with_suffix(".json.part")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            temporary.write_text(description)
        except OSError as error:
            what = f"cannot write system descriptions here ({error.strerror})"
            raise UserError(what, where=str(directory)) from error
        os.replace(temporary, path)
    return path
