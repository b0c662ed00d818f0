"""Checkpoints: everything that later steps of a run depend on, in one file, written whole or not at all.

The safetensors file holds parameters, buffers, optimizer state, extra state of methods and torch's random
state; its header holds the rest as JSON (`checkpoint_header.Facts`). Nothing is pickled. Parameters and
optimizer state are equal on all ranks and saved once; each rank has its own buffers and random states. The
step is also the position of the loader. CRCs of tensors and facts are saved, too; they take a processor
0.26 s per GiB (SHA-256 0.6 s, BLAKE2 1.2 s).
"""

import json
import random
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from common.errors import UserError, name_error
from common.files import let_folder_readers_read, write_whole
from common.training import checkpoint_header, distributed
from common.training.checkpoint_header import Facts, RandomState
from common.training.step import Training

Tensors = dict[str, Tensor]


def modules(training: Training) -> dict[str, nn.Module]:
    """Return the model and the extra state of methods, by name."""
    kept = {f"methods.{method.name}": method.extra_state() for method in training.methods}
    return {"model": training.model} | {name: module for name, module in kept.items() if module is not None}


def module_tensors(training: Training) -> tuple[Tensors, Tensors]:
    """Collect the tensors that are equal on all ranks, and those of this rank; tied ones once."""
    shared, local = Tensors(), Tensors()
    for name, module in modules(training).items():
        shared |= {f"{name}.{key}": value.detach() for key, value in module.named_parameters()}
        local |= {f"{name}.{key}": value for key, value in module.named_buffers()}
    local["random.cpu"] = torch.get_rng_state()
    if training.device.type == "cuda":
        local["random.cuda"] = torch.cuda.get_rng_state()
    return shared, local


def capture(training: Training) -> tuple[Tensors, list[RandomState]]:
    """Collect the tensors and random states of all ranks. Collective."""
    shared, local = module_tensors(training)
    for number, state in training.optimizer.state_dict()["state"].items():
        shared |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
    kind, keys, *counts = np.random.get_state()
    state = RandomState(python=random.getstate(), numpy=(kind, tuple(keys.tolist()), *counts))  # type: ignore[arg-type,attr-defined]
    ranks = distributed.all_gather(({name: value.cpu() for name, value in local.items()}, state))
    tensors = shared
    for rank, (of_rank, _) in enumerate(ranks):
        tensors |= {f"rank{rank}.{name}": value for name, value in of_rank.items()}
    return {name: value.contiguous() for name, value in tensors.items()}, [states for _, states in ranks]


@torch.no_grad()
def restore(training: Training, checkpoint: Path, facts: Facts) -> None:
    """Load a checkpoint into a built training, in place: captured CUDA graphs stay valid.

    Raises UserError for a file that does not fit.
    """
    for method in training.methods:
        if f"methods.{method.name}" in facts.modules:
            method.init_extra_state(training.model)
    shared, local = module_tensors(training)
    targets = shared | {f"rank{training.rank_info.rank}.{name}": value for name, value in local.items()}
    try:
        with safe_open(checkpoint, framework="pt") as file:
            crcs = json.loads((file.metadata() or {}).get("tensors_crc32", "{}"))
            if set(crcs) != set(file.keys()):
                raise UserError("its tensors are not those that were written", where=str(checkpoint))

            def read(name: str) -> Tensor:
                value: Tensor = file.get_tensor(name)
                if crcs.get(name) != crc_of(name, value):
                    raise UserError(f"{name} has changed (CRC differs)", where=str(checkpoint))
                return value

            for name, target in targets.items():
                value = read(name)
                if value.shape != target.shape or value.dtype != target.dtype:
                    raise UserError(f"{name} has another shape or type", where=str(checkpoint))
                target.copy_(value)
            state = {name: read(name) for name in crcs if name.startswith("optimizer.")}
        restore_optimizer(training, state)
        restore_states(training, local, facts)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot be read ({error})", where=str(checkpoint)) from error
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        what = f"does not fit this run ({name_error(error)})"
        raise UserError(what, where=str(checkpoint)) from error


def restore_states(training: Training, local: Tensors, facts: Facts) -> None:
    """Restore the loss scale, and the random states of this rank."""
    training.scaler.load_state_dict(facts.scaler)
    torch.set_rng_state(local["random.cpu"])
    if "random.cuda" in local:
        torch.cuda.set_rng_state(local["random.cuda"])
    generators = facts.random[training.rank_info.rank]
    random.setstate(generators.python)
    np.random.set_state(generators.numpy)  # type: ignore[arg-type]


def restore_optimizer(training: Training, values: Tensors) -> None:
    """Load the optimizer's state in the memory layout of the parameters, which fused kernels need."""
    groups = training.optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    state: dict[int, Tensors] = {}
    for name, value in values.items():
        _, number, key = name.split(".")
        parameter = parameters[int(number)]
        if value.shape == parameter.shape:
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        state.setdefault(int(number), {})[key] = value
    saved_groups = training.optimizer.state_dict()["param_groups"]  # functions of configuration and step
    training.optimizer.load_state_dict({"state": state, "param_groups": saved_groups})


def write(checkpoint: Path, tensors: Tensors, facts: Facts) -> None:
    """Replace a checkpoint. Raises OSError or SafetensorError; the old file then stays."""
    tensors = {name: value.cpu() for name, value in tensors.items()}
    crcs, text = {name: crc_of(name, value) for name, value in tensors.items()}, facts.model_dump_json()
    metadata = {
        "facts": text,
        "facts_crc32": checkpoint_header.crc_of(text),
        "tensors_crc32": json.dumps(crcs),
    }
    with write_whole(checkpoint) as draft:
        save_file(tensors, draft, metadata=metadata)
        let_folder_readers_read(draft)


def crc_of(name: str, value: Tensor) -> int:
    """Return the CRC over name, type, shape and bytes of a tensor on the CPU."""
    described = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    return zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy().data, described)
