"""Seals a run set before its first run, and lists the runs that are started and how each of them ends.

The two files are described in common/evidence/sealed/seal.py. Cells of a study are not sealed, and a resumed
run, which is for research, seals no folder.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import repository, yaml_file
from common.config.merge import to_yaml
from common.data.preparation import data_fingerprint
from common.errors import EXIT_OK, UserError
from common.evidence.log import read_log
from common.evidence.sealed import seal as sealed_files
from common.evidence.sealed.chain import digest, read_chain
from common.evidence.sealed.runs import Turns, list_decided, pair_runs
from common.evidence.sealed.seal import (
    BEACON,
    RUNS,
    SEAL,
    Derived,
    Event,
    Extended,
    Seal,
    SealedSet,
    Started,
    derive_seeds,
    read_sealed,
)
from common.files import append_whole, explain_os_error, locked, synchronize, undo_on_failure, write_text
from common.machine import hardware, system
from common.repository import WORKSPACE, hide_folders, mlperf_name
from common.run.run_set import RESULT, UNWRITABLE, Ended, RunSet
from common.run.sealing.anchoring import anchoring
from common.run.set_folder import num_threads

MACHINE = (  # fields of the system description that the seal states, too
    *("number_of_nodes", "host_processors_per_node", "host_processor_model_name"),
    *("host_processor_core_count", "host_processor_vcpu_count", "host_memory_capacity"),
    *("accelerators_per_node", "accelerator_model_name", "accelerator_memory_capacity"),
)
MAX_REASON = 1000  # letters
PUBLIC = re.compile(rf"{BEACON}([ -~]{{1,512}})")
ELSEWHERE = "make the runs with another --results"


def public_value(text: str) -> str:
    """Take the value of `beacon:VALUE`, as argparse wants it."""
    if match := PUBLIC.fullmatch(text):
        return match[1]
    raise argparse.ArgumentTypeError(f"expected {BEACON}VALUE, 1 to 512 printable ASCII characters")


def beacon_name(text: str) -> str:
    if re.fullmatch(r"[ -~]{1,512}", text):
        return text
    raise argparse.ArgumentTypeError("expected 1 to 512 printable ASCII characters")


def add_options(group: Any) -> None:
    """Declare the options of a set whose seeds a public value gives, in the group of the option --seed."""
    group.add_argument(
        "--seal",
        type=beacon_name,
        metavar="TEXT",
        help="seal the set and make no run: TEXT names the public value that will give its seeds",
    )
    group.add_argument(
        "--seed-from",
        type=public_value,
        metavar=f"{BEACON}VALUE",
        help="derive the seeds of a set that --seal has sealed from the public value, and make its runs",
    )


def compose_seal(run_set: RunSet, beacon: str = "") -> Seal:
    """State the decisions of a set, and which results lie in its folder already."""
    config, state = run_set.loaded.config, repository.code_state()
    machine = hardware.host(WORKSPACE) | hardware.accelerators()
    num_runs = run_set.num_runs - run_set.num_done
    return Seal(
        made=now(),
        system=run_set.system,
        benchmark=mlperf_name(config.benchmark),
        configuration_name=config.configuration,
        size=config.size,
        num_runs=num_runs,
        seeds=None if beacon else list(run_set.seeds[run_set.num_done :]),
        beacon=beacon,
        commit=state.commit,
        code=state.digest,
        versions=system.versions_line(),
        ranks=run_set.world_size,
        threads=num_threads(run_set.num_ranks),
        machine={field: machine[field] for field in MACHINE},
        data=data_fingerprint(config),
        configuration=yaml_file.parse_head([to_yaml(config)]) or {},
        unsealed=sorted(
            path.name for path in run_set.directory.glob("result_*.txt") if RESULT.fullmatch(path.name)
        ),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@contextmanager
def lock_list(folder: Path) -> Iterator[None]:
    """Hold the list of runs of a folder, without a line that a dead writer has torn.

    Raises UserError where the folder cannot be written.
    """
    lock = folder / f".{RUNS}.lock"
    with explain_os_error(UNWRITABLE, folder), locked(lock, "writes the list of the runs of this set"):
        path = folder / RUNS
        content = path.read_bytes() if path.exists() else b"\n"
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
        yield


def read_whole(folder: Path) -> SealedSet | None:
    """Read the seal and the list of a folder; None without a seal. Raises UserError for damaged ones.

    A list that lacks the start of a result is damaged, too: it was removed or cut.
    """
    sealed = read_sealed(folder)
    if sealed is None:
        return None
    if sealed.faults:
        file, line, text = sealed.faults[0]
        place = repository.relative_path(folder / file)
        raise UserError(text, where=f"{place}:{line}" if line else place, hint=ELSEWHERE)
    for path in sorted(folder.glob("result_*.txt")):
        log = read_log(path)
        if log.header("seal") == sealed.digest and log.header("started") not in sealed.digests:
            what = f"lacks the start of {path.name}"
            raise UserError(what, where=repository.relative_path(folder / RUNS), hint=ELSEWHERE)
    return sealed


def read_listed(folder: Path) -> SealedSet | None:
    """Read as `read_whole` does, without a line that a dead writer has torn."""
    if not (folder / SEAL).exists():
        return read_whole(folder)
    with lock_list(folder):
        return read_whole(folder)


def append(folder: Path, kind: Callable[..., Event], **facts: Any) -> str:
    """Append an event to the list of runs, which is locked; returns the hash of its line, once on the disk.

    Raises OSError, and leaves the list as it was.
    """
    path = folder / RUNS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    previous = digest(lines[-1] if lines else (folder / SEAL).read_bytes())
    event = kind(time=now(), previous=previous, **facts)
    line = f"{event.model_dump_json()}\n".encode()
    append_whole(path, line, is_synchronized=True)
    if not lines:
        synchronize(folder)
    return digest(line)


def decided_seeds(sealed: SealedSet) -> list[int]:
    """List the seeds that were decided, those of the seal first."""
    return [seed for decided in list_decided(sealed) for seed in decided.seeds]


def derived_from(sealed: SealedSet) -> str:
    """Find the public value that has given the seeds of a set; '' if none has."""
    return next((event.value for _, event in sealed.events if isinstance(event, Derived)), "")


def continue_seeds(sealed: SealedSet, value: str, number: int) -> list[int]:
    """Derive so many seeds more, after those that were decided, from a public value."""
    num_decided = len(decided_seeds(sealed))
    return derive_seeds(sealed.digest, value, num_decided + number)[num_decided:]


def timed_results(sealed: SealedSet) -> dict[int, str]:
    """Map the seed of each run whose clock may have started to its result."""
    return {run.started.seed: run.started.result for run in pair_runs(sealed) if run.was_timed}


def list_undecided(sealed: SealedSet, seeds: Sequence[int]) -> list[int]:
    """List those of the seeds of the next runs that no decision has in this turn (C911)."""
    turns = Turns(list_decided(sealed))
    for run in pair_runs(sealed):
        turns.take_of(run)
    next_line = len(sealed.digests) + 1
    return [seed for seed in seeds if not turns.take(seed, next_line)]


def choose_seeds(run_set: RunSet, num_runs: int, asked: int | None) -> tuple[list[int], Collection[int]]:
    """Return up to `num_runs` seeds for missing runs, and those that no other run of its folder may have.

    Decided seeds that no run has had come first, also those of runs whose clock had not started; a public
    value that has given them gives more. Where a person has `asked` for the first seed, none is chosen here.
    """
    sealed = None if run_set.cell else read_listed(run_set.directory)
    if sealed is None:
        return [], []
    decided, timed = decided_seeds(sealed), timed_results(sealed)
    if asked is not None:
        return [], timed
    seeds = [seed for seed in dict.fromkeys(decided) if seed not in timed][:num_runs]
    if value := derived_from(sealed) or run_set.public_value:
        seeds += continue_seeds(sealed, value, num_runs - len(seeds))
    return seeds, decided


def seal_set(run_set: RunSet) -> None:
    """Seal a set before its first run; in a folder that has a seal, state the seeds that are more.

    Raises UserError where nothing can be written, for damaged files, for a seed that a run here has had, and
    for seeds of another origin than the seal says.
    """
    folder, seeds = run_set.directory, run_set.seeds[run_set.num_done :]
    if run_set.cell or run_set.checkpoint or not seeds:
        return
    with lock_list(folder):
        sealed = read_whole(folder)
        if sealed is None or sealed.seal is None:
            write_text(folder / SEAL, as_json(compose_seal(run_set)))
            return
        decided = decided_seeds(sealed)
        timed = timed_results(sealed)
        if (used := next((seed for seed in seeds if seed in timed), None)) is not None:
            what, hint = f"seed {used} was run here as {timed[used]}", "leave --seed out, or add --continue"
            raise UserError(what, where=repository.relative_path(folder), hint=hint)
        more = list_undecided(sealed, seeds)
        if sealed.seal.beacon:
            value = derived_from(sealed) or run_set.public_value
            if not value or more != continue_seeds(sealed, value, len(more)):
                what = f"its seeds come from a public value: {sealed.seal.beacon}"
                hint = "--continue makes the missing runs" if decided else f"add --seed-from {BEACON}VALUE"
                raise UserError(what, where=repository.relative_path(folder / SEAL), hint=hint)
            if not decided:
                more = more[sealed.seal.num_runs :]
                derived = derive_seeds(sealed.digest, value, sealed.seal.num_runs)
                append(folder, Derived, value=value, seeds=derived)
        if more:
            append(folder, Extended, seeds=more)


def as_json(seal: Seal) -> str:
    return f"{seal.model_dump_json(indent=1)}\n"


def seal_for_beacon(run_set: RunSet, beacon: str) -> int:
    """Seal a set whose seeds a public value will give, and let it be stamped; returns the exit code.

    Raises UserError where there is a seal.
    """
    folder = run_set.directory
    with lock_list(folder):
        if read_sealed(folder) is not None:
            raise UserError("this set is sealed already", where=repository.relative_path(folder / SEAL))
        text = as_json(compose_seal(run_set, beacon))
        write_text(folder / SEAL, text)
    print(f"{run_set.title}: {run_set.num_runs} runs are sealed in {os.path.relpath(folder / SEAL)}")
    print(f"SHA-256 {digest(text.encode())}")
    with anchoring(run_set.anchor) as anchors:
        anchors.stamp_seal(folder)
    print(
        f"publish this hash before the value of '{beacon}' is known; then the same command with "
        f"--seed-from {BEACON}VALUE in the place of --seal makes the runs"
    )
    return EXIT_OK


def derive_run_set(run_set: RunSet, value: str, *, continues: bool) -> RunSet:
    """Give a set the seeds that its seal and a public value give.

    Raises UserError without a seal for that, for one of another recipe or number of runs, and for another
    value than the first one.
    """
    folder = run_set.directory
    place = repository.relative_path(folder / SEAL)
    sealed = read_listed(folder)
    if sealed is None or sealed.seal is None or not sealed.seal.beacon:
        what = run_set.why_apart or "no seal that waits for a public value"
        raise UserError(what, where=place, hint="before the value is known, --seal TEXT writes one")
    if run_set.num_runs != sealed.seal.num_runs:
        what = f"--runs {run_set.num_runs}: {sealed.seal.num_runs} runs were sealed"
        raise UserError(what, where=place)
    before = derived_from(sealed)
    if before and before != value:
        raise UserError(f"its seeds were derived from another value, {before}", where=place)
    if before and not continues:
        raise UserError(
            "its seeds were derived already", where=place, hint="--continue makes the missing runs"
        )
    seeds = derive_seeds(sealed.digest, value, run_set.num_runs)
    return replace(run_set, seeds=tuple(seeds), public_value=value)


def start_run(run_set: RunSet, number: int, result: Path) -> None:
    """List a run as started, and name seal and line in its result, which is removed where that fails.

    Raises UserError where nothing can be written.
    """
    folder = run_set.directory
    if run_set.cell or not (folder / SEAL).exists():
        return
    seed, checkpoint = run_set.seeds[number], run_set.checkpoint
    resumed = checkpoint.with_suffix(".txt").name if checkpoint else ""
    with undo_on_failure(result.unlink), lock_list(folder):
        path = folder / RUNS
        num_bytes_before = path.stat().st_size if path.exists() else 0
        of_seal = digest((folder / SEAL).read_bytes())
        line = append(folder, Started, result=result.name, seed=seed, resumed=resumed)
        with undo_on_failure(os.truncate, path, num_bytes_before), result.open("a", encoding="ascii") as file:
            file.write(f"# --- sealed\n# seal: {of_seal}\n# started: {line}\n")


def end_run(run_set: RunSet, result: Path, ended: Ended) -> None:
    """List how a run ended, with the head of its log; a line says so where that cannot be written."""
    folder = run_set.directory
    if run_set.cell or not (folder / SEAL).exists():
        return
    reason = hide_folders(ended.reason).encode("ascii", "backslashreplace").decode()[:MAX_REASON]
    try:
        with lock_list(folder):
            head = read_chain(result.read_bytes()).head if result.exists() else ""
            facts = {"result": result.name, "outcome": ended.outcome, "reason": reason, "head": head}
            append(folder, sealed_files.Ended, **facts)
    except UserError as error:
        print(f"error: the end of {result.name} is not in the list of runs: {error}", file=sys.stderr)
