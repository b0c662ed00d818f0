"""Describes this machine in the fields of an MLPerf system description.

It asks for these fields only: no host name, no user, no address, and of the environment nothing but how many
ranks and nodes a launcher started. Where a source is missing (no lscpu, no NVIDIA driver), its fields state
the reason.
"""

import json
import math
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import cpuinfo
import psutil
import pynvml  # the module of nvidia-ml-py

from common.errors import UserError
from common.evidence.system import FIELDS, NOT_COLLECTED

PERSON = f"{NOT_COLLECTED}a person has to state it"
NO_ANSWER = f"{NOT_COLLECTED}the driver does not tell"
NO_KERNEL_ANSWER = f"{NOT_COLLECTED}the kernel does not tell"
TIMEOUT_S = 10
CPU_CACHES = {"L1d": "l1_data_cache_size", "L2": "l2_cache_size", "L3": "l3_cache_size"}
NVLINK_VERSIONS = {1: "1", 2: "2", 3: "2.2", 4: "3", 5: "3.1", 6: "4", 7: "5", 8: "6"}  # NVML's numbers
NVLINK_SWITCH, NVLINK_ACTIVE = 2, 1
NO_GPU = ("", "-1", "NoDevFiles")  # names in CUDA_VISIBLE_DEVICES that end the list
ACCELERATOR = [field for field in FIELDS if field.startswith("accelerator_")]
PATHS = {  # between two GPUs, by NVML's level of their common ancestor
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "a PCIe host bridge",
    40: "the links inside a NUMA node",
    50: "the links between NUMA nodes",
}


def tool_output(*command: str) -> Any:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def lscpu() -> dict[str, str]:
    """Run `lscpu`; returns its fields at any depth, without the colons."""

    def flat(entries: Any) -> Iterator[tuple[str, str]]:
        for entry in entries if isinstance(entries, list) else []:
            yield str(entry.get("field", "")).rstrip(":"), str(entry.get("data") or "")
            yield from flat(entry.get("children"))

    output = tool_output("lscpu", "-J")
    return dict(flat(output.get("lscpu"))) if isinstance(output, dict) else {}


@cache
def cpu_info() -> dict[str, Any]:
    """Ask py-cpuinfo, which takes a second."""
    return dict(cpuinfo.get_cpu_info())


def processor_name() -> str:
    return str(cpu_info().get("brand_raw") or platform.machine())


