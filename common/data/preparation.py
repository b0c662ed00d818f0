"""Preparation of a data set: its entry point, checks of disk space and checksums, progress."""

import hashlib
import shutil
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from common.config.schema import Loaded, RunConfig
from common.data import manifest, shards
from common.errors import UserError, list_some
from common.files import locked
from common.repository import benchmark_module, relative_path, relative_paths_in

PRINT_EVERY_S = 10.0
GIB = 2**30


def prepare(
    directory: Path,
    config: Any,
    source: Path | None,
    *,
    embedded: Callable[[Path, Path, Any], str],
    full: Callable[[Path, Path, Any, Path], str],
    name: str,
    needs: str,
) -> str:
    """Prepare data in `directory`, unless they are there and intact; returns the fingerprint.

    `embedded(directory, work, config)` makes size mini, `full(directory, work, config, source)` size full, in
    the folder `work` beside it; another process waits. `name` names the full data in messages, `needs` the
    files of a source. Raises UserError for a folder that holds other files or, at size full, whole data of
    other settings, for a source that size mini does not take, and for none where size full needs one.
    """
    directory = directory.resolve()  # a link to another disk stays one
    if config.size == "full" and source is None:
        if is_intact(directory, config):
            return fingerprint_of(directory)
        refuse_to_replace_whole(directory, config)
        raise UserError(
            f"no intact {name} here",
            where=str(directory),
            hint=f"{config.prepared_hint}, with {needs}; "
            "or --data DIR, with data that were prepared elsewhere",
        )
    if config.size == "mini" and source is not None:
        raise UserError("size mini makes its own data, without a source", where=f"--source {source}")
    if source is not None and not source.is_dir():
        raise UserError("no such folder", where=f"--source {source}")
    work = work_folder(directory)
    try:
        with locked(directory.with_name(f".{directory.name}.lock"), f"prepares {directory}"):
            if is_intact(directory, config):
                return fingerprint_of(directory)
            manifest.refuse_to_replace(directory)
            refuse_to_replace_whole(directory, config)
            try:
                if source is None:
                    return embedded(directory, work, config)
                return full(directory, work, config, source.resolve())
            except KeyboardInterrupt:
                say_what_is_kept(work)
                raise
            finally:
                if source is None:  # size mini takes seconds and is not resumed
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        where = str(error.filename or work)
        raise UserError(f"cannot be read or written ({error.strerror or error})", where=where) from error


def work_folder(directory: Path) -> Path:
    """Name the folder beside a data set in which it is prepared."""
    directory = directory.resolve()
    return directory.with_name(f".{directory.name}.part")


def say_what_is_kept(work: Path) -> None:
    """Print after Ctrl-C how many finished shards stay for the next preparation."""
    if num_finished := len(shards.list_finished(work)):
        what = f"{num_finished} finished shards are kept in {relative_path(work)}; the same command goes on"
        print(f"note: {what}", file=sys.stderr)


def fingerprint_of(directory: Path, *, hint: str = "") -> str:
    return str(manifest.read_manifest(directory, hint=hint)["fingerprint"])


def data_fingerprint(config: RunConfig) -> str:
    """Read the fingerprint of a configuration's prepared data in its manifest."""
    return fingerprint_of(config.data_directory, hint=config.prepared_hint)


def is_intact(directory: Path, config: Any) -> bool:
    """True for whole data of the configuration; data of other settings or sizes are not read."""
    try:
        if any(compare_sizes(directory, config)):
            return False
        paths = [directory / manifest.MANIFEST, *manifest.data_files(directory).values()]
        stats = [path.stat() for path in paths]
        versions = tuple((stat.st_ino, stat.st_size, stat.st_ctime_ns) for stat in stats)
        return is_unchanged(directory.resolve(), versions)
    except (UserError, OSError):
        return False


def compare_sizes(directory: Path, config: Any) -> tuple[list[str], list[str]]:
    """List as `manifest.verify` how data misfit a configuration, and the damage that file sizes show."""
    content = manifest.read_manifest(directory, hint="")
    settings, needed = config.prepared_with(), config.prepared_files()
    misfits = manifest.list_misfits(directory, content, settings, needed=needed)
    return misfits, manifest.list_damage(directory, content, has_content=False)


def refuse_to_replace_whole(directory: Path, config: Any) -> None:
    """Raise UserError for data that are whole by the sizes of their files, but made with other settings."""
    if config.size == "mini" or not (directory / manifest.MANIFEST).is_file():  # mini is made in seconds
        return
    misfits, damage = compare_sizes(directory, config)
    if misfits and not damage:
        what = "these data are whole and are not replaced"
        hint = f"{what}: choose another folder with --data DIR, or remove this folder"
        raise UserError(relative_paths_in(misfits[0]), hint=hint)


@lru_cache(maxsize=1)
def is_unchanged(directory: Path, versions: tuple[tuple[int, int, int], ...]) -> bool:
    """Hash the files, once for the same `versions`: a command asks, and the preparation asks again."""
    return not manifest.list_damage(directory, manifest.read_manifest(directory, hint=""))


def verify(directory: Path, config: Any, **options: Any) -> list[str]:
    """List the faults of the data of a configuration, see `manifest.verify`."""
    return manifest.verify(directory, config.prepared_with(), needed=config.prepared_files(), **options)


