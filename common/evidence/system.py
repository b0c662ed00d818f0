"""Read and judge a system description: MLPerf's 33 fields, none of them empty.

The official checker asks only that the fields exist, and crashes on seven of them when they are not text; the
summarizer crashes on two that are not whole numbers. Everything here answers with a line instead.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from common.errors import nearest
from common.evidence.records import TOO_DEEP, finite, has_many_brackets, printable, read_bytes, unique

FIELDS = (
    "submitter",
    "division",
    "status",
    "system_name",
    "number_of_nodes",
    "host_processors_per_node",
    "host_processor_model_name",
    "host_processor_core_count",
    "host_processor_vcpu_count",
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "host_memory_capacity",
    "host_storage_type",
    "host_storage_capacity",
    "host_networking",
    "host_networking_topology",
    "host_memory_configuration",
    "accelerators_per_node",
    "accelerator_model_name",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_memory_capacity",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
    "cooling",
    "hw_notes",
    "framework",
    "other_software_stack",
    "operating_system",
    "sw_notes",
)
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


def field_fault(field: str, value: object) -> str:
    """Return what is wrong with the value of one field; '' for nothing."""
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
    """Return what a JSON file holds. Raises ValueError, in one line, for whatever cannot be read safely.

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
        return json.loads(text, object_pairs_hook=hook, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} in line {error.lineno}") from error


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def file_problems(path: Path) -> list[str]:
    """Return a line for each fault of a description file: unreadable, fields, another name than its own."""
    try:
        description = read(path)
    except ValueError as error:
        return [printable(str(error))]
    faults = problems(description)
    name = description.get("system_name") if isinstance(description, dict) else None
    if isinstance(name, str) and name != path.stem:
        faults.append(f"system_name: '{printable(name, 64)}', but the file is {printable(path.name, 72)}")
    return faults
