"""Read TensorFlow checkpoints (tensor bundles) without TensorFlow, and name tensors as Hugging Face does.

`<prefix>.index` is a table in LevelDB's format from variable names to offsets in
`<prefix>.data-00000-of-00001`. It ends in a footer of 48 bytes with a handle (offset, size) of the index
block; the index block has handles of the data blocks; a data block has one entry per tensor, a
`BundleEntryProto`. An entry stores how many bytes its key shares with the key before, and the rest of it.
Sources: tensorflow/core/util/tensor_bundle, LevelDB's doc/table_format.md.

A conversion, `model.safetensors`, has the same float32 values under Hugging Face's names, matrices of dense
layers transposed. It may stand for the data file: the index has a CRC-32C of every tensor as TensorFlow
stored it, and each converted tensor is compared with it.
"""

import operator
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save_file

from common.errors import UserError
from common.files import let_folder_readers_read
from language_bert.data.protobuf import masked_crc, parse, read_varint
from language_bert.model import bert_config, build_bert, check_shapes, read_weights

MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES = 48
TRAILER = struct.Struct("<BI")  # of a block: compression, checksum
FLOAT32 = 1
POSITIONS = "bert.embeddings.position_embeddings.weight"
TRAINED = 128  # length in tokens of the sequences that the published checkpoint was trained on
OPTIMIZER = re.compile(r"/(LAMB(_1)?|adam_[mv])$|^(beta[12]_power|global_step)$")


class Stored(NamedTuple):
    """Shape, offset and size in the data file, in bytes, and checksum of a tensor."""

    shape: tuple[int, ...]
    offset: int
    size: int
    checksum: int


def index_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")


def read_index(path: Path) -> dict[str, Stored]:
    """Read the places of the model's float32 tensors by name. Raises UserError for damage."""
    try:
        content = memoryview(path.read_bytes())
        if len(content) < FOOTER_BYTES or struct.unpack("<Q", content[-8:])[0] != MAGIC:
            raise ValueError("is no TensorFlow index")
        footer = content[-FOOTER_BYTES:]
        position = 0
        for _ in range(2):  # the meta-index, which is not needed, and the index of blocks
            offset, position = read_varint(footer, position)
            size, position = read_varint(footer, position)
        tensors = {}
        for _, handle in read_block(content, offset, size):
            start, position = read_varint(handle, 0)
            for key, value in read_block(content, start, read_varint(handle, position)[0]):
                name = key.decode()
                if name and not OPTIMIZER.search(name):
                    tensors[name] = parse_entry(name, value)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from error
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(f"is damaged, or no TensorFlow index ({error})", where=str(path)) from error
    return tensors


