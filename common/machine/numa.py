"""Binds a rank to the processors beside its GPU, on machines with several NUMA nodes.

What the rank allocates and pins from then on, and the threads and workers that it starts, are on the node to
which its GPU is attached; copies to the device do not cross the link between the sockets.
"""

import os
from pathlib import Path
from typing import Any

from common.machine.load import affinity

SYSTEM = Path("/sys")


def bind_near(gpu: Any, system: Path = SYSTEM) -> set[int]:
    """Bind this process to the NUMA node of a GPU; returns its processors, or an empty set.

    `gpu` are torch's properties of the device. Processors that Slurm or a person took away stay away.
    """
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    processors = nearest_processors(address, system) & affinity()
    if processors:
        os.sched_setaffinity(0, processors)
    return processors


def nearest_processors(address: str, system: Path = SYSTEM) -> set[int]:
    """Return the processors of the NUMA node of a PCI device, such as 0000:3b:00.0.

    Empty where the kernel does not know the node of the device: it has no file, or says -1.
    """
    try:
        number = (system / "bus/pci/devices" / address / "numa_node").read_text().strip()
    except OSError:
        return set()
    processors = (system / f"devices/system/node/node{number}").glob("cpu[0-9]*")
    return {int(path.name.removeprefix("cpu")) for path in processors}
