"""Names of configurations with changes: `baseline+ema`, `optimized-fused_qkv`, `baseline+target=0.7`.

A name begins with a configuration of the benchmark, or with the path of a YAML file. After it `+METHOD` adds
a method and `-METHOD` leaves one out; `+METHOD.KEY=VALUE` changes one setting of a method, which it adds if
it is off; `+KEY=VALUE` changes any other key, as --set does. A method that is added has the settings that
another configuration of the benchmark gives it at this size (the one with the most methods first), else its
defaults; the places that --dry-run prints name that configuration. A value ends at the next plus: write 100
for 1e+2, or use --set.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config.merge import IN_NAME, Setting, mapping, merge_base, merge_files
from common.config.schema import RunConfig
from common.errors import UserError, nearest
from common.repository import available_methods, benchmarks, configurations

METHODS = "methods"
CHANGE = re.compile(
    r"\+(?P<key>[A-Za-z_][\w.]*)=(?P<value>[^+]*)|(?P<sign>[+-])(?P<method>[A-Za-z_]\w*)(?=[+-]|$)"
)


def split_name(benchmark: str, name: str, *, size: str) -> tuple[str, list[str]]:
    """Split a name into a configuration, or the path of its file, and settings as in --set.

    Raises UserError for an unknown configuration or method, and for a change that changes nothing.
    """
    base = find_base(benchmark, name)
    rest = name[len(base) :]
    if not rest:
        return base, []
    known, is_on = available_methods(benchmark), find_active_methods(benchmark, base, size)
    settings: list[str] = []
    here = f"{IN_NAME}{name}"
    while rest:
        change = CHANGE.match(rest)
        if change is None:
            hint = "write NAME+METHOD, NAME-METHOD, NAME+METHOD.KEY=VALUE or NAME+KEY=VALUE"
            raise UserError(f"cannot read '{rest}'", where=name, hint=hint)
        rest = rest[change.end() :]
        key, method = change["key"], change["method"]
        if key and key.removeprefix(f"{METHODS}.").partition(".")[0] not in known:
            settings.append(Setting(f"{key}={change['value']}", here))
            continue
        method, _, inner = (method or key.removeprefix(f"{METHODS}.")).partition(".")
        if method not in known:
            raise unknown_method(method, benchmark, name)
        if change["method"] and (change["sign"] == "+") == (method in is_on):
            hint = f"+{method}.KEY=VALUE changes one of its settings" if method in is_on else ""
            state = "on already" if method in is_on else "not on"
            raise UserError(f"'{method}' is {state} at size {size}", where=name, hint=hint)
        if change["sign"] == "-":
            is_on.discard(method)
            settings.append(Setting(f"{METHODS}.{method}=false", here))
            continue
        if method not in is_on and (inner or not key):
            user, taken = find_settings(benchmark, method, size)
            origin = f"{here}, as {user} has it" if user else here
            settings.append(Setting(f"{METHODS}.{method}={json.dumps(taken)}", origin))
        is_on.add(method)
        if key:
            text = f"{METHODS}.{method}{'.' if inner else ''}{inner}={change['value']}"
            settings.append(Setting(text, here))
    return base, settings


def find_base(benchmark: str, name: str) -> str:
    """Return the longest beginning of a name that is a configuration, or the path of a YAML file."""
    if ".yaml" in name:
        return name[: name.rindex(".yaml") + len(".yaml")]
    known = configurations(benchmark)
    fitting = [base for base in known if name == base or name.startswith((f"{base}+", f"{base}-"))]
    if not fitting:
        hint = nearest(re.split(r"[+-]", name, maxsplit=1)[0], known)
        raise UserError(f"unknown configuration '{name}' of {benchmark}", hint=hint)
    return max(fitting, key=len)


def short_name(name: str) -> str:
    """Return a name as it is shown: for the path of a YAML file its stem, with the changes behind it."""
    path, suffix, changes = name.rpartition(".yaml")
    return f"{Path(path).name}{changes}" if suffix else name


def find_active_methods(benchmark: str, base: str, size: str) -> set[str]:
    methods = mapping(merge_base(benchmark, base, size), METHODS)
    return {name for name, entry in methods.items() if entry is not False}


def find_settings(benchmark: str, method: str, size: str) -> tuple[str, dict[str, Any]]:
    """Find the configuration that gives a method its settings, and them; '' and {} where none uses it."""
    longest_first = sorted(read_methods(benchmark, size).items(), key=lambda item: -len(item[1]))
    return next(((user, methods[method]) for user, methods in longest_first if method in methods), ("", {}))


def read_methods(benchmark: str, size: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Map each configuration to its methods, with their settings at a size.

    A method that the size switches off has its settings of size full.
    """
    methods = {}
    for name in configurations(benchmark):
        full, sized = (
            merge_files(benchmark, name, which).values.get(METHODS) or {} for which in ("full", size)
        )
        methods[name] = {
            method: sized.get(method) or full[method] for method in full if full[method] is not False
        }
    return methods


def find_methods(config: RunConfig, origins: Mapping[tuple[str, ...], str]) -> dict[str, str]:
    """Map each method of a configuration to its module. Raises UserError for an unknown name."""
    modules = available_methods(config.benchmark)
    for name in config.methods:
        if name not in modules:
            where = f"{origins.get((METHODS, name), config.configuration)}: {METHODS}.{name}"
            raise unknown_method(name, config.benchmark, where)
    return {name: modules[name] for name in config.methods}


def unknown_method(name: str, benchmark: str, where: str) -> UserError:
    """Explain an unknown method of a benchmark, which may be one of another benchmark."""
    homes = [other for other in benchmarks() if name in available_methods(other)]
    what = f"method '{name}' belongs to {homes[0]}" if homes else f"no such method '{name}'"
    return UserError(what, where=where, hint="" if homes else nearest(name, available_methods(benchmark)))
