"""Read and judge a system description: MLPerf's 33 fields, none of them empty.

The official checker asks only that the fields exist, and crashes on seven of them when they are not text; the
summarizer crashes on two that are not whole numbers. The functions here return a line of text instead.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from common import yaml_file
from common.errors import UserError, nearest
from common.evidence.log import Log, RunSet
from common.evidence.paths import label
from common.evidence.records import TOO_DEEP, finite, has_many_brackets, printable, read_bytes, unique

EXAMPLES = {  # MLPerf's fields, each with an example or the source that tells it
    "submitter": "the name of your organization",
    "division": "open",
    "status": "Available on-premise",
    "system_name": "8xA100-SXM4-80GB",
    "number_of_nodes": "1",
    "host_processors_per_node": "2",
    "host_processor_model_name": "AMD EPYC 7513 32-Core Processor",
    "host_processor_core_count": "64",
    "host_processor_vcpu_count": "128",
    "host_processor_frequency": "up to 3650 MHz",
    "host_processor_caches": "L1d 32 KiB and L2 512 KiB a core, L3 128 MiB; lscpu tells",
    "host_processor_interconnect": "xGMI; none with one processor",
    "host_memory_capacity": "2 TB",
    "host_storage_type": "NVMe SSD; lsblk -d -o NAME,ROTA,TRAN,SIZE tells",
    "host_storage_capacity": "8 x 3.84 TB",
    "host_networking": "8 x InfiniBand NDR 400 Gb/s; ibstat or ethtool tells",
    "host_networking_topology": "fat tree; none with one node",
    "host_memory_configuration": "16 x 64 GB DDR4-3200; sudo dmidecode -t memory tells",
    "accelerators_per_node": "8",
    "accelerator_model_name": "NVIDIA A100-SXM4-80GB",
    "accelerator_host_interconnect": "PCIe Gen4 x16",
    "accelerator_frequency": "up to 1410 MHz",
    "accelerator_on-chip_memories": "L1 192 KB each, L2 40 MB; the data sheet tells",
    "accelerator_memory_configuration": "HBM2e, 5120-bit bus; the data sheet tells",
    "accelerator_memory_capacity": "80 GB",
    "accelerator_interconnect": "NVLink 3, 12 links each",
    "accelerator_interconnect_topology": "all to all through NVSwitch; nvidia-smi topo -m tells",
    "cooling": "air, or liquid",
    "hw_notes": "none",
    "framework": "PyTorch 2.15.0",
    "other_software_stack": "CUDA 13.0, NCCL 2.27, driver 580.65",
    "operating_system": "Ubuntu 24.04",
    "sw_notes": "none",
}
FIELDS = tuple(EXAMPLES)
ALSO_KNOWN = ("system_type", "host_network_card_count")  # in the rules' text, unknown to the checker
NOT_COLLECTED = "not collected: "  # and why
STATUS = {  # of a log -> of a description; the names that every ruleset takes
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "research": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
CHOICES = {"division": ("open", "closed"), "status": tuple(STATUS.values())}
TEXT = {  # the official tools crash on anything else
    "submitter",
    "system_name",
    "host_processor_model_name",
    "host_processor_core_count",
    "accelerator_model_name",
    "accelerators_per_node",
    "framework",
    "hw_notes",
    "sw_notes",
}
COUNTS = {"number_of_nodes": 1, "host_processors_per_node": 1, "accelerators_per_node": 0}  # at least
PLACEHOLDER = re.compile(
    r"PLACEHOLDER|\b(TODO|TBD|FIXME|X{3,}|CHANGE_?ME|FILL_?(IN|ME)|LOREM)\b|<[a-z][^<>]*>|\?\?\?",
    re.IGNORECASE,
)
OPEN = re.compile(
    r"(not[ _]collected|unknown|not known|to be filled)\b.*|not (stated|specified|available)\.?"
    r"|null|tbc|default string|[-.?]+",
    re.IGNORECASE | re.DOTALL,
)  # values that state nothing
GENERIC = frozenset(["r", "tm", "cpu", "processor", "core", "with", "amd", "intel"])  # of most processors
SUCH_AS = "<such as "  # begins the placeholder of `missing_lines`
INSTRUCTIONS = ("capability", "bf16_instructions")  # of the record of a processor
MAX_BYTES = 2**20
MAX_LENGTH = 4000  # characters of one value


def problems(description: object) -> list[str]:
    """Return a line for each field that is missing, empty, of a wrong type or a placeholder. Never raises."""
    if not isinstance(description, Mapping):
        return ["not a JSON object of fields"]
    faults = [f"{field}: missing" for field in FIELDS if field not in description]
    for name, value in description.items():
        if name not in FIELDS and name not in ALSO_KNOWN:
            faults.append(f"{printable(name, 64)}: unknown field; {nearest(printable(name, 64), FIELDS)}")
        elif fault := field_fault(name, value):
            faults.append(f"{name}: {fault}")
    return faults


def are_processors_others(name: str, other: str) -> bool:
    """True if two names have no word in common but those of most processors.

    A virtual machine's "AMD EPYC" can be an "AMD EPYC 7513 32-Core Processor". A name without words fits all.
    """
    words, others = ({*re.findall("[a-z0-9]+", text.lower())} - GENERIC for text in (name, other))
    return bool(words and others) and words.isdisjoint(others)


def processor_model(fields: Mapping[str, object]) -> str:
    """Return the processor of a description, safe to show; '' where nobody stated it."""
    model = fields.get("host_processor_model_name")
    return printable(model, 64) if isinstance(model, str) and not open_reason(model) else ""


def open_fields(description: object) -> dict[str, str]:
    """Return field -> why a person still has to state it: missing, empty, a placeholder, 'not collected'."""
    fields = description if isinstance(description, Mapping) else {}
    reasons = {field: open_reason(fields[field]) if field in fields else "missing" for field in FIELDS}
    return {field: reason for field, reason in reasons.items() if reason}


def open_reason(value: object) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        return "empty"
    is_open = isinstance(value, str) and (OPEN.fullmatch(value.strip()) or PLACEHOLDER.search(value))
    return printable(value, 80) if is_open else ""


def missing_lines(description: object) -> list[str]:
    """Return a line of YAML for each open field, with an example in a placeholder that has to be replaced."""
    return [
        f"{field}: {SUCH_AS}{EXAMPLES[field]}>  # {why}" for field, why in open_fields(description).items()
    ]


def field_fault(field: str, value: object) -> str:
    """Return the fault of a field's value; '' for none."""
    if field == "other_software_stack" and isinstance(value, Mapping) and value:
        faults = (_text_fault(part) for pair in value.items() for part in pair)
        return next((fault for fault in faults if fault), "")
    if isinstance(value, int | float) and not isinstance(value, bool) and field not in TEXT:
        if (number := finite(value)) is None:
            return "not a usable number"
        value = str(int(number) if number.is_integer() else number)  # 1.0 counts as 1
    if fault := _text_fault(value):
        return fault
    text = str(value)
    if field in CHOICES and text not in CHOICES[field]:
        return f"'{printable(text, 64)}' is not one of: {'; '.join(CHOICES[field])}"
    if field in COUNTS and not (re.fullmatch("[0-9]{1,6}", text) and int(text) >= COUNTS[field]):
        return f"'{printable(text, 64)}' is not a whole number from {COUNTS[field]} on"
    return ""


