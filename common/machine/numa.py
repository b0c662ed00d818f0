"""Binds a rank to the processors beside its GPU, on machines with several NUMA nodes.

Memory that the rank then allocates and pins, and threads and workers that it starts, are on the node of its
GPU; copies to the device do not cross the link between the sockets.
"""

import os
from pathlib import Path
from typing import Any

from common.machine.load import affinity

SYSTEM = Path("/sys")


def bind_near(gpu: Any, system: Path = SYSTEM) -> set[int]:
    """Bind this process to the NUMA node of a GPU; returns its processors, or an empty set.

    `gpu` are torch's properties of the device. Processors that Slurm or a person excluded stay excluded.
    """
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    processors = nearest_processors(address, system) & affinity()
    if processors:
        os.sched_setaffinity(0, processors)
    return processors


def nearest_processors(address: str, system: Path = SYSTEM) -> set[int]:
    """Return the processors of the NUMA node of a PCI device, such as 0000:3b:00.0.

    Empty where the machine has one node, or the kernel does not know the node of the device.
    """
    nodes = system / "devices/system/node"
    if sum(1 for _ in nodes.glob("node[0-9]*")) < 2:
        return set()
    try:
        number = int((system / "bus/pci/devices" / address / "numa_node").read_text())  # -1: not known
        return parse_processors((nodes / f"node{number}" / "cpulist").read_text())
    except (OSError, ValueError):
        return set()


def parse_processors(text: str) -> set[int]:
    """Parse the kernel's list of processors, such as `0-15,32-47`. Raises ValueError."""
    processors = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        processors.update(range(int(first), int(last or first) + 1) if part else ())
    return processors
