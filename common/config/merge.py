"""Merges the YAML files of a configuration, and settings from the command line."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from common import yaml_file
from common.config.schema import RunConfig
from common.errors import UserError, nearest
from common.repository import NAME, ROOT, configurations, hide_folders

MAX_EXTENDS = 2
SET, IN_NAME = "--set", "in the name "  # origins of what a person has typed


class Setting(str):
    """A setting as in --set, with the `origin` that messages name."""

    origin: str

    def __new__(cls, text: str, origin: str) -> "Setting":
        setting = super().__new__(cls, text)
        setting.origin = origin
        return setting


def is_asked(origin: str | None) -> bool:
    """True for the origin of a key that a person has set on the command line."""
    return origin is not None and origin.startswith((SET, IN_NAME))


def merge_files(benchmark: str, configuration: str, size: str) -> yaml_file.Document:
    chain: list[yaml_file.Document] = []
    of_mini: list[yaml_file.Document] = []
    name: Any = configuration
    where = benchmark
    while name:
        if len(chain) > MAX_EXTENDS:
            what = f"goes too deep: a chain has at most {MAX_EXTENDS} of them, and no circle"
            raise UserError(what, where=where)
        document = read(benchmark, name, where)
        where = f"{document.origins.get(('extends',), '')}: extends"
        chain.append(document)
        of_mini.append(pop_section(document, "mini"))
        name = document.values.pop("extends", None)
    merged = yaml_file.Document({}, {})
    for document in reversed(chain):
        merge(merged, document)
    if size == "mini":
        overlay = read(benchmark, size)
        adjusted, on = mapping(overlay, "methods"), mapping(merged, "methods")
        overlay.values["methods"] = {
            name: adjusted[name] for name in adjusted if on.get(name, False) is not False
        }
        for document in (overlay, *reversed(of_mini)):
            merge(merged, document)
    return merged


def pop_section(document: yaml_file.Document, name: str) -> yaml_file.Document:
    """Take a mapping out of a document, as a document of its own; empty if it has none."""
    values = mapping(document, name)
    document.values.pop(name, None)
    places = [path for path in document.origins if path[:1] == (name,)]
    origins = {path[1:]: document.origins.pop(path) for path in places}
    return yaml_file.Document(values, origins)


def mapping(document: yaml_file.Document, key: str) -> dict[str, Any]:
    value = document.values.get(key) or {}
    if not isinstance(value, dict):
        raise UserError("expected `name: settings` lines", where=f"{document.origins.get((key,), '')}: {key}")
    return value


def read(benchmark: str, name: Any, where: str = "") -> yaml_file.Document:
    """Read a file of a benchmark's folder, which is named at `where`."""
    if not isinstance(name, str):
        raise UserError("expected one name, `extends: NAME`", where=where)
    path = ROOT / benchmark / f"{name}.yaml"
    if not NAME.fullmatch(name) or not path.is_file():
        hint = nearest(name, configurations(benchmark))
        raise UserError(f"no such file '{name}.yaml'", where=where or benchmark, hint=hint)
    return yaml_file.read(path, f"{benchmark}/{name}.yaml")


def read_path(path: Path) -> tuple[yaml_file.Document, str]:
    """Read a file outside the benchmarks' folders; returns also the configuration that it extends."""
    if not NAME.fullmatch(path.stem):
        raise UserError(f"a configuration is named after its file: {NAME.pattern}", where=str(path))
    document = yaml_file.read(path, str(path))
    if "mini" in document.values:
        what = "a file outside of the benchmark's folder has no values of one size"
        raise UserError(what, where=document.origins["mini",], hint="write them without `mini:`")
    base = document.values.pop("extends", None)
    if not isinstance(base, str):
        raise UserError("must name a configuration: `extends: NAME`", where=str(path))
    return document, base


def merge_base(benchmark: str, base: str, size: str) -> yaml_file.Document:
    """Merge a configuration, or the file of a path over the configuration that it extends.

    Raises UserError for an unknown configuration.
    """
    document, configuration = read_path(Path(base)) if base.endswith(".yaml") else (None, base)
    if configuration not in configurations(benchmark):
        hint = nearest(configuration, configurations(benchmark))
        raise UserError(f"unknown configuration '{configuration}' of {benchmark}", hint=hint)
    merged = merge_files(benchmark, configuration, size)
    if document:
        merge(merged, document)
    return merged


def parse_setting(setting: str) -> yaml_file.Document:
    """Turn `optimizer.learning_rate=0.1` into a document with that one key."""
    source = setting.origin if isinstance(setting, Setting) else SET
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(
            f"{source} {setting}: expected key=value", hint="for example --set global_batch_size=64"
        )
    path = tuple(key.split("."))
    document = yaml_file.parse(f"value: {text}", source)
    value = document.values["value"]
    origins = {(*path, *inner[1:]): source for inner in document.origins if inner}
    for name in reversed(path):
        value = {name: value}
    return yaml_file.Document(value, origins)


def merge(under: yaml_file.Document, over: yaml_file.Document) -> None:
    """Lay the document `over` on `under`, in place, with the origins of its keys."""

    def lay(below: dict[str, Any], above: dict[str, Any]) -> None:
        for key, value in above.items():
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                lay(below[key], value)
            else:
                below[key] = value

    lay(under.values, over.values)
    under.origins.update(over.origins)


def extend(base: str, settings: Iterable[str], head: str) -> str:
    """Return the YAML file that lays settings, as in --set, over a configuration or over a file's path."""
    merged = yaml_file.Document({}, {})
    if base.endswith(".yaml"):
        document, base = read_path(Path(base))
        merge(merged, document)
    for setting in settings:
        merge(merged, parse_setting(setting))
    return f"{head}\n" + yaml.safe_dump({"extends": base} | merged.values, sort_keys=False, width=100)


def to_yaml(config: RunConfig) -> str:
    """Return a configuration as logs state it: without folders of this machine."""
    return hide_folders(as_yaml(config.stated()))


def as_yaml(values: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)
    return text
