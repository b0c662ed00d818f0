"""Checks values against a pydantic model; an error names file:line and the nearest valid key."""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from common.errors import UserError, nearest

DURATION = r"^[0-9]{1,12}(ep|ba|sp)$"  # epochs, batches or samples
ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(
    model: type[ModelT],
    values: dict[str, Any],
    origins: dict[tuple[str, ...], str],
    prefix: tuple[str, ...] = (),
) -> ModelT:
    """Check values against a model; raises UserError for the first fault: place, key, what was expected."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
        fault = next((entry for entry in faults if entry["type"] == "extra_forbidden"), faults[0])
        inner = tuple(str(part) for part in fault["loc"])
        path = (*prefix, *inner)
        origin = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "")
        key = ".".join(path)
        where = f"{origin}: {key}" if origin else key
        if fault["type"] == "extra_forbidden":
            raise UserError("unknown key", where=where, hint=nearest_key(model, inner)) from None
        value = f" (found {fault['input']!r:.100})" if fault["type"] not in ("missing", "value_error") else ""
        hint = "write it as a fraction, 0.759" if inner == ("target",) else ""
        hint = hint or duration_hint(model, inner, fault["input"])
        what = fault["msg"].removeprefix("Value error, ")
        raise UserError(what[0].lower() + what[1:] + value, where=where, hint=hint) from None


def duration_hint(model: type[BaseModel], path: tuple[str, ...], value: object) -> str:
    """Explain how a duration is written, where the key takes one; '' elsewhere."""
    for name in path:
        if name not in model.model_fields:
            return ""
        field = model.model_fields[name]
        if DURATION in repr(field):
            number = re.match(r"[0-9]{1,6}(?![0-9])", str(value))
            count = number[0] if number else "10"
            return f"write {count}ep, {count}ba or {count}sp: epochs, batches or samples"
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return ""
        model = field.annotation
    return ""


def nearest_key(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """Suggest the nearest key of the same mapping, or the same name in another one."""
    known, name = known_keys(model, path[:-1]), path[-1]
    if name not in known and (elsewhere := [key for key in dotted_keys(model) if key.endswith(f".{name}")]):
        return f"did you mean {elsewhere[0]}?"
    return nearest(name, known)


def dotted_keys(model: type[BaseModel]) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [f"{name}.{key}" for key in dotted_keys(field.annotation)]
    return keys


def known_keys(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    for name in path:
        annotation = model.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
