"""Y: the description of a run set's system, systems/<system>.json, and whether its logs agree with it."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from common.evidence.records import finite, printable
from common.evidence.rules.rule import Found, rule
from common.evidence.system import (
    FIELDS,
    STATUS,
    Described,
    are_processors_others,
    field_fault,
    fields_of,
    open_fields,
    problems,
    processor_model,
)

Description = dict[str, Any]


def change(**fields: object) -> Callable[[Description], Description]:
    return lambda description: description | fields


@rule("Y601", "error", "submission rules: directories", breaks=lambda description: [description])
def system_is_described(subject: Described) -> Iterator[Found]:
    """systems/<system>.json is one JSON object."""
    if not isinstance(subject.description, Mapping):
        yield Found(0, subject.why or "another JSON value", path=subject.path)


@rule("Y607", "strict", "RFC 8259: Objects", breaks=lambda description: (description, "written twice"))
def fields_stand_once(subject: Described) -> Iterator[Found]:
    """No field of a system description stands twice."""
    if fields_of(subject) and subject.why:
        yield Found(0, subject.why, path=subject.path)


@rule(
    "Y602",
    "error",
    "logging: system_desc_checker",
    breaks=lambda description: {name: value for name, value in description.items() if name != "cooling"},
)
def every_field_is_there(subject: Described) -> Iterator[Found]:
    """A system description has all 33 fields."""
    return summarize(subject, is_missing=True)


@rule("Y603", "strict", "submission rules: System Description", breaks=change(cooling=""))
def every_field_is_filled(subject: Described) -> Iterator[Found]:
    """Each field of a system description says something, in the type and words that the tools read."""
    return summarize(subject, is_missing=False)


def summarize(subject: Described, *, is_missing: bool) -> Iterator[Found]:
    texts = [text for text in problems(subject.description) if (": missing" in text) == is_missing]
    if fields_of(subject) and texts:
        names = ", ".join(text.partition(":")[0] for text in texts)
        yield Found(0, texts[0] if len(texts) == 1 else f"{len(texts)} of them: {names}", path=subject.path)


@rule(
    "Y608",
    "warning",
    "submission rules: System Description",
    breaks=change(cooling="not collected: a person has to state it"),
)
def no_field_is_open(subject: Described) -> Iterator[Found]:
    """Of a full run set every field is stated; `ttt doctor --describe --missing FILE` lists the open ones."""
    fields = fields_of(subject)
    names = [name for name in open_fields(fields) if name in fields and not field_fault(name, fields[name])]
    if names and not subject.run_set.is_proxy:
        yield Found(0, f"{len(names)} of {len(FIELDS)}: {', '.join(names)}", path=subject.path)


@rule("Y604", "strict", "submission rules: System Description", breaks=change(division="closed"))
def logs_agree_with_the_description(subject: Described) -> Iterator[Found]:
    """Division, organization and status are those of the logs."""
    fields, log = fields_of(subject), subject.run_set.lead
    for field, key in (("division", "division"), ("submitter", "org"), ("status", "status")):
        stated, logged = fields.get(field), log.text(f"submission_{key}")
        if stated is not None and logged and stated not in (logged, STATUS.get(logged)):
            text = f"{field} is {printable(stated, 64)}, submission_{key} in the logs {logged}"
            yield Found(0, text, path=subject.path)


@rule("Y605", "strict", "submission rules: System Description", breaks=change(system_name="another"))
def the_name_is_the_folders(subject: Described) -> Iterator[Found]:
    """system_name is the name of the file and of the results' folder."""
    name, system = fields_of(subject).get("system_name"), subject.run_set.lead.system
    if name is not None and name != system:
        yield Found(0, f"{printable(name, 64)} for {system}", path=subject.path)


@rule("Y606", "strict", "submission rules: System Description", breaks=change(accelerators_per_node="4"))
def accelerators_are_counted(subject: Described) -> Iterator[Found]:
    """The accelerators of all nodes are as many as the system's name says (8xA100...)."""
    fields, named = fields_of(subject), re.match(r"([0-9]{1,5})x", subject.run_set.lead.system)
    counts = [parse_count(fields.get(name)) for name in ("number_of_nodes", "accelerators_per_node")]
    if named and None not in counts and int(named[1]) != (counts[0] or 0) * (counts[1] or 0):
        text = f"{counts[0]} nodes with {counts[1]} for {subject.run_set.lead.system}"
        yield Found(0, text, path=subject.path)


@rule(
    "Y609",
    "warning",
    "submission rules: System Description",
    breaks=change(host_processor_model_name="Another 1234"),
)
def the_processor_is_the_logs(subject: Described) -> Iterator[Found]:
    """The processor of a description is the one that the logs recorded."""
    stated, logged = processor_model(fields_of(subject)), subject.run_set.lead.text("processor")
    if are_processors_others(stated, logged):
        yield Found(0, f"{stated}, in the logs {logged}", path=subject.path)


def parse_count(value: object) -> int | None:
    """Read a count from a number or from text; None for anything else."""
    if isinstance(value, str):
        return int(value) if re.fullmatch("[0-9]{1,6}", value) else None
    number = finite(value)
    return int(number) if number is not None and number.is_integer() else None
