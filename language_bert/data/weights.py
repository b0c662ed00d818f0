"""The prepared starting weights of a model, under Hugging Face's names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.errors import UserError

NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")  # ignored by a model without that head


def check_shapes(tensors: Mapping[str, Any], model: torch.nn.Module, *, where: str, hint: str = "") -> None:
    """Raise UserError for a parameter of the model that is missing in `tensors` or has another shape."""
    for name, parameter in model.named_parameters():
        if name not in tensors or tensors[name].shape != parameter.shape:
            actual = tuple(tensors[name].shape) if name in tensors else "missing"
            raise UserError(f"{name} is {actual}, expected {tuple(parameter.shape)}", where=where, hint=hint)


def read_weights(path: Path, *, hint: str = "") -> dict[str, torch.Tensor]:
    """Read the tensors of a file by name. Raises UserError where it is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"no starting weights ({error})", where=str(path), hint=hint) from error


def load_weights(model: torch.nn.Module, path: Path, *, hint: str) -> None:
    """Load the starting weights of a model. Raises UserError if the file is missing or of another model."""
    tensors = read_weights(path, hint=hint)
    check_shapes(tensors, model, where=str(path), hint=hint)
    names = {name for name, _ in model.named_parameters()}
    if extra := [name for name in tensors if name not in names and not name.startswith(NEXT_SENTENCE)]:
        raise UserError(f"{extra[0]} is not of this model", where=str(path), hint=hint)
    model.load_state_dict({name: tensors[name] for name in names}, strict=False)
