"""The folder of a run set, which holds one recipe and whose name says what differs from the plain one.

`<hardware>[-mini]-<configuration>` holds the runs of the configuration as its file states it, with this
machine's default ranks, device and threads. Changes follow: `...-optimized+optimizer.learning_rate=0.1`. A
folder that holds runs of another recipe, say of the code before a commit that changed it, is left alone: new
runs get a folder of their own, `...-optimized+commit=abc1234`, and the same command finds it again. A commit
that changes nothing that a run loads (a page, a test, a command) is no other code, see common/repository.py:
else every corrected sentence would begin a set anew.
"""

import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from common import repository, yaml_file
from common.config import merge
from common.config.merge import to_yaml
from common.config.schema import Loaded, RunConfig
from common.config.validation import model_of
from common.errors import UserError
from common.evidence.log import Log, read_log
from common.evidence.recipes import (
    MACHINE,
    Difference,
    Recipe,
    all_differences,
    of_configuration,
    recipe_of,
    software,
)
from common.evidence.sealed.runs import recipe_of_seal
from common.evidence.sealed.seal import SEAL, read_sealed
from common.machine import hardware, system
from common.machine.load import may_choose_threads, physical_cores, threads_of_rank
from common.repository import DIGEST_LENGTH, MAX_NAME, digest_text
from common.training import ranks
from common.training.load import load_config

TEXT = re.compile(r"[A-Za-z0-9._-]{1,24}")  # of a value that stands in a name as it is


def choose_folder(
    loaded: Loaded, results: Path, mlperf_name: str, num_ranks: int, *, tuned_from: str = ""
) -> tuple[Path, str]:
    """Choose a folder for a configuration's runs alone; returns also why its name is not the plain one.

    It is results/<system>/<resnet|bert>. Raises UserError when no name is left. A configuration that -O1 or
    -O2 has written is `tuned_from` another one.
    """
    config, name = loaded.config, system.system_id(loaded.config)
    named, now = find_changes(loaded, num_ranks, tuned_from)
    state = repository.code_state()
    now |= software(system.versions_line(), state.digest, state.commit)
    candidates, why = [name_variant(name, named, now)], ""
    while True:
        directory = results / candidates[-1] / mlperf_name
        other = find_other_recipe(directory, config, now)
        if other is None:
            return directory, why
        path, keys, (key, before, after) = other
        there = f"{directory.parent.name} holds another recipe"
        why = f"{there}: {key} is {before} in {path.name}, {after} now"
        named = list(dict.fromkeys([*named, *keys]))
        variants = (name_variant(name, named, now, is_hashed=is_hashed) for is_hashed in (False, True))
        unused = next((variant for variant in variants if variant not in candidates), None)
        if unused is None:
            raise UserError(why, where=str(directory), hint="give these runs a --results folder of their own")
        candidates.append(unused)


def find_changes(loaded: Loaded, num_ranks: int, tuned_from: str = "") -> tuple[list[str], Recipe]:
    """Return the keys that a folder's name states, and the recipe of a run that starts now, without software.

    The keys are those that a person changed, else those that a method changed, against the configuration's
    file or the one that it is `tuned_from`. The name of a tuned configuration states what tuning changed.
    """
    config = loaded.config
    plain = load_config(config.benchmark, tuned_from or loaded.source, size=config.size, settings=[]).config
    execution, default = describe_execution(config, num_ranks)
    now = of_values(config) | execution
    changed = [change.key for change in all_differences(of_values(plain) | default, now)]
    asked = [key for key in changed if is_asked(loaded, key)]
    return asked or ([] if tuned_from else changed), now


def describe_execution(config: RunConfig, num_ranks: int) -> tuple[Recipe, Recipe]:
    """Return the ranks, device and threads of a run that starts now, and the defaults of this machine.

    Threads are stated where the CPU computes. For a run that torchrun or srun has started the two are equal.
    """

    def describe(num_ranks: int, has_gpu: bool, threads: int) -> Recipe:
        facts = {"device": "GPU"} if has_gpu else {"device": "CPU", "threads": threads}
        return {"ranks": num_ranks, **facts}

    num_started, gpus = ranks.read_rank_info().world_size, hardware.gpu_names()
    now = describe(ranks.count_all(num_ranks), hardware.count_gpus() > 0, num_threads(num_ranks))
    if num_started > 1:
        return now, now
    usual = min(len(gpus) or 1, config.global_batch_size)
    return now, describe(usual, bool(gpus), num_threads(usual, is_asked=False))


