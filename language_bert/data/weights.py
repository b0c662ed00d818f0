"""The prepared starting weights of a model, under Hugging Face's names."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.errors import UserError

WEIGHTS = "model.safetensors"
NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")  # ignored by a model without that head


def load_weights(model: torch.nn.Module, path: Path, *, hint: str) -> None:
    """Load the starting weights of a model. Raises UserError if the file is missing or of another model."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"no starting weights ({error})", where=str(path), hint=hint) from error
    shapes = {name: values.shape for name, values in model.named_parameters()}
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            actual = tuple(tensors[name].shape) if name in tensors else "missing"
            raise UserError(f"{name} is {actual}, expected {tuple(shape)}", where=str(path), hint=hint)
    if extra := [name for name in tensors if name not in shapes and not name.startswith(NEXT_SENTENCE)]:
        raise UserError(f"{extra[0]} is not of this model", where=str(path), hint=hint)
    model.load_state_dict({name: tensors[name] for name in shapes}, strict=False)
