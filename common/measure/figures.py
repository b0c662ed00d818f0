"""Files of measured figures, as JSON: results/<kind>/<hardware>/<name>_N.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import create_next, save_text


def keep(figures: Mapping[str, Any], directory: Path, name: str) -> Path:
    """Write a new file NAME_N.json; an existing one is never overwritten."""
    path = new_file(directory, name)
    write(path, figures)
    return path


def new_file(directory: Path, name: str) -> Path:
    """Return a new file NAME_N.json, empty so far."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return create_next(directory, f"{name}_{{}}.json")
    except OSError as error:
        raise UserError(f"cannot write figures here ({error.strerror})", where=str(directory)) from error


def write(path: Path, figures: Mapping[str, Any]) -> None:
    """Put the figures in the place of what the file held."""
    save_text(path, json.dumps(figures, indent=1) + "\n")
