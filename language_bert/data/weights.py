"""The published starting point: a TensorFlow checkpoint becomes a safetensors file, and a model's weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file

from common.errors import UserError
from language_bert.data.tf_checkpoint import read_tensors, to_hugging_face
from language_bert.model import bert_config, build_bert

WEIGHTS = "model.safetensors"
POSITIONS = "bert.embeddings.position_embeddings.weight"
TRAINED = 128  # tokens of the sequences that the published checkpoint has seen
NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")  # of no use without that head


def convert_checkpoint(prefix: Path, config: Any, path: Path) -> None:
    """Write a checkpoint's weights under Hugging Face's names. Raises UserError for a damaged one."""
    with torch.device("meta"):
        model = build_bert(bert_config(config), next_sentence=True)
    shapes = {name: tuple(values.shape) for name, values in model.named_parameters()}
    tensors = to_hugging_face(read_tensors(prefix), shapes, where=str(prefix))
    print(f"{prefix.name}: {len(tensors)} tensors", flush=True)
    norms = np.linalg.norm(tensors[POSITIONS], axis=1)
    if len(norms) > TRAINED:
        print(
            f"mean norm of the position embeddings: {norms[:TRAINED].mean():.3f} up to {TRAINED}, "
            f"{norms[TRAINED:].mean():.3f} beyond (training was on {TRAINED} tokens)",
            flush=True,
        )
    save_file(tensors, path)


def load_weights(model: torch.nn.Module, path: Path, *, hint: str) -> None:
    """Give a model its starting weights. Raises UserError when the file is missing or of another model."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"no starting weights ({error})", where=str(path), hint=hint) from error
    shapes = {name: values.shape for name, values in model.named_parameters()}
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            found = tuple(tensors[name].shape) if name in tensors else "missing"
            raise UserError(f"{name} is {found}, expected {tuple(shape)}", where=str(path), hint=hint)
    if extra := [name for name in tensors if name not in shapes and not name.startswith(NEXT_SENTENCE)]:
        raise UserError(f"{extra[0]} is not of this model", where=str(path), hint=hint)
    model.load_state_dict({name: tensors[name] for name in shapes}, strict=False)