def read_block(content: memoryview, offset: int, size: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield keys and values of a block. Raises ValueError for damage."""
    end = offset + size
    compression, checksum = TRAILER.unpack(content[end : end + TRAILER.size])
    if masked_crc(bytes(content[offset : end + 1])) != checksum:
        raise ValueError("CRC differs")
    if compression:
        raise ValueError("it is compressed")
    num_restarts = struct.unpack("<I", content[end - 4 : end])[0]
    block, position, key = content[offset : end - 4 * (num_restarts + 1)], 0, b""
    while position < len(block):
        shared, position = read_varint(block, position)
        num_new, position = read_varint(block, position)
        num_value, position = read_varint(block, position)
        key = key[:shared] + bytes(block[position : position + num_new])
        position += num_new
        yield key, block[position : position + num_value]
        position += num_value


def parse_entry(name: str, value: memoryview) -> Stored:
    """Parse a `BundleEntryProto`. Raises ValueError unless it is float32 in the first data file."""

    def number(fields: dict[int, list[Any]], field: int) -> int:
        return operator.index(fields.get(field, [0])[0])  # protocol buffers leave out zeros

    fields = parse(value)
    if number(fields, 1) != FLOAT32 or number(fields, 3):
        raise ValueError(f"{name} is not float32 in one file")
    dimensions = parse(fields[2][0]).get(2, []) if 2 in fields else []
    shape = tuple(number(parse(dimension), 1) for dimension in dimensions)
    (checksum,) = struct.unpack("<I", fields[6][0])
    return Stored(shape, offset=number(fields, 4), size=number(fields, 5), checksum=checksum)


def read_tensors(prefix: Path) -> dict[str, np.ndarray]:
    """Memory-map the float32 tensors of a checkpoint, by Hugging Face names. Raises UserError for damage."""
    path = prefix.with_name(f"{prefix.name}.data-00000-of-00001")
    stored = read_index(index_of(prefix))
    try:
        data = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path)) from error
    tensors = {}
    for name, entry in stored.items():
        content = data[entry.offset : entry.offset + entry.size]
        if len(content) != entry.size or entry.size != 4 * int(np.prod(entry.shape)):
            raise UserError(f"{name} is cut off", where=str(path))
        if masked_crc(content.tobytes()) != entry.checksum:
            raise UserError(f"{name} is corrupt (CRC differs)", where=str(path))
        values = content.view("<f4").reshape(entry.shape)
        tensors[hugging_face_name(name)] = transpose_dense(name, values)
    return tensors


def read_converted(weights: Path, prefix: Path) -> dict[str, np.ndarray]:
    """Read a converted checkpoint; a tensor that the index does not have is left out.

    Raises UserError for a tensor whose type, shape or checksum is not what the index of the checkpoint says.
    """
    converted, tensors = read_weights(weights), {}
    for name, entry in read_index(index_of(prefix)).items():
        new_name = hugging_face_name(name)
        if (tensor := converted.get(new_name)) is None:
            continue
        if tensor.dtype != torch.float32:
            raise UserError(f"{new_name} is {tensor.dtype}, expected torch.float32", where=str(weights))
        stored = transpose_dense(name, tensor.numpy())
        if stored.shape != entry.shape or masked_crc(stored.tobytes()) != entry.checksum:
            what = f"{new_name} is not {name} of {prefix.name}.index (CRC differs)"
            raise UserError(what, where=str(weights))
        tensors[new_name] = tensor.numpy()
    return tensors


def transpose_dense(name: str, values: np.ndarray) -> np.ndarray:
    """Transpose the matrix of a dense layer, which TensorFlow and PyTorch store differently."""
    return values.T if name.endswith("/kernel") else values


def hugging_face_name(name: str) -> str:
    """Return the name of a variable of Google's BERT in Hugging Face's `BertForPreTraining`."""
    for pattern, replacement in {
        r"/": ".",
        r"layer_(\d+)": r"layer.\1",
        r"(gamma|kernel)$": "weight",
        r"beta$": "bias",
        r"_embeddings$": "_embeddings.weight",
        r"output_weights$": "weight",
        r"output_bias$": "bias",
    }.items():
        name = re.sub(pattern, replacement, name)
    return name


def convert_checkpoint(prefix: Path, config: Any, path: Path, *, weights: Path | None = None) -> None:
    """Write the weights of a checkpoint under Hugging Face's names, read from an earlier conversion if given.

    Raises UserError for damage, and for a conversion of another checkpoint.
    """
    with torch.device("meta"):
        model = build_bert(bert_config(config), next_sentence=True)
    tensors = read_tensors(prefix) if weights is None else read_converted(weights, prefix)
    check_shapes(tensors, model, where=str(weights or prefix))
    tensors = {name: np.array(tensors[name], order="C") for name, _ in model.named_parameters()}  # no views
    print(f"{prefix.name}: {len(tensors)} tensors", flush=True)
    norms = np.linalg.norm(tensors[POSITIONS], axis=1)
    if len(norms) > TRAINED:
        near, far = norms[:TRAINED].mean(), norms[TRAINED:].mean()
        lengths = f"{near:.3f} up to {TRAINED}, {far:.3f} beyond (training was on {TRAINED} tokens)"
        print(f"mean norm of the position embeddings: {lengths}", flush=True)
    save_file(tensors, path)
    let_folder_readers_read(path)
