"""The accelerators of a run set: number, kind, bus and memory, as far as its files state them."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from common.evidence.log import Log, RunSet
from common.evidence.records import finite, printable
from common.evidence.system import describe_set, fields_of, open_reason

KIND = re.compile(r"\b[ABH][0-9]+|Xeon")
MEMORY = re.compile(r"(?<![0-9.])([0-9]+)(?:\.[0-9]+)? ?Gi?B", re.IGNORECASE)
GPU = "(A100|H100|H200|B200)(?![0-9])"  # those of the published sets
NAMED = re.compile(f"(?:(dgx)|([0-9]+)x|x([0-9]+)|[^a-z0-9]|^){GPU}", re.IGNORECASE)
NODES = re.compile(f"^([0-9]+)x(?!{GPU})|_n([0-9]+)(?=_|$)", re.IGNORECASE)
IN_A_DGX = 8


class Devices(NamedTuple):
    """Accelerators of all nodes, or processors where there are none; 0 or '' is unknown."""

    number: int = 0
    kind: str = ""
    bus: str = ""
    memory: str = ""

    def __str__(self) -> str:
        words = (self.kind, self.bus if self.bus == "PCIe" else "", self.memory)
        return f"{self.number or 'unknown '}x {' '.join(word for word in words if word)}"

    def completed_by(self, other: "Devices") -> "Devices":
        number, kind, bus, memory = other
        return Devices(self.number or number, self.kind or kind, self.bus or bus, self.memory or memory)

    def are_others_than(self, other: "Devices") -> bool:
        """True if anything differs that both state."""
        return any(a != b for a, b in zip(self, other, strict=True) if a and b)

    def are_those_of(self, other: "Devices") -> bool:
        """True if number and kind are known, and nothing differs."""
        return bool(self.number and self.kind) and not self.are_others_than(other)


def devices_of(run_set: RunSet) -> Devices:
    """Return the devices by the logs, completed by the description, then by the system's name."""
    described = of_description(fields_of(describe_set(run_set)))
    return of_log(run_set.lead).completed_by(described).completed_by(of_name(run_set.lead.system))


def of_log(log: Log) -> Devices:
    """Read the devices that a log of this suite states."""
    number, model = finite(log.value("num_accelerators")), log.text("device")
    return of_model(int(number), model) if number and number > 0 else Devices()


def of_description(fields: Mapping[str, object]) -> Devices:
    """Read a system's description; a model that nobody stated is left out."""
    part = "accelerator" if read_count(fields, "accelerators_per_node") else "host_processor"
    number = read_count(fields, "number_of_nodes") * read_count(fields, f"{part}s_per_node")
    model = fields.get(f"{part}_model_name")
    stated = Devices(number) if open_reason(model) else of_model(number, printable(model, 64))
    memory = MEMORY.search(str(fields.get(f"{part}_memory_capacity")))
    return stated.completed_by(Devices(memory=f"{memory[1]} GB" if memory else ""))


def of_model(number: int, model: str) -> Devices:
    kind, memory = KIND.search(model), MEMORY.search(model)
    return Devices(number, kind[0] if kind else model, find_bus(model), f"{memory[1]} GB" if memory else "")


def of_name(system: str) -> Devices:
    """Read devices from the name of a system: 8xA100_80GB, dgxh100_n8, 2xXE8545x4A100-SXM-40GB."""
    named = NAMED.search(system)
    if not named:
        return Devices()
    dgx, before, after, kind = named.groups()
    nodes, memory = NODES.search(system), MEMORY.search(system)
    num_nodes = int(nodes[1] or nodes[3]) if nodes else 1
    number = num_nodes * (IN_A_DGX if dgx else int(before or after or 0))
    return Devices(number, kind.upper(), find_bus(system), f"{memory[1]} GB" if memory else "")


def of_text(text: str) -> Devices:
    """Read devices as they are written: 8x A100 PCIe 80 GB. Without a word for the bus it is SXM's."""
    number, _, model = text.partition("x ")
    return of_model(int(number), model)._replace(bus=find_bus(model) or "SXM")


def find_bus(text: str) -> str:
    return next(
        (bus for bus, word in (("PCIe", "PCI"), ("PCIe", "NVL"), ("SXM", "SXM")) if word in text.upper()), ""
    )


def read_count(fields: Mapping[str, object], name: str) -> int:
    number = re.match("[0-9]{1,6}(?![0-9])", str(fields.get(name)))
    return int(number[0]) if number else 0
