"""Removes the results of runs whose launcher was killed before their clock had started.

A launcher that lives removes such a result itself. The next command in the folder does it for one that was
killed, and the list of a sealed set says so: the audit warns of each (C918).
"""

from collections.abc import Iterator
from pathlib import Path

from common.evidence.log import read_log
from common.evidence.sealed import seal as sealed_files
from common.evidence.sealed.runs import pair_runs
from common.evidence.sealed.seal import SealedSet
from common.files import explain_os_error, is_locked
from common.run.run_set import RESULT, UNWRITABLE
from common.run.sealing import seal

HEAD = b"# benchmark: "  # the first bytes of each result
TIMED = (b'"run_start"', b'"block_start"', b'"eval_start"', b'"run_stop"')
REASON = "its launcher was killed before its clock had started; a later command has written this line"


def remove_untimed(folder: Path) -> None:
    """Remove the results of a folder, which is locked, whose runs are gone and were never timed.

    Raises UserError where nothing can be written. A damaged seal or list is left for the start to refuse.
    """
    if any(find_untimed(folder)):
        with explain_os_error(UNWRITABLE, folder), seal.lock_list(folder):
            sealed = sealed_files.read_sealed(folder)
            for path in find_untimed(folder):
                if sealed is None or not sealed.faults:
                    remove_result(path, sealed)


def find_untimed(folder: Path) -> Iterator[Path]:
    """Yield the results that end before the start of a clock, and that no launcher holds.

    Where a file system has no locks, nobody can tell, and all results stay.
    """
    for path in sorted(folder.glob("result_*.txt")):
        if not RESULT.fullmatch(path.name) or path.is_symlink() or not path.is_file() or is_locked(path):
            continue
        data = path.read_bytes()
        if HEAD.startswith(data[: len(HEAD)]) and not any(key in data for key in TIMED):
            yield path


def remove_result(path: Path, sealed: SealedSet | None) -> None:
    """Remove a result and list the end of its run; one that the list ends in another way stays."""
    runs = [run for run in pair_runs(sealed) if run.started.result == path.name] if sealed else []
    if runs:
        started, ended = read_log(path).header("started"), runs[-1].ended
        if started not in ("", runs[-1].digest) or (ended and ended.outcome != "killed"):
            return
        if ended is None:
            seal.append(
                path.parent,
                sealed_files.Ended,
                result=path.name,
                outcome="killed",
                reason=REASON,
                head="",
            )
    path.unlink()
    print(f"{path.name}: its launcher was killed before its clock had started; nothing was timed, removed")