def is_asked(loaded: Loaded, key: str) -> bool:
    """True if a person changed a key on the command line; else a method did, or the machine's default."""
    if key in MACHINE:
        return True
    path = tuple(key.split("."))
    keys = [origin for origin, where in loaded.origins.items() if merge.is_asked(where)]
    return any(path[: len(origin)] == origin[: len(path)] for origin in keys if origin)


def of_values(config: RunConfig) -> Recipe:
    """Return the recipe in a configuration as the head of a log states it."""
    return of_configuration(yaml_file.parse_head([to_yaml(config)]) or {})


def find_other_recipe(
    directory: Path, config: RunConfig, now: Recipe
) -> tuple[Path, list[str], Difference] | None:
    """Find the first result of another recipe in a folder, or its seal, with the keys that differ."""
    for path, recipe in stated_recipes(directory, config):
        if changes := list(all_differences(recipe, now)):
            return path, [change.key for change in changes], changes[0]
    return None


def stated_recipes(directory: Path, config: RunConfig) -> Iterator[tuple[Path, Recipe]]:
    """Yield the recipe of each result in a folder, then that of its seal."""
    for path in sorted(directory.glob("result_*.txt")):
        yield path, recipe_of_result(read_log(path), config)
    sealed = read_sealed(directory)
    if sealed and sealed.seal:
        configuration = with_defaults(type(config), sealed.seal.configuration)
        complete = sealed.seal.model_copy(update={"configuration": configuration})
        yield directory / SEAL, recipe_of_seal(complete)


def recipe_of_result(log: Log, config: RunConfig) -> Recipe:
    return recipe_of(log, partial(with_defaults, type(config)))


def with_defaults(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """Add to a result's values the defaults of keys that are newer than the result."""
    fields = model.model_fields.items()
    complete = {key: field.default for key, field in fields if not field.is_required()} | values
    for key, field in fields:
        if (inner := model_of(field)) and isinstance(complete.get(key), dict):
            complete[key] = with_defaults(inner, complete[key])
    return complete


def name_variant(name: str, keys: Sequence[str], now: Recipe, *, is_hashed: bool = False) -> str:
    """Return `<name>+<key>=<value>...`; if it is too long or not plain, a digest ends it.

    Raises UserError when `name` leaves no room for the digest.
    """
    named = (key for key in keys if key != "methods")  # empty on one side; the methods of the other are named
    parts = dict(name_part(key, now) for key in named)  # code and commit give the same part
    full = "+".join([name, *parts])
    if all(parts.values()) and not is_hashed and len(full) <= MAX_NAME:
        return full
    values = [
        (key, now.get(key, "missing")) for key in (sorted(now) if is_hashed else keys) if key != "commit"
    ]
    room = MAX_NAME - DIGEST_LENGTH - 1
    if len(name) > room:
        raise UserError(f"system name '{name}' leaves no room for what differs", where="submission.hardware")
    return f"{full[:room].rstrip('+=.')}+{digest_text(repr(values))}"


def name_part(key: str, now: Recipe) -> tuple[str, bool]:
    """Write a key and its value for a folder's name; returns also whether the value is complete."""
    if key in ("code", "commit"):
        return repository.code_state().short, True
    path = key.split(".")
    if path[0] == "methods" and not any(other_key.startswith(f"methods.{path[1]}") for other_key in now):
        return f"methods.{path[1]}=false", True
    text = yaml_file.spell(now.get(key, "missing"))
    is_plain = TEXT.fullmatch(text) is not None
    return f"{key.removeprefix('version ')}={text}" if is_plain else key, is_plain


def num_threads(num_ranks: int, *, is_asked: bool = True) -> int:
    """Return the CPU threads of a rank: the number that the environment sets, else the default.

    torch reads MKL_NUM_THREADS, else OMP_NUM_THREADS, and takes at most the number of physical cores; OpenMP
    also obeys OMP_THREAD_LIMIT. Beside other programs a run may use fewer: each block's log has the number.
    """
    import torch  # the configuration's benchmark has imported it

    has_chosen, most = not may_choose_threads(), torch.get_num_threads()
    usual = threads_of_rank(num_ranks)
    if not has_chosen:
        return min(usual, most)
    if not is_asked:
        return min(usual, physical_cores())
    is_set = num_ranks == 1 or os.environ.get("MKL_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    number, limit = most if is_set else min(usual, most), os.environ.get("OMP_THREAD_LIMIT", "")
    return min(number, int(limit)) if limit.isdecimal() and int(limit) else number
