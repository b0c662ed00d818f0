"""Finds the checkpoint of an interrupted run, and checks that it belongs to the run to be resumed.

The checkpoint of `result_N.txt` is `result_N.safetensors` beside it. A resumed run is for research: its log
is a new result that says `resumed`, the audit names it and no score counts it unless asked to. Needs no
torch; checkpoint.py reads and writes the tensors.
"""

import argparse
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.arguments import whole_number
from common.data.preparation import data_fingerprint
from common.errors import UserError
from common.evidence.log import parse_log, read_log
from common.evidence.recipes import Recipe, all_differences, flat
from common.files import remove_draft
from common.run.run_set import RunSet
from common.run.set_folder import num_threads
from common.training.checkpoint_header import Facts, checkpoint_of, read_facts

MAX_RESUMED = 100  # times that a run was resumed
RESUME = ("--resume", "--resum", "--resu")  # prefixes that argparse accepts: --res may be --results
FREE_KEYS = ("checkpoint_every", "data.directory")  # they do not affect the training


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name one run."""
    next_free = "write result_N.txt; default: the next free one"
    parser.add_argument("--index", type=whole_number(0, 10**9 - 1), metavar="N", help=next_free)
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RESULT",
        help="go on from the last checkpoint of an interrupted run, whose settings and seed are kept",
    )


def check_options(args: argparse.Namespace, run_set: RunSet) -> None:
    """Raise UserError for options that name one run, given to a set, and for others that contradict."""
    if args.index is not None and (run_set.num_runs > 1 or args.continues or args.seal):
        raise UserError("--index names one result; use it with --runs 1, without --continue or --seal")
    if args.resume is not None and (args.continues or args.seal):
        other = "--continue with a set" if args.continues else "--seal begins a set"
        raise UserError(f"--resume goes on with one run, {other}; choose one")
    if args.seal and args.continues:
        raise UserError("--seal begins a set, --continue goes on with one; choose one")
    if run_set.num_runs > 1 and run_set.makes_one_run and not (args.seal or args.continues):
        what = f"--runs {run_set.num_runs}: under torchrun or srun each start makes one run"
        raise UserError(what, hint="with --continue each start makes the next run of the set")


def last_checkpoint(result: Path) -> Path:
    """Find the checkpoint of a result, else of the result that it was resumed from."""
    for _ in range(MAX_RESUMED):
        before = None if checkpoint_of(result).is_file() else find_resumed_result(result)
        if before is None:
            break
        result = before
    return checkpoint_of(result)


def find_resumed_result(result: Path) -> Path | None:
    """Read in a result's command which result of the same folder it was resumed from."""
    lines = result.read_text("ascii", errors="replace").splitlines() if result.is_file() else []
    commands = [line for line in lines if line.startswith("# command: ")]
    try:
        words = shlex.split(commands[-1])
    except (IndexError, ValueError):  # no head, or an open quote
        return None
    pairs = [*pairwise(words), *(word.split("=", 1) for word in words if "=" in word)]
    named = [name for option, value in pairs if option in RESUME and (name := Path(value).name)]
    return result.with_name(named[-1]).with_suffix(".txt") if named else None


def check_facts(facts: Facts, num_steps: int, where: Path) -> None:
    """Raise UserError for facts that a run of `num_steps` cannot have written."""
    log = parse_log(facts.log.encode(), "log")
    is_open = len(log.events("run_start")) == 1 and not log.events("run_stop") and not log.problems
    faults = {
        f"its step {facts.step:,} is not one of {num_steps:,}": not 0 < facts.step < num_steps,
        "the random states are not those of its ranks": len(facts.random) != facts.world_size,
        "its log is not that of a run under way": not is_open or not facts.log.isascii(),
        "its log is of another seed": log.value("seed") != facts.seed,
        "its epoch and the log do not agree": (facts.log_state == "epoch") != (facts.epoch is not None),
        "its times are not in order": not facts.started <= facts.block_started <= facts.saved,
    }
    for what, is_fault in faults.items():
        if is_fault:
            raise UserError(what, where=str(where))


def resume_run_set(run_set: RunSet, result: Path, *, seed: int | None) -> RunSet:
    """Return the run that resumes the last checkpoint of `result`; `seed` is that of --seed, if any.

    Raises UserError for no checkpoint, or for one of another run, with the first difference.
    """
    checkpoint = last_checkpoint(result.resolve())
    if not checkpoint.is_file():
        if result.is_dir():
            raise UserError("is a folder", where=str(result), hint="name the result_N.txt in it")
        if not result.exists():
            raise UserError("no such result", where=str(result))
        hint = "an interrupted run has one if it was started with --set checkpoint_every=100ba"
        raise UserError("no such checkpoint", where=str(checkpoint), hint=hint)
    if run_set.num_runs > 1:
        raise UserError("--resume names one run; use it with --runs 1")
    facts = read_facts(checkpoint)
    check_facts(facts, run_set.loaded.config.plan().num_steps, checkpoint)
    named = read_log(result).value("seed") if result.is_file() and result.suffix == ".txt" else None
    if named not in (None, facts.seed):
        what = f"is of seed {facts.seed}, but {result.name} of seed {named}"
        raise UserError(what, where=str(checkpoint), hint="name the result whose run wrote the checkpoint")
    config, asked_seed = run_set.loaded.config, facts.seed if seed is None else seed
    before = run_recipe(facts.config, facts.seed, facts.world_size, facts.dataset_fingerprint, facts.system)
    before["threads"] = parse_log(facts.log.encode(), "log").threads  # None where a GPU computes
    requested = run_recipe(
        config.model_dump(mode="json"),
        asked_seed,
        run_set.world_size,
        data_fingerprint(config),
        run_set.system,
    )
    requested["threads"] = before["threads"] and num_threads(run_set.num_ranks)
    differences = sorted(all_differences(before, requested), key=lambda change: change.key == "system")
    for key, there, here in differences[:1]:  # the system comes last: its name repeats differences
        what = f"belongs to another run: {key} is {there} there, {here} here"
        if key == "system" and run_set.why_apart:  # by other code or versions
            what += f" ({run_set.why_apart})"
        raise UserError(what, where=str(checkpoint))
    if checkpoint.stem != result.stem:
        print(f"{result.name} has no checkpoint of its own, and goes on from {checkpoint.name}")
    remove_draft(checkpoint)  # of a killed writer
    return replace(run_set, seeds=(facts.seed,), checkpoint=checkpoint)


def run_recipe(config: dict[str, Any], seed: int, num_ranks: int, fingerprint: str, system: str) -> Recipe:
    """Collect what the checkpoint and the run must share; a file without a configuration shares nothing."""
    keys = {key: value for key, value in flat(config).items() if key not in FREE_KEYS}
    facts = {"seed": seed, "ranks": num_ranks, "dataset_fingerprint": fingerprint, "system": system}
    return {"benchmark": "missing"} | keys | facts
