"""A checkpoint in TensorFlow's format, written by tf_files.py, becomes Hugging Face's model."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from language_bert.data.tf_checkpoint import read_converted, read_index, read_tensors
from language_bert.model import check_shapes, load_weights
from tests.language_bert.data.tf_files import write_checkpoint
from tests.language_bert.test_parity import make_model


def tf_name(name: str) -> str:
    """Return Google's name of one of Hugging Face's parameters, written out case by case."""
    *path, kind = name.replace("layer.", "layer_").split(".")
    if path[-1].endswith("_embeddings"):
        return "/".join(path)
    of_module = {
        "LayerNorm": {"weight": "gamma", "bias": "beta"},
        "predictions": {"bias": "output_bias"},
        "seq_relationship": {"weight": "output_weights", "bias": "output_bias"},
    }
    return "/".join([*path, of_module.get(path[-1], {"weight": "kernel", "bias": "bias"})[kind]])


@pytest.fixture
def model():
    return make_model(True, num_hidden_layers=12).float().eval()  # layer_1 and layer_11


def google_tensors(model):
    """Return a model's parameters under Google's names and in its layout, with an optimizer's slots."""
    found = {}
    for name, values in model.named_parameters():
        array = values.detach().numpy()
        found[tf_name(name)] = array.T if tf_name(name).endswith("/kernel") else array
    kinds = ("LAMB", "LAMB_1", "adam_m", "adam_v")
    slots = {f"{name}/{kind}": values for name, values in found.items() for kind in kinds}
    return found | slots | dict.fromkeys(("global_step", "beta1_power", "beta2_power"), np.array(0.9))


@pytest.fixture
def tensors(model):
    return google_tensors(model)


def test_damage_is_named(tensors, tmp_path):
    prefix = tmp_path / "model.ckpt-28252"
    write_checkpoint(prefix, tensors)
    data, index = (prefix.with_name(f"{prefix.name}{end}") for end in (".data-00000-of-00001", ".index"))
    content, table = data.read_bytes(), bytearray(index.read_bytes())
    stored = read_index(index)
    assert 5 * len(stored) + 3 == len(tensors)  # without the optimizer's slots
    position = stored["cls/predictions/output_bias"].offset
    data.write_bytes(content[:position] + b"?" + content[position + 1 :])
    with pytest.raises(UserError, match=r"data-00000-of-00001.*corrupt"):
        read_tensors(prefix)
    data.write_bytes(content[: position + 2])
    with pytest.raises(UserError, match="cut off"):
        read_tensors(prefix)
    table[20] ^= 1
    for damaged in (bytes(table), bytes(table[:-60]), b"", b"hello"):
        index.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.ckpt-28252\.index"):
            read_tensors(prefix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bert.pooler.dense.weight": None}, "bert.pooler.dense.weight is missing, expected (24, 24)"),
        ({"cls.predictions.bias": torch.zeros(49)}, "cls.predictions.bias is (49,), expected (61,)"),
        ({"other": torch.zeros(2)}, "other is not of this model"),
        (None, "no starting weights"),
    ],
    ids=["missing", "misshaped", "another", "no file"],
)
def test_prepared_weights_of_another_model_are_refused(model, tmp_path, change, message):
    path = tmp_path / "model.safetensors"
    if change is not None:
        tensors = dict(model.named_parameters()) | change
        save_file({name: values for name, values in tensors.items() if values is not None}, path)
    with pytest.raises(UserError, match=re.escape(f"model.safetensors: {message}")) as raised:
        load_weights(model, path, hint="prepare again")
    assert str(raised.value).endswith("; prepare again")


def convert(model, tensors, folder):
    """Write a checkpoint and its conversion; return the prefix of the one and the path of the other."""
    prefix, path = folder / "model.ckpt-28252", folder / "model.safetensors"
    write_checkpoint(prefix, tensors)
    converted = read_tensors(prefix)
    check_shapes(converted, model, where="")
    save_file({name: torch.from_numpy(values.copy(order="C")) for name, values in converted.items()}, path)
    return prefix, path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values + 1e-6, "is not .*kernel of model.ckpt-28252.index"),
        (lambda values: values.T.contiguous(), "is not .*kernel"),
        (lambda values: values.bfloat16(), "is torch.bfloat16, expected torch.float32"),
        (None, "is missing, expected"),
    ],
    ids=["changed", "not transposed", "rounded", "missing"],
)
def test_a_conversion_of_another_checkpoint_is_refused(model, tensors, tmp_path, change, message):
    prefix, path = convert(model, tensors, tmp_path)
    name, converted = "bert.encoder.layer.3.output.dense.weight", load_file(path)
    values = converted.pop(name)
    save_file(converted | ({name: change(values)} if change else {}), path)
    with pytest.raises(UserError, match=f"{re.escape(name)} {message}"):
        check_shapes(read_converted(path, prefix), model, where=str(path))
