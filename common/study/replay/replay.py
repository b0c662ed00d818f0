"""Chooses the results to replay, makes each run again, and compares."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from common.evidence.compare.replayed import (
    Replayed,
    compare,
    describe_processor,
    differing_versions,
    stated_processor,
    verdict_lines,
)
from common.evidence.log import read_log
from common.evidence.paths import find_sets, label, result_name
from common.evidence.sealed import seal
from common.evidence.sealed.seal import BEACON, RUNS, SEAL
from common.files import explain_os_error, make_folder
from common.machine import hardware, system
from common.repository import FOLDER, WORKSPACE
from common.study.replay import remake


def choose(paths: Sequence[Path], drawn_by: str | None) -> list[Path]:
    """Return the result files that `paths` name, or the one that `drawn_by` (beacon:VALUE) draws from a set.

    Raises UserError for a draw from a set that is not sealed, or of which no run has ended.
    """
    folders = find_sets(paths)
    files = [file for group in folders.values() for file in group]
    if drawn_by is None:
        return files
    value = drawn_by.removeprefix(BEACON)
    if value == drawn_by or not value:
        raise UserError(f"expected {BEACON}VALUE", where=f"--draw {drawn_by}")
    if not all(path.is_dir() for path in paths) or len(folders) > 1:
        raise UserError("expected the folder of one set to draw from", where=f"--draw {drawn_by}")
    folder = next(iter(folders))
    sealed = seal.read_sealed(folder)
    if sealed is None or sealed.seal is None:
        what = f"is not sealed: without {SEAL} no run can be drawn"
        raise UserError(what, where=label(folder), hint="leave out --draw to replay all its runs")
    if sealed.faults:
        fault = sealed.faults[0]
        where = f"{label(folder / fault.file)}:{fault.line}"
        raise UserError(fault.text, where=where, hint="nothing is drawn from a list that was changed")
    ended = {event.result for _, event in sealed.events if event.event == "ended" and event.head}
    if missing := sorted(ended - set(map(result_name, files))):
        raise UserError(f"{RUNS} names it, and it is not here", where=label(folder / missing[0]))
    if not ended:
        raise UserError("no run has ended", where=label(folder / RUNS))
    drawn = seal.draw(sealed.tip, value, sorted(ended))
    return [file for file in files if result_name(file) == drawn]


def replay_all(files: Sequence[Path], *, threads: int | None, keep: Path | None) -> list[Replayed]:
    """Replay results in turn, and print a verdict after each; with `keep`, keep the new results in a folder.

    Raises UserError for a log that cannot be replayed, before the first run.
    """
    recipes = [remake.read_recipe(read_log(file), threads) for file in files]
    here = describe_processor(hardware.host(WORKSPACE))
    replayed = []
    for number, recipe in enumerate(recipes, 1):
        log = recipe.log
        kept = keep.joinpath(*filter(FOLDER.fullmatch, log.folders), Path(log.path).name) if keep else None
        print(f"{number} of {len(recipes)}: {log.path}, {recipe.origin}", flush=True)
        if others := differing_versions(log.header("versions"), system.versions_line()):
            print(f"  may not repeat to the last bit: {'; '.join(others)}", flush=True)
        if kept and kept.exists():
            again = read_log(kept)
        else:
            with remake.remade(recipe) as again:
                if kept and again.file:
                    with explain_os_error("cannot keep the result", kept):
                        make_folder(kept.parent)
                        shutil.copyfile(again.file, kept)
        processors = stated_processor(log), stated_processor(again) or here
        replayed.append(compare(log, again, processors))
        print(*verdict_lines(replayed[-1]), sep="\n", flush=True)
    return replayed
