"""The state of the benchmarks' data, from names, sizes and records, without torch or reading the data.

`ttt data verify` leaves a record beside the folder that it read: when, and how many problems. The record
counts while the manifest and the sizes and times of all files are the same; a copy of the folder has none.
"""

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from common.config.merge import merge_files
from common.config.schema import data_command
from common.data import manifest, preparation, shards
from common.data.fetch import PART
from common.errors import UserError, list_some
from common.evidence.recipes import flat
from common.files import write_text
from common.repository import (
    SIZES,
    benchmark_module,
    configurations,
    data_folder,
    data_option,
    locate_data,
    relative_path,
    relative_paths_in,
)
from common.yaml_file import spell

MISSING, DAMAGED, PREPARED, VERIFIED = "missing", "damaged", "prepared", "verified"
BEGUN = "begun"  # by a preparation that was stopped, or goes on
OTHER = "made with other settings"  # than the configuration's, and whole


class Verification(BaseModel):
    """The record of a verification; `files` is a digest of names, sizes and times of change."""

    model_config = ConfigDict(strict=True)
    fingerprint: str
    time: str  # UTC, ISO 8601
    num_problems: int
    files: str


@dataclass(slots=True, kw_only=True)
class DataState:
    """A folder of prepared data, there or not, and the configurations that read it."""

    benchmark: str
    size: str
    configurations: list[str]
    directory: str
    state: str = MISSING
    fingerprint: str | None = None
    num_bytes: int = 0
    num_finished: int = 0  # shards of a preparation that has begun
    verified: str | None = None  # when it was found intact, UTC
    settings: dict[str, Any] = field(default_factory=dict)  # keys that a person chose for these data
    problems: list[str] = field(default_factory=list)
    next: str = ""  # the command to type

    def describe(self) -> str:
        """Describe the state in a line, each problem in another, and the command to type in the last."""
        text = f"{self.benchmark} {self.size}: {self.state}"
        if self.state == VERIFIED:
            text += f" {self.verified}"
        if self.state == BEGUN:
            name = preparation.work_folder(Path(self.directory)).name
            text += f", {self.num_finished} finished shards in {name}; the same command goes on"
        text += f", {self.directory}"
        if self.fingerprint:
            text += f", {self.num_bytes / 1e6:,.1f} MB, fingerprint {self.fingerprint[:12]}"
        text += f" ({', '.join(self.configurations)}){name_settings(self.settings)}"
        return "\n".join([text, *(f"  {problem}" for problem in self.problems), f"  next: {self.next}"])


@dataclass(slots=True, kw_only=True)
class SourceState:
    """A folder that full-size data are prepared from: what it lacks, and downloads that stopped."""

    benchmark: str
    directory: str
    missing: list[str]
    unfinished: list[str]

    def describe(self) -> str:
        text = f"{self.benchmark} source: {self.directory} "
        if not self.missing:
            return text + "has every file"
        begun = f"; begun: {', '.join(self.unfinished)}" if self.unfinished else ""
        return f"{text}lacks {list_some(self.missing)}{begun}"


@dataclass(slots=True, kw_only=True)
class Report:
    data: list[DataState] = field(default_factory=list)
    sources: list[SourceState] = field(default_factory=list)

    @property
    def is_damaged(self) -> bool:
        return any(entry.state == DAMAGED for entry in self.data)

    def describe(self) -> str:
        lines = [entry.describe() for entry in self.data]
        return "\n".join([*lines, *(entry.describe() for entry in self.sources)])


def read_report(benchmarks: Sequence[str], *, source: Path | None = None) -> Report:
    """Read the state of every folder that a configuration of these benchmarks reads.

    `source` is where full-size data come from, else the folder of `ttt data fetch`.
    """
    report = Report()
    for benchmark in benchmarks:
        report.sources.append(read_source(benchmark, source or source_directory(benchmark)))
        for size in SIZES:
            report.data += read_states(benchmark, size, report.sources[-1])
    return report


def source_directory(benchmark: str) -> Path:
    """Return the folder to which `ttt data fetch` downloads by default."""
    return data_folder() / benchmark / "source"


def read_source(benchmark: str, directory: Path) -> SourceState:
    missing = public_data(benchmark).missing_files(directory)
    unfinished = sorted(path.name.removesuffix(PART) for path in directory.rglob(f"*{PART}"))
    folder = relative_path(directory)
    return SourceState(benchmark=benchmark, directory=folder, missing=missing, unfinished=unfinished)


def read_states(benchmark: str, size: str, source: SourceState) -> Iterator[DataState]:
    """Yield the state of each folder that the configurations of a benchmark read at a size."""
    readers: dict[str, list[str]] = {}
    keys: dict[str, dict[str, Any]] = {}
    for name in configurations(benchmark):
        keys[name] = flat(merge_files(benchmark, name, size).values)
        readers.setdefault(str(keys[name]["data.directory"]), []).append(name)
    for directory, names in sorted(readers.items(), key=lambda entry: -len(entry[1])):
        state = DataState(
            benchmark=benchmark,
            size=size,
            configurations=names,
            directory=relative_path(locate_data(directory)),
        )
        complete_state(state, locate_data(directory), keys[names[0]])
        state.next = next_command(state, keys[names[0]], source)
        yield state