def read_all(config: Any) -> tuple[str, list[str], list[str], list[str]]:
    """Read every byte of a configuration's data; returns fingerprint, misfits, damage and lacking files.

    Misfits and damage are lines as of `manifest.verify`; lacking files are needed, but the data were made
    without them. Raises UserError where there are no data.
    """
    directory, benchmark = config.data_directory, config.benchmark
    content = manifest.read_manifest(directory, hint=config.prepared_hint)
    misfits = manifest.list_misfits(directory, content, config.prepared_with(), needed=())
    lacking = manifest.list_lacking(directory, content, config.prepared_files())
    damage = manifest.list_damage(directory, content, explain=partial(changed_records, benchmark))
    return str(content["fingerprint"]), misfits, damage, lacking


def finish(directory: Path, work: Path, facts: dict[str, Any], source: dict[str, str] | None = None) -> str:
    """Describe the content of `work`/data and make it the prepared folder; returns the fingerprint."""
    result = manifest.write_manifest(work / "data", facts, source)
    manifest.put_in_place(work / "data", directory)
    shutil.rmtree(work)
    return result


def changed_records(benchmark: str, path: Path) -> str:
    """Name the records of a shard that differ from its index; '' for other files, or a damaged index."""
    part, _, number = path.stem.rpartition("-")
    if path.suffix != manifest.SHARD or not number.isdigit():
        return ""
    opened = benchmark_module(benchmark, "data.shards").Shards
    try:
        return shards.changed_records(opened(path.parent, part), int(number))
    except UserError:
        return ""  # the index or another shard is damaged, too, and named by itself


def check_free_space(
    work: Path, num_bytes: int, *, hint: str = "choose another folder with --data DIR"
) -> None:
    free = shutil.disk_usage(work).free
    if free < num_bytes:
        raise UserError(
            f"needs {num_bytes / GIB:.2f} GiB, but the disk has {free / GIB:.2f} GiB free",
            where=str(work.parent),
            hint=hint,
        )


def md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def check_md5(path: Path, expected: str, *, hint: str) -> None:
    print(f"checking the MD5 of {path.name}, {path.stat().st_size / 1e9:.1f} GB", flush=True)
    if (digest := md5_of(path)) != expected:
        raise UserError(f"MD5 {digest}, expected {expected}", where=str(path), hint=hint)


class Progress:
    """Prints what is done, how fast, and the time left: redrawn on a terminal, else a line now and then."""

    def __init__(self, *, num_items: int, num_bytes: int, items: str) -> None:
        """Take the totals; the time left is calculated from bytes, `items` is the word for the items."""
        self.total_items, self.total_bytes, self.items = num_items, num_bytes, items
        self.num_items = self.num_bytes = 0
        self.started = self.printed_at = time.monotonic()
        self.redraws = sys.stdout.isatty()

    def add(self, num_items: int, num_bytes: int) -> None:
        self.num_items += num_items
        self.num_bytes += num_bytes
        now, is_last = time.monotonic(), self.num_items == self.total_items
        if is_last or now - self.printed_at >= (1 if self.redraws else PRINT_EVERY_S):
            self.printed_at = now
            seconds = max(now - self.started, 1e-9)
            text = self.describe(seconds)
            print(text.ljust(79), end="\r" if self.redraws and not is_last else "\n", flush=True)

    def describe(self, seconds: float) -> str:
        """Describe the progress after `seconds` in one line."""
        return (
            f"{self.num_items:,} of {self.total_items:,} {self.items}, {self.num_items / seconds:,.0f} "
            f"{self.items}/s, {self.rate_and_rest(seconds)}"
        )

    def rate_and_rest(self, seconds: float) -> str:
        left_s = (self.total_bytes - self.num_bytes) / max(self.num_bytes, 1) * seconds
        return f"{self.num_bytes / seconds / 1e6:,.0f} MB/s, {left_s / 60:,.1f} min left"

    def expect_again(self, num_items: int, num_bytes: int) -> None:
        """Add lost work, which has to be done again, to the totals."""
        self.total_items += num_items
        self.total_bytes += num_bytes


def check_data(loaded: Loaded) -> None:
    """Verify the prepared data before anything is timed. Raises UserError for the first problem.

    At size full the shards are not read: that would warm the page cache, and loaders check each record. They
    trust the other files (indexes, starting weights), which are small or read before the clock starts.
    """
    config = loaded.config
    problems = verify(
        config.data_directory, config, hint=config.prepared_hint, has_shards=config.size == "mini"
    )
    if problems:
        raise UserError(relative_paths_in(list_some(problems)), hint=config.prepared_hint)


def describe_data(config: RunConfig) -> str:
    """Describe the state of a configuration's data, from names and sizes; raises nothing."""
    directory = config.data_directory
    try:
        if not (directory / manifest.MANIFEST).is_file():
            return f"missing in {relative_path(directory)}; {config.prepared_hint}"
        misfits, damage = compare_sizes(directory, config)
    except (UserError, OSError) as error:
        misfits, damage = [], [str(error)]
    if not damage + misfits:
        return "prepared"
    problems = relative_paths_in(list_some(damage or misfits))
    return f"{'damaged' if damage else 'do not fit'} ({problems}); {config.prepared_hint}"
