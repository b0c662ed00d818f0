"""ImageNet is not public: say in a line how to get it, and which of its files a folder lacks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from common.errors import UserError
from image_classification.data.images import PARTS
from image_classification.data.sources import TARS, find_files

IS_PUBLIC = False
SETTINGS = ("data.encoded_px",)  # that a person may choose at preparation, and for a run


def list_files(server: str | None, directory: Path) -> NoReturn:
    """Raise UserError: ImageNet is given to registered persons, and nobody may pass it on."""
    command = "ttt data prepare image_classification --size full --source"
    steps = (
        f"register at https://image-net.org/download-images, download {' and '.join(TARS.values())} to DIR, "
        f"then: {command} DIR; or accept the terms on Hugging Face, then: {command} ILSVRC/imagenet-1k"
    )
    raise UserError("ImageNet is given to registered persons only", hint=steps)


def missing_files(directory: Path) -> list[str]:
    """Name the tars of the parts that `directory` holds in no form."""
    return [TARS[part] for part in PARTS if not has_part(directory, part)]


def has_part(directory: Path, part: str) -> bool:
    try:
        return directory.is_dir() and bool(find_files(directory, part))
    except UserError:
        return False


def source_settings(directory: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return no settings: each form of a source is prepared with those of the configuration."""
    return {}