def bf16_instructions() -> list[str]:
    """List the processor's instructions that multiply bfloat16 numbers."""
    flags = processor_flags()
    return [name for name in ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16") if name in flags]


@cache
def processor_flags() -> tuple[str, ...]:
    """Read the features of the processor: on Linux from a file, in a millisecond."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        if line := next((line for line in lines if line.startswith(("flags", "Features"))), None):
            return tuple(line.partition(":")[2].split())
    return tuple(cpu_info().get("flags") or ())


def fast_precision() -> str:
    """Return `bf16` where there is a GPU, or a processor with instructions for bfloat16.

    Else `fp32`: BERT's size mini is several times as slow where a processor emulates bfloat16.
    """
    return "bf16" if count_gpus() or bf16_instructions() else "fp32"


def host(storage: Path) -> dict[str, str]:
    """Describe the host; `storage` lies on the disk whose capacity is stated."""
    cpu, listed = cpu_info(), lscpu()
    caches = [f"{level}: {listed[f'{level} cache']}" for level in CPU_CACHES if listed.get(f"{level} cache")]
    caches = caches or [f"{level}: {cpu[key]} bytes" for level, key in CPU_CACHES.items() if key in cpu]
    sockets = listed.get("Socket(s)", "")
    sockets = sockets if sockets.isdecimal() and int(sockets) else str(num_sockets())
    num_nodes = count_nodes()
    return {
        "number_of_nodes": str(num_nodes),
        "host_processors_per_node": sockets,
        "host_processor_model_name": processor_name(),
        "host_processor_core_count": str(psutil.cpu_count(logical=False) or psutil.cpu_count()),
        "host_processor_vcpu_count": str(psutil.cpu_count()),
        "host_processor_frequency": processor_frequency(cpu, listed),
        "host_processor_caches": ", ".join(caches) or NO_KERNEL_ANSWER,
        "host_processor_interconnect": "none: one processor" if sockets == "1" else PERSON,
        "host_memory_capacity": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "host_storage_type": disks(),
        "host_storage_capacity": f"{psutil.disk_usage(str(storage)).total / 2**30:.0f} GiB",
        "host_networking": network(),
        "host_networking_topology": "none: one node" if num_nodes == 1 else PERSON,
        "host_memory_configuration": PERSON,
        "cooling": PERSON,
    }


def count_nodes(environment: Mapping[str, str] = os.environ) -> int:
    """Count the machines of the run that torchrun or srun started this process for; 1 where neither did.

    Without srun a batch script of Slurm starts processes on its own machine alone. Raises UserError for an
    invalid number.
    """
    if "WORLD_SIZE" in environment:
        num_ranks = count_in(environment, "WORLD_SIZE", 1)
        return math.ceil(num_ranks / count_in(environment, "LOCAL_WORLD_SIZE", num_ranks))
    if "SLURM_STEP_NUM_TASKS" in environment:
        return count_in(environment, "SLURM_STEP_NUM_NODES", count_in(environment, "SLURM_NNODES", 1))
    return 1


def count_in(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, str(otherwise))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"'{text}' is not a whole number of 1 or more", where=name)
    return int(text)


def processor_frequency(cpu: dict[str, Any], listed: dict[str, str]) -> str:
    try:
        return f"up to {float(listed['CPU max MHz']):.0f} MHz"
    except (KeyError, ValueError):
        return str(cpu.get("hz_advertised_friendly") or cpu.get("hz_actual_friendly") or NO_KERNEL_ANSWER)


def num_sockets() -> int:
    """Count the processor packages; 1 where the kernel does not say."""
    paths = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    return len({path.read_text().strip() for path in paths}) or 1


def disks() -> str:
    """List the disks by kind and size, such as `2 x NVMe SSD 3576 GiB`."""
    output = tool_output("lsblk", "-J", "-b", "-d", "-o", "NAME,TYPE,SIZE,ROTA,TRAN")
    entries = output.get("blockdevices", []) if isinstance(output, dict) else []
    kinds: Counter[str] = Counter()
    for entry in entries:
        name, size = str(entry.get("name")), entry.get("size")
        if entry.get("type") != "disk" or name.startswith(("zram", "ram")) or not str(size).isdecimal():
            continue
        kind = "SSD" if entry.get("rota") in (False, "0") else "disk (rotating or virtual)"
        kind = "NVMe SSD" if name.startswith("nvme") else kind
        kinds[f"{kind} {int(size) / 2**30:.0f} GiB"] += int(size) > 0
    return counted(kinds) or f"{NOT_COLLECTED}lsblk shows no disk"


def network() -> str:
    """List the network adapters by speed; those without a device (loopback, bridges) do not count."""
    speeds = Counter(
        f"{adapter.speed / 1000:g} Gbit/s"
        for name, adapter in psutil.net_if_stats().items()
        if adapter.speed > 0 and Path("/sys/class/net", name, "device").exists()
    )
    for path in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate")):
        speeds[f"InfiniBand or RoCE {path.read_text(errors='replace').strip()}"] += 1
    return counted(speeds) or f"{NOT_COLLECTED}the kernel tells no speed"


def counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()) if count)


# Accelerators, through NVML, the library beneath nvidia-smi.


def ask_nvml(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an NVML function; returns None where this driver or GPU does not support it."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def gpus() -> list[Any]:
    """Return an NVML handle for each GPU; none without a driver. Raises UserError for one that is lost."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        hint = "nvidia-smi shows what the driver sees; a reboot brings back a GPU that fell off its bus"
        raise UserError(f"a GPU does not answer ({error})", where="NVIDIA driver", hint=hint) from error


def gpu_names() -> list[str]:
    return [pynvml.nvmlDeviceGetName(handle) for handle in gpus()]


def driver() -> dict[str, str]:
    """Return the versions of the NVIDIA driver and of its CUDA; empty without a driver."""
    if not gpus():
        return {}
    answers = {"NVIDIA driver": ask_nvml(pynvml.nvmlSystemGetDriverVersion)}
    if cuda := ask_nvml(pynvml.nvmlSystemGetCudaDriverVersion):
        answers["CUDA driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    return {name: str(version) for name, version in answers.items() if version}


def accelerators() -> dict[str, str]:
    """Describe the GPUs; the first stands for all, but every model is named."""
    handles = gpus()
    if not handles:
        return {"accelerators_per_node": "0"} | dict.fromkeys(ACCELERATOR, "none")
    first = handles[0]
    memory = ask_nvml(pynvml.nvmlDeviceGetMemoryInfo, first)
    interconnect, topology = interconnects(handles)
    return {
        "accelerators_per_node": str(len(handles)),
        "accelerator_model_name": ", ".join(sorted({*map(pynvml.nvmlDeviceGetName, handles)})),
        "accelerator_host_interconnect": filled(
            "PCIe Gen{} x{}",
            ask_nvml(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, first),
            ask_nvml(pynvml.nvmlDeviceGetMaxPcieLinkWidth, first),
        ),
        "accelerator_frequency": filled(
            "up to {} MHz", ask_nvml(pynvml.nvmlDeviceGetMaxClockInfo, first, pynvml.NVML_CLOCK_SM)
        ),
        "accelerator_on-chip_memories": PERSON,
        "accelerator_memory_configuration": filled(
            "{}-bit bus at {} MHz",
            ask_nvml(pynvml.nvmlDeviceGetMemoryBusWidth, first),
            ask_nvml(pynvml.nvmlDeviceGetMaxClockInfo, first, pynvml.NVML_CLOCK_MEM),
        ),
        "accelerator_memory_capacity": filled("{:.0f} GiB", memory.total / 2**30 if memory else None),
        "accelerator_interconnect": interconnect,
        "accelerator_interconnect_topology": topology,
    }


def filled(pattern: str, *values: object) -> str:
    return NO_ANSWER if None in values else pattern.format(*values)


def interconnects(handles: Sequence[Any]) -> tuple[str, str]:
    """Describe the links of a GPU, such as `NVLink 3, 12 links each`, and the topology of all."""
    first, numbers = handles[0], range(pynvml.NVML_NVLINK_MAX_LINKS)
    states = [ask_nvml(pynvml.nvmlDeviceGetNvLinkState, first, number) for number in numbers]
    kind = "none" if len(handles) == 1 else "PCIe"
    if num_links := states.count(NVLINK_ACTIVE):
        link = states.index(NVLINK_ACTIVE)
        version = NVLINK_VERSIONS.get(ask_nvml(pynvml.nvmlDeviceGetNvLinkVersion, first, link), "")
        kind = f"NVLink {version}".strip() + f", {num_links} links each"
        is_switched = ask_nvml(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, first, link) == NVLINK_SWITCH
    if len(handles) == 1:
        return kind, "none: one accelerator"
    if num_links:
        return kind, (
            "all to all through NVSwitch" if is_switched else "NVLink from GPU to GPU, without a switch"
        )
    levels = {ask_nvml(pynvml.nvmlDeviceGetTopologyCommonAncestor, *p) for p in combinations(handles, 2)}
    paths = [path for level, path in PATHS.items() if level in levels]
    return kind, f"through {', '.join(paths)}" if paths else NO_ANSWER


def requested_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by number or UUID; None where it is not set."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = (name.strip() for name in text.split(","))
    return list(takewhile(lambda name: name not in NO_GPU, names))


def count_gpus() -> int:
    """Return how many GPUs a run may use: those that CUDA_VISIBLE_DEVICES names, else all of this machine."""
    names, count = requested_gpus(), len(gpu_names())
    return count if names is None else min(count, len(names))
