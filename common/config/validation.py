"""Checks values against a pydantic model; an error names file:line and the nearest valid key."""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from common.errors import UserError, nearest

DURATION = r"^[0-9]{1,12}(ep|ba|sp)$"  # epochs, batches or samples
EXTEND = "a configuration may take it from another one: `extends: baseline`"
ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(
    model: type[ModelT],
    values: dict[str, Any],
    origins: dict[tuple[str, ...], str],
    prefix: tuple[str, ...] = (),
) -> ModelT:
    """Check values against a model; raises UserError with place, key and expectation of the first fault."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
        fault = next((entry for entry in faults if entry["type"] == "extra_forbidden"), faults[0])
        inner = tuple(str(part) for part in fault["loc"])
        path = (*prefix, *inner)
        origin = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "")
        key = ".".join(path)
        lacks_key = fault["type"] == "missing" and not prefix  # the configuration, and so in no line of it
        where = f"{origin}: {key}" if origin and not lacks_key else key
        if fault["type"] == "extra_forbidden":
            raise UserError("unknown key", where=where, hint=nearest_key(model, inner)) from None
        value = f" (found {fault['input']!r:.100})" if fault["type"] not in ("missing", "value_error") else ""
        hint = "write it as a fraction, 0.759" if inner == ("target",) else ""
        hint = (
            EXTEND
            if lacks_key
            else hint or method_hint(fault["type"], key) or duration_hint(model, inner, fault["input"])
        )
        what = fault["msg"].removeprefix("Value error, ")
        raise UserError(what[0].lower() + what[1:] + value, where=where, hint=hint) from None


def method_hint(fault: str, key: str) -> str:
    """Say what to type for a method with a value instead of settings."""
    is_method = fault == "dict_type" and key.startswith("methods.")
    return f"`{key}={{}}` turns it on with its defaults, `{key}=false` turns it off" if is_method else ""


def duration_hint(model: type[BaseModel], path: tuple[str, ...], value: object) -> str:
    """Explain how a duration is written, where the key takes one; '' elsewhere."""
    fields = fields_of(model)
    if not any(DURATION in repr(fields.get(path[:n])) for n in range(1, len(path) + 1)):
        return ""
    number = re.match(r"[0-9]{1,6}(?![0-9])", str(value))
    count = number[0] if number else "10"
    return f"write {count}ep, {count}ba or {count}sp: epochs, batches or samples"


def nearest_key(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """Suggest the nearest key of the same mapping, or the same name in another one."""
    fields, name = fields_of(model), path[-1]
    known = [key[-1] for key in fields if key[:-1] == path[:-1]]
    elsewhere = [".".join(key) for key in fields if key[-1] == name and len(key) > 1]
    return f"did you mean {elsewhere[0]}?" if elsewhere and name not in known else nearest(name, known)


def fields_of(model: type[BaseModel], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], FieldInfo]:
    """Map the path of each key, at any depth, to its field."""
    fields = {}
    for name, field in model.model_fields.items():
        fields[*above, name] = field
        if inner := model_of(field):
            fields |= fields_of(inner, (*above, name))
    return fields


def model_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a key that holds a mapping of keys."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
