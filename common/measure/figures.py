"""Files of measured figures, as JSON: results/<kind>/<hardware>/<name>_N.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from common.errors import UserError, first_fault
from common.files import create_next, explain_os_error, save_json, undo_on_failure


def keep(figures: Mapping[str, Any], directory: Path, name: str) -> Path:
    """Write a new file NAME_N.json; an existing one is never overwritten."""
    with explain_os_error("cannot write figures here", directory):
        directory.mkdir(parents=True, exist_ok=True)
        path = create_next(directory, f"{name}_{{}}.json")
    with undo_on_failure(path.unlink):
        save_json(path, figures)
    return path


def read_figures(path: Path, shape: type[BaseModel] | None = None) -> dict[str, Any]:
    """Read a JSON object, or the figures of a row of systems/gpu_day.sh. Raises UserError for others.

    A `shape` states which keys the object has to have, and of which kind.
    """
    try:
        figures = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"no figures ({error.strerror})", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"no figures (not JSON: {error})", where=str(path)) from error
    if isinstance(figures, dict) and {"stage", "figures"} <= figures.keys():
        figures = figures["figures"]
    if not isinstance(figures, dict):
        raise UserError("no figures", where=str(path))
    if shape is not None:
        check_shape(figures, shape, path)
    return figures


def check_shape(figures: dict[str, Any], shape: type[BaseModel], path: Path) -> None:
    """Raise UserError where a key of `shape` is not among the figures in `path`, or of another kind."""
    try:
        shape.model_validate(figures, strict=True)
    except ValidationError as error:
        raise UserError(f"not the expected figures ({first_fault(error)})", where=str(path)) from error
