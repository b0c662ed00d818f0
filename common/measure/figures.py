"""Files of measured figures, as JSON: results/<kind>/<hardware>/<name>_N.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import create_next, explain_os_error, save_json


def keep(figures: Mapping[str, Any], directory: Path, name: str) -> Path:
    """Write a new file NAME_N.json; an existing one is never overwritten."""
    path = new_file(directory, name)
    save_json(path, figures)
    return path


def new_file(directory: Path, name: str) -> Path:
    """Return a new file NAME_N.json, empty so far."""
    with explain_os_error("cannot write figures here", directory):
        directory.mkdir(parents=True, exist_ok=True)
        return create_next(directory, f"{name}_{{}}.json")


def read_figures(path: Path) -> dict[str, Any]:
    """Read a JSON object, or the figures of a row of systems/gpu_day.sh. Raises UserError for others."""
    try:
        figures = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"no figures ({error.strerror})", where=str(path)) from error
    except ValueError as error:
        raise UserError(f"no figures (not JSON: {error})", where=str(path)) from error
    if isinstance(figures, dict) and {"stage", "figures"} <= figures.keys():
        figures = figures["figures"]
    if not isinstance(figures, dict):
        raise UserError("no figures", where=str(path))
    return figures
