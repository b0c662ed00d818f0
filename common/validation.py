"""Values checked against a pydantic model; what is wrong is told with file:line and the nearest valid key."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from common.errors import UserError, nearest

ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(
    model: type[ModelT],
    values: dict[str, Any],
    origins: dict[tuple[str, ...], str],
    prefix: tuple[str, ...] = (),
) -> ModelT:
    """Return the checked model, or raise UserError for the first fault: where, key, what was expected."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
        fault = next((each for each in faults if each["type"] == "extra_forbidden"), faults[0])
        inner = tuple(str(part) for part in fault["loc"])
        path = (*prefix, *inner)
        origin = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "")
        key = ".".join(path)
        where = f"{origin}: {key}" if origin else key
        if fault["type"] == "extra_forbidden":
            raise UserError(
                "unknown key", where=where, hint=nearest(inner[-1], known_keys(model, inner[:-1]))
            ) from None
        found = f" (found {fault['input']!r:.100})" if fault["type"] not in ("missing", "value_error") else ""
        hint = "write it as a fraction, 0.759" if inner == ("target",) else ""
        what = fault["msg"].removeprefix("Value error, ")
        raise UserError(what[0].lower() + what[1:] + found, where=where, hint=hint) from None


def known_keys(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """Return the valid keys of the mapping at `path` inside a model."""
    for name in path:
        annotation = model.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
