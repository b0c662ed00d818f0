"""The header of a checkpoint: everything beside its tensors. Needs no torch."""

import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from common.config.schema import Fraction, Strict
from common.errors import UserError
from common.files import remove_draft

SUFFIX = ".safetensors"
Seconds = Annotated[float, Field(ge=0, le=1e11)]


class RandomState(Strict):
    """The states of the generators of Python and numpy; torch's are tensors."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]


class Facts(Strict):
    """The JSON in a checkpoint's header; times are seconds of the wall clock.

    `step` is the next step, `log` the text of the log so far, `random` the state of every rank.
    """

    step: int = Field(ge=0)
    seed: int
    world_size: int = Field(ge=1)
    system: str
    dataset_fingerprint: str
    config: dict[str, Any]
    modules: tuple[str, ...]  # the model, and the methods with extra state
    scaler: dict[str, Any]
    random: tuple[RandomState, ...]
    log: str
    log_state: Literal["block", "epoch"]
    epoch: int | None  # the one open in the log
    quality: Fraction
    started: Seconds
    block_started: Seconds
    saved: Seconds


def checkpoint_of(result: Path) -> Path:
    return result.with_suffix(SUFFIX)


def read_facts(checkpoint: Path) -> Facts:
    """Read the facts in a checkpoint's header. Raises UserError for any other file."""
    from safetensors import SafetensorError, safe_open  # an extra, which training needs

    try:
        checkpoint.open("rb").close()  # safetensors says of a file that may not be read that there is none
        with safe_open(checkpoint, framework="np") as file:
            metadata = file.metadata() or {}
            text = metadata.get("facts", "")
            if metadata.get("facts_crc32") != crc_of(text):
                raise ValueError("its facts have another CRC")
            return Facts.model_validate_json(text)
    except (OSError, SafetensorError, ValueError) as error:
        what = f"is not a checkpoint of ttt run ({str(error).splitlines()[0]})"
        raise UserError(what, where=str(checkpoint)) from error


def crc_of(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def tidy(result: Path, *, is_done: bool) -> None:
    """Remove the files that an ended run does not need: drafts, and the checkpoint of one that `is_done`."""
    for path in (result, checkpoint_of(result)):
        remove_draft(path)
    if is_done:
        checkpoint_of(result).unlink(missing_ok=True)
