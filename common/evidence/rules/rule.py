"""Audit rules, and the changes of good logs that they are tested with."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from common.evidence.log import Log
from common.evidence.records import TOKEN

Lines = list[str]
Mutation = Callable[[Lines], Lines]


class Found(NamedTuple):
    """A place that breaks a rule: the line (0: the whole file), a detail, and the log or other file."""

    line: int
    text: str
    log: Log | None = None
    path: str = ""


@dataclass(frozen=True)
class Rule:
    """A check of a log, of the logs of a set, of several sets or of a description.

    `breaks` changes a good log, of this `size`, so that the check finds it.
    """

    id: str
    severity: str
    section: str
    check: Callable[[Any], Iterator[Found]]
    breaks: Callable[[Any], Any]
    size: str = "full"

    @property
    def message(self) -> str:
        return (self.check.__doc__ or "").rstrip(".")


RULES: list[Rule] = []
Check = TypeVar("Check", bound=Callable[[Any], Iterator[Found]])


def rule(
    id: str, severity: str, section: str, *, breaks: Callable[[Any], Any], size: str = "full"
) -> Callable[[Check], Check]:
    """Register a check as a rule; its docstring is the message."""

    def register(check: Check) -> Check:
        RULES.append(Rule(id, severity, section, check, breaks, size))
        return check

    return register


# Changes to a good log. `at` counts the records of a key.


def replace_record(key: str, change: Callable[[str], Lines], at: int = 0) -> Mutation:
    def mutate(lines: Lines) -> Lines:
        index = place_of(lines, key, at)
        return lines[:index] + change(lines[index]) + lines[index + 1 :]

    return mutate


def has_key(line: str, key: str) -> bool:
    return f'"key": "{key}"' in line


def place_of(lines: Lines, key: str, at: int = 0) -> int:
    return [index for index, line in enumerate(lines) if has_key(line, key)][at]


def record_of(line: str) -> dict[str, Any]:
    return dict(json.loads(line.partition(TOKEN)[2]))


def first_record(lines: Lines, key: str) -> dict[str, Any]:
    return record_of(lines[place_of(lines, key)])


def time_of(line: str) -> int:
    return int(record_of(line)["time_ms"])


def rewrite(line: str, **fields: object) -> str:
    record = record_of(line)
    for name, value in fields.items():
        (record if name in record else record["metadata"])[name] = value
    return TOKEN + json.dumps(record)


def edit(key: str, at: int = 0, **fields: object) -> Mutation:
    return replace_record(key, lambda line: [rewrite(line, **fields)], at)


def add(name: str, /, at: int = 0, **fields: object) -> Mutation:
    """Put a copy with other fields behind a record."""
    return replace_record(name, lambda line: [line, rewrite(line, **fields)], at)


def scale(key: str, factor: float, at: int = 0) -> Mutation:
    return replace_record(key, lambda line: [rewrite(line, value=record_of(line)["value"] * factor)], at)


miss_target = edit("eval_accuracy", at=-1, value=0.7, correct=35000)  # of resnet


PLAN = {  # of the evaluations of a good log, of resnet at size full
    "max_duration": "20ep",
    "evaluate_every": "4ep",
    "global_batch_size": 2048,
    "data": "{num_train_samples: 1281167}",
}


def state(**settings: object) -> Mutation:
    """Let the head of a log state a configuration."""
    head = ["# --- configuration", *(f"#   {key}: {value}" for key, value in settings.items()), "# ---"]
    return lambda lines: [*head, *lines]


def shift_record(key: str, ms: int) -> Mutation:
    return replace_record(key, lambda line: [rewrite(line, time_ms=time_of(line) + ms)])


def remove(key: str, at: int = 0) -> Mutation:
    return replace_record(key, lambda line: [], at)


def edit_all(key: str, change: Callable[[dict[str, Any]], dict[str, object]]) -> Mutation:
    """Give every record of a key the fields that `change` makes of it."""
    return lambda lines: [
        rewrite(line, **change(record_of(line))) if has_key(line, key) else line for line in lines
    ]


def chain(*mutations: Mutation) -> Mutation:
    return lambda lines: reduce(lambda change, mutation: mutation(change), mutations, lines)


def shift_from(key: str, at: int, ms: int) -> Mutation:
    """Move everything from a record on to a later time."""

    def mutate(lines: Lines) -> Lines:
        first = place_of(lines, key, at)
        return lines[:first] + retime(lines[first:], lambda time_ms: time_ms + ms)

    return mutate


def retime(lines: Lines, change: Callable[[int], int]) -> Lines:
    return [rewrite(line, time_ms=change(time_of(line))) if TOKEN in line else line for line in lines]


def delay_run(key: str, at: int, ms: int) -> Mutation:
    """Move everything from a record of the run on to a later time, on both clocks."""
    longer = edit_all("run_stop", lambda r: {"duration_ms": r["metadata"]["duration_ms"] + ms})
    return chain(shift_from(key, at, ms), longer)


def move(key: str, *, before: str) -> Mutation:
    def mutate(lines: Lines) -> Lines:
        line = lines[place_of(lines, key)]
        return replace_record(before, lambda other: [line, other])([x for x in lines if x is not line])

    return mutate
