"""What an audit rule is, and the changes of good logs that the rules are tested with."""

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
    """What a rule saw: the line (0: the whole file), a detail, and the log or the other file it concerns."""

    line: int
    text: str
    log: Log | None = None
    path: str = ""


@dataclass(frozen=True)
class Rule:
    """A check of a log, of the logs of a set, of several sets or of a description; a change that it finds.

    `size` is that of the good log that `breaks` changes.
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
    """Register a rule; its docstring is the message."""

    def register(check: Check) -> Check:
        RULES.append(Rule(id, severity, section, check, breaks, size))
        return check

    return register


# Changes to a good log. `at` counts the records of a key.


def replaced(key: str, change: Callable[[str], Lines], at: int = 0) -> Mutation:
    def mutate(lines: Lines) -> Lines:
        index = [i for i, line in enumerate(lines) if f'"key": "{key}"' in line][at]
        return lines[:index] + change(lines[index]) + lines[index + 1 :]

    return mutate


def rewritten(line: str, **fields: object) -> str:
    record: dict[str, Any] = json.loads(line.partition(TOKEN)[2])
    for name, value in fields.items():
        (record if name in record else record["metadata"])[name] = value
    return TOKEN + json.dumps(record)


def edited(key: str, at: int = 0, **fields: object) -> Mutation:
    return replaced(key, lambda line: [rewritten(line, **fields)], at)


def later(key: str, ms: int) -> Mutation:
    return replaced(key, lambda line: [rewritten(line, time_ms=time_of(line) + ms)])


def time_of(line: str) -> int:
    return int(json.loads(line.partition(TOKEN)[2])["time_ms"])


def without(key: str, at: int = 0) -> Mutation:
    return replaced(key, lambda line: [], at)


def each(key: str, change: Callable[[dict[str, Any]], dict[str, object]]) -> Mutation:
    """Give every record of a key the fields that `change` makes of it."""

    def mutate(lines: Lines) -> Lines:
        found = [i for i, line in enumerate(lines) if f'"key": "{key}"' in line]
        records = {i: json.loads(lines[i].partition(TOKEN)[2]) for i in found}
        return [
            rewritten(line, **change(records[i])) if i in records else line for i, line in enumerate(lines)
        ]

    return mutate


def in_turn(*mutations: Mutation) -> Mutation:
    return lambda lines: reduce(lambda changed, mutation: mutation(changed), mutations, lines)


def shifted(key: str, at: int, ms: int) -> Mutation:
    """Let everything from a record on happen later."""

    def mutate(lines: Lines) -> Lines:
        first = [i for i, line in enumerate(lines) if f'"key": "{key}"' in line][at]
        after = [rewritten(s, time_ms=time_of(s) + ms) if TOKEN in s else s for s in lines[first:]]
        return lines[:first] + after

    return mutate


def delayed(key: str, at: int, ms: int) -> Mutation:
    """Let everything from a record of the run on happen later, on both clocks."""
    longer = each("run_stop", lambda r: {"duration_ms": r["metadata"]["duration_ms"] + ms})
    return in_turn(shifted(key, at, ms), longer)


def moved(key: str, *, before: str) -> Mutation:
    def mutate(lines: Lines) -> Lines:
        line = next(line for line in lines if f'"key": "{key}"' in line)
        return replaced(before, lambda other: [line, other])([x for x in lines if x is not line])

    return mutate
