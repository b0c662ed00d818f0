"""Strict YAML: plain data only, every key with its file and line.

`yaml.safe_load` alone would read `5e-4` as text, `12:30` as 750, `no` as false, and let a repeated key win
silently.
"""

import json
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError

SCALARS = (
    (re.compile(r"null|~|"), lambda text: None),
    (re.compile(r"true|false"), lambda text: text == "true"),
    (re.compile(r"[-+]?[0-9]{1,18}"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
)
MAX_DEPTH = 12
MAX_CHARACTERS = 1 << 18  # PyYAML reads 0.1 to 1 MB/s; the largest configuration has 5 KB


class NoAliases(yaml.SafeLoader):
    """Refuses `*name`: a few lines of aliases can stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=mark)
        return super().compose_node(parent, index)


@dataclass(frozen=True, slots=True)
class Document:
    """Plain values, and for each key path (a tuple of names) where it was written."""

    values: dict[str, Any]
    origins: dict[tuple[str, ...], str]


def read(path: Path, source: str) -> Document:
    """Read a file as `parse` does. Raises UserError, too, for a pipe or device, which may never end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError("is not a regular file", where=source)
        with path.open("rb") as file:
            content = file.read(4 * MAX_CHARACTERS + 1)  # of UTF-8, at most 4 bytes each
        return parse(content.decode("utf-8"), source)
    except FileNotFoundError as error:
        raise UserError("no such file", where=source) from error
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=source) from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError("is not UTF-8 text", where=f"{source}:{line}") from error


def parse(text: str, source: str) -> Document:
    """Parse one YAML mapping; `source` names it in messages. Raises UserError with source:line."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"has more than {MAX_CHARACTERS:,} characters", where=source)
    try:
        root = yaml.compose(text, Loader=NoAliases)
    except RecursionError:
        raise UserError("nested too deeply", where=source) from None
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF"
        raise UserError(f"not YAML: {error}", where=source) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise UserError(f"not YAML: {getattr(error, 'problem', error)}", where=where) from error
    if root is None:
        return Document({}, {})
    if not isinstance(root, yaml.MappingNode):
        raise UserError("expected `key: value` lines", where=f"{source}:1")
    origins: dict[tuple[str, ...], str] = {}
    return Document(_value(root, (), source, origins), origins)


def parse_head(lines: Iterable[str]) -> dict[str, Any] | None:
    """Parse the mapping in the lines of a log's head; None if they hold anything else."""
    try:
        return parse("\n".join(lines), "").values
    except UserError:
        return None


def scalar(text: str) -> Any:
    """Convert a plain scalar by the rules of YAML 1.2."""
    return next((convert(text) for pattern, convert in SCALARS if pattern.fullmatch(text)), text)


def spell(value: object) -> str:
    """Write a plain value as a person types it after --set."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _value(node: yaml.Node, path: tuple[str, ...], source: str, origins: dict[tuple[str, ...], str]) -> Any:
    where = f"{source}:{node.start_mark.line + 1}"
    origins[path] = where
    if len(path) > MAX_DEPTH:
        raise UserError("nested too deeply", where=where)
    if isinstance(node, yaml.ScalarNode):
        return scalar(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, str(i)), source, origins) for i, item in enumerate(node.value)]
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value
        line = f"{source}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError("a key must be a name", where=line)
        if key in values:
            raise UserError(f"'{key}' is written twice", where=line)
        values[key] = _value(value_node, (*path, key), source, origins)
    return values
