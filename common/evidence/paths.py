"""Find result files below paths, and name files to a person."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import UserError
from common.evidence.records import TOKEN, printable

STUDY = "study"  # the folder of studies in results/
UNCOUNTED = "uncounted_"  # prefix of a result in a package that MLPerf does not count
OTHERS = (  # benchmarks of MLPerf Training, by the names of their folders
    "ssd maskrcnn minigo dlrm dlrm_dcnv2 rnnt unet3d gpt3 gnn stable_diffusion llama2_70b_lora llama31_405b "
    "llama31_8b flux1 retinanet rgat gnmt transformer ncf gpt_oss_20b deepseekv3_671b qwen35_397b_grpo dlrmv4"
)
ARCHIVES = (".tar.gz", ".tgz", ".tar")
OTHER_BENCHMARKS = frozenset(OTHERS.split())
SEARCHED_BYTES = 2**20  # of the start of a file; a head without a record has a few kilobytes
_UNPACKED: dict[Path, Path] = {}  # folder -> the archive whose members lie in it


def find_sets(paths: Sequence[Path]) -> dict[Path, list[Path]]:
    """Return folder -> its result files, by number, without other benchmarks' folders. Raises as `load`."""
    folders: dict[Path, list[Path]] = {}
    for file in sorted({absolute(file) for path in paths for file in find_logs(path)}, key=_natural):
        if file.parent.name not in OTHER_BENCHMARKS:
            folders.setdefault(file.parent, []).append(file)
    if not folders:
        where = ", ".join(label(path) for path in paths)
        raise UserError("no result_*.txt of resnet or bert here", where=where, hint="`ttt run` writes them")
    return folders


def absolute(path: Path) -> Path:
    """Return an absolute path without `..`, which would be taken for the name of a system."""
    return path.resolve() if ".." in path.parts else path.absolute()


def find_others(paths: Sequence[Path]) -> list[str]:
    """Return the folders with results of other benchmarks, which are not read."""
    folders = {file.parent for path in paths for file in find_logs(path)}
    return sorted(label(folder) for folder in folders if folder.name in OTHER_BENCHMARKS)


def find_logs(path: Path) -> Iterator[Path]:
    """Yield the result files below `path`, also links and folders of such names, which `read_log` refuses.

    Folders named `study` below it are skipped: their runs answer other questions than a score. A path inside
    such a folder is read.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError("no such file or folder", where=printable(str(path))) from error
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=printable(str(path))) from error
    if not os.path.isdir(path):
        _require_log(path)
        yield path
        return
    for folder, folders, files in walk(path):
        if STUDY in folders:
            folders.remove(STUDY)
        yield from (folder / name for name in folders + files if _is_result(name))


def find_files(paths: Iterable[Path], pattern: str) -> list[Path]:
    """Return the files below folders whose last parts match a pattern, such as `throughput/*/*.json`."""
    below = (folder / name for path in paths for folder, _, files in walk(path) for name in files)
    return sorted({file for file in below if file.match(pattern)}, key=_natural)


def find_studies(paths: Iterable[Path]) -> list[Path]:
    """Return the folders named `study` below folders."""
    return [folder / STUDY for path in paths for folder, folders, _ in walk(path) if STUDY in folders]


def walk(path: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder, the names of its subfolders (remove one to skip it) and files. Raises UserError.

    A folder that vanishes meanwhile, such as the draft of a checkpoint, is skipped: Path.rglob would raise.
    """
    for folder, folders, files in os.walk(path, onerror=_refuse_folder):
        yield Path(folder), folders, files


def is_archive(path: Path) -> bool:
    return path.name.endswith(ARCHIVES) and os.path.isfile(path)


def _require_log(path: Path) -> None:
    """Raise UserError unless a file is called like a result or holds a record, as far as it can be read."""
    if _is_result(path.name) or not os.path.isfile(path):
        return
    if is_archive(path):
        what = "is no log but an archive, which `ttt check` alone reads"
        raise UserError(what, where=printable(str(path)), hint="unpack it, and name the folder")
    with suppress(OSError), path.open("rb") as stream:  # the reader says why
        if f"{TOKEN}{{".encode() not in stream.read(SEARCHED_BYTES):
            raise UserError(f"is no log: no line with '{TOKEN}{{'", where=printable(str(path)))


def _refuse_folder(error: OSError) -> None:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return
    where = printable(str(error.filename))
    raise UserError(f"this folder cannot be read ({error.strerror})", where=where) from error


def _is_result(name: str) -> bool:
    return name.removeprefix(UNCOUNTED).startswith("result_") and name.endswith(".txt")


def result_name(path: str | Path) -> str:
    """Return the name under which a result was written, as the list of the runs of its set states it."""
    return Path(path).name.removeprefix(UNCOUNTED)


def label(path: Path) -> str:
    """Return the path of a file for messages: relative to the working folder, or within its archive."""
    for folder, archive in _UNPACKED.items():
        if path.absolute().is_relative_to(folder):
            inside = path.absolute().relative_to(folder)
            return printable(f"{archive}:{inside}" if inside.parts else str(archive))
    return printable(os.path.relpath(path))


@contextmanager
def label_by_archive(folder: Path, archive: Path) -> Iterator[None]:
    """Let labels name the archive that a folder was unpacked from."""
    _UNPACKED[folder.absolute()] = archive
    try:
        yield
    finally:
        del _UNPACKED[folder.absolute()]


def _natural(path: Path) -> tuple[str, list[str | int]]:
    """Sort key: result_10 after result_9."""
    parts = re.split(r"([0-9]+)", path.name)
    return str(path.parent), [int(part) if i % 2 else part for i, part in enumerate(parts)]