def _text_fault(value: object) -> str:
    if not isinstance(value, str):
        return f"must be text, found {type(value).__name__}"
    if not value.strip():
        return f"empty; say what it is, or '{NOT_COLLECTED}<why>'"
    if len(value) > MAX_LENGTH:
        return f"longer than {MAX_LENGTH} characters"
    if not all(c.isprintable() or c == "\n" for c in value):
        return "holds control characters"
    if word := PLACEHOLDER.search(value):
        return f"holds a placeholder, '{printable(word.group(), 40)}'"
    if value.strip().rstrip(":") == NOT_COLLECTED.strip().rstrip(":"):
        return f"say why: '{NOT_COLLECTED}<why>'"
    return ""


def read(path: Path, *, takes_repeated: bool = False) -> object:
    """Return the value in a JSON file. Raises ValueError, in one line, for a file that is not safe to read.

    With `takes_repeated` the last value of a field counts, as for the official tools.
    """
    data = read_bytes(path, MAX_BYTES)
    if data.startswith(b"\xef\xbb\xbf"):
        raise ValueError("starts with a byte order mark, on which the official checker crashes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    if has_many_brackets(text):
        raise ValueError(TOO_DEEP)
    hook = dict if takes_repeated else unique
    try:
        return json.loads(text, object_pairs_hook=hook, parse_constant=_no_constant, parse_int=_short_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} in line {error.lineno}") from error


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _short_integer(text: str) -> int:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a number has more than {MAX_LENGTH} digits")
    return int(text)


def file_problems(path: Path) -> list[str]:
    """Return a line for each fault of a description file: unreadable, a field's, not named as the system.

    Raises UserError for a file that the system does not open.
    """
    try:
        description = read(path)
    except ValueError as error:
        if isinstance(error.__cause__, OSError):
            raise UserError(str(error), where=printable(str(path))) from error
        return [printable(str(error))]
    faults = problems(description)
    name = description.get("system_name") if isinstance(description, dict) else None
    if isinstance(name, str) and name != path.stem:
        faults.append(f"system_name: '{printable(name, 64)}', but the file is {printable(path.name, 72)}")
    return faults


def read_fields(path: Path, *, hint: str = "") -> dict[str, object]:
    """Return the fields of a description as `read` does. Raises UserError for any other file."""
    try:
        values = read(path)
    except ValueError as error:
        raise UserError(printable(str(error)), where=str(path), hint=hint) from error
    if not isinstance(values, dict):
        raise UserError("not a JSON object of fields", where=str(path), hint=hint)
    return values


def read_facts(path: Path) -> dict[str, object]:
    """Read the fields that a person stated, from YAML or JSON, without those still open.

    Raises UserError with file:line for an unknown one.
    """
    if path.suffix == ".json":
        document = yaml_file.Document(read_fields(path), {})
    else:
        document = yaml_file.read(path, str(path))
    for field in document.values:
        if field not in FIELDS and field not in ALSO_KNOWN:
            where = document.origins.get((field,), str(path))
            raise UserError(f"unknown field '{field}'", where=where, hint=nearest(field, FIELDS))
    return {
        field: str(value) if type(value) in (int, float) else value  # a person writes `cores: 64`
        for field, value in document.values.items()
        if not str(value).startswith((NOT_COLLECTED, SUCH_AS))
    }


class Described(NamedTuple):
    """A run set, its description, and what is wrong with the file. `path` is a label."""

    run_set: RunSet
    path: str
    description: object
    why: str = ""


def describe_set(run_set: RunSet) -> Described | None:
    """Return a run set with its description; None where no folder systems/ lies with the results."""
    folder = run_set.systems_folder
    if folder is None or not folder.is_dir():
        return None
    return read_description(folder / f"{run_set.lead.folders[0]}.json", run_set)


def read_description(path: Path, run_set: RunSet) -> Described:
    """Return a run set with the description in a file, or why it cannot be read."""
    why = ""
    for takes_repeated in (False, True):
        try:
            return Described(run_set, label(path), read(path, takes_repeated=takes_repeated), why)
        except ValueError as error:
            why = why or str(error)
    return Described(run_set, label(path), None, why)


def fields_of(subject: Described | None) -> Mapping[str, object]:
    return subject.description if subject and isinstance(subject.description, Mapping) else {}


def processor_of(run_set: RunSet) -> str:
    """Name the processor that trained, by log or description; '' on accelerators or if neither states it."""
    if run_set.lead.value("num_accelerators") != 0:
        return ""
    return run_set.lead.text("processor") or processor_model(fields_of(describe_set(run_set)))


def instructions_of(log: Log) -> str:
    """Return what a log recorded of the instructions of its processor, safe to show; '' without a record."""
    event = log.first("processor")
    stated = [event.metadata[name] for name in INSTRUCTIONS if name in event.metadata] if event else []
    return printable(stated) if stated else ""
