"""Files of measured figures, as JSON: results/<kind>/<hardware>/<name>_N.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import create_next, explain_os_error, save_text


def keep(figures: Mapping[str, Any], directory: Path, name: str) -> Path:
    """Write a new file NAME_N.json; an existing one is never overwritten."""
    path = new_file(directory, name)
    write(path, figures)
    return path


def new_file(directory: Path, name: str) -> Path:
    """Return a new file NAME_N.json, empty so far."""
    with explain_os_error("cannot write figures here", directory):
        directory.mkdir(parents=True, exist_ok=True)
        return create_next(directory, f"{name}_{{}}.json")


def write(path: Path, figures: Mapping[str, Any]) -> None:
    save_text(path, json.dumps(figures, indent=1) + "\n")