def complete_state(state: DataState, directory: Path, keys: dict[str, Any]) -> None:
    """Complete a state from the manifest and the record; `keys` are those of a configuration."""
    if not (directory / manifest.MANIFEST).is_file():
        work = preparation.work_folder(directory)
        if num_finished := len(shards.list_finished(work)):
            state.state, state.num_finished = BEGUN, num_finished
            state.settings = differences(shards.read_settings(work), keys)
        return
    try:
        content = manifest.read_manifest(directory, hint="")
        made_with = content["facts"].get("settings", {})
        settings = {key: keys[key] for key in made_with if key in keys}
        if state.size == "full":  # size mini takes seconds and is made anew
            state.settings = differences(made_with, keys)
        misfits = manifest.list_misfits(directory, content, settings | state.settings, needed=())
        damage = manifest.list_damage(directory, content, has_content=False)
    except UserError as error:
        state.state, state.problems = DAMAGED, [relative_paths_in(str(error))]
        return
    state.fingerprint = content["fingerprint"]
    state.num_bytes = sum(file["bytes"] for file in content["files"].values())
    record = read_record(directory)
    if record and (record.fingerprint, record.files) == (state.fingerprint, digest_files(directory)):
        if record.num_problems:
            damage.append(f"{record.num_problems} problems found by `ttt data verify`, {record.time}")
        else:
            state.verified = record.time
    state.problems = [relative_paths_in(problem) for problem in misfits + damage]
    state.state = DAMAGED if damage else VERIFIED if state.verified else PREPARED
    if not damage and (misfits or state.settings.keys() - public_data(state.benchmark).SETTINGS):
        state.state = OTHER


def differences(settings: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the settings that are not those of a configuration."""
    return {key: value for key, value in settings.items() if value != keys.get(key)}


def next_command(state: DataState, keys: Mapping[str, Any], source: SourceState) -> str:
    """Return what to type next; `keys` are those of the first configuration."""
    chosen = name_settings(state.settings)
    is_usable = state.state in (VERIFIED, PREPARED, OTHER) and not state.problems
    if is_usable and state.verified:
        run = f"{state.benchmark} {state.configurations[0]} --size {state.size}"
        return f"ttt run {run}{data_option()}{chosen}"
    place = (state.benchmark, state.size, state.configurations[0], str(keys["data.directory"]))
    if is_usable:
        return data_command("verify", *place) + chosen
    if state.size == "mini":
        return data_command("prepare", *place)
    public = public_data(state.benchmark)
    if not source.missing:
        needed = public.source_settings(Path(source.directory), keys)
        settings = {key: state.settings.get(key, value) for key, value in needed.items()}
        chosen = name_settings(state.settings if state.state == BEGUN else settings)
        return f"{data_command('prepare', *place)}{chosen} --source {shlex.quote(source.directory)}"
    if state.state == BEGUN:
        return f"{data_command('prepare', *place)}{chosen} --source DIR"
    if not public.IS_PUBLIC:
        return f"{data_command('prepare', *place)} --source DIR"
    is_usual = source.directory == relative_path(source_directory(state.benchmark))
    place_option = data_option() if is_usual else f" --to {shlex.quote(source.directory)}"
    return f"ttt data fetch {state.benchmark}{place_option}"


def name_settings(settings: Mapping[str, Any]) -> str:
    return "".join(f" --set {shlex.quote(f'{key}={spell(value)}')}" for key, value in settings.items())


def public_data(benchmark: str) -> ModuleType:
    return benchmark_module(benchmark, "public_data")


def record_path(directory: Path) -> Path:
    directory = directory.resolve()
    return directory.with_name(f".{directory.name}.verified.json")


def digest_files(directory: Path) -> str:
    """Digest the names, sizes and times of change of all files of a data set, its manifest too."""
    files = manifest.data_files(directory) | {manifest.MANIFEST: directory / manifest.MANIFEST}
    stats = {name: path.lstat() for name, path in files.items()}
    facts = [[name, stat.st_size, stat.st_ctime_ns] for name, stat in stats.items()]  # copies keep mtime
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def write_record(directory: Path, fingerprint: str, num_problems: int) -> None:
    """Leave a record of a verification that has just ended; where that cannot be written, say so."""
    path = record_path(directory)
    try:
        record = Verification(
            fingerprint=fingerprint,
            time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            num_problems=num_problems,
            files=digest_files(directory),
        )
        write_text(path, record.model_dump_json(indent=1) + "\n")
    except OSError as error:
        what = f"no record of this verification is left ({error.strerror})"
        print(f"note: {relative_path(path)}: {what}", file=sys.stderr)


def read_record(directory: Path) -> Verification | None:
    """Read the record of the last verification; None where there is none that can be read."""
    try:
        return Verification.model_validate_json(record_path(directory).read_bytes())
    except (OSError, ValidationError):
        return None
