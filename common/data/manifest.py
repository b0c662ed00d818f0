"""Manifest of a prepared data set: its files, their sizes and checksums.

`manifest.json` lists every file with its size and SHA-256, the facts that a run needs without reading the
data (sample counts), and one fingerprint over all of these, which each log states. The source of the data
is listed outside the fingerprint.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import UserError, first_fault
from common.files import explain_os_error, hash_file, to_json, write_text

MANIFEST = "manifest.json"
SHARD = ".shard"  # the end of the names of the large files


class File(BaseModel):
    model_config = ConfigDict(strict=True)
    bytes: int
    sha256: str


class Facts(BaseModel):
    """The facts that a run reads; each data set has others besides."""

    settings: dict[str, Any] = {}


class Manifest(BaseModel):
    model_config = ConfigDict(strict=True)
    fingerprint: str
    source: dict[str, str] = {}
    facts: Facts
    files: dict[str, File]


def data_files(directory: Path) -> dict[str, Path]:
    files = (path for path in directory.rglob("*") if path.is_file() or path.is_symlink())
    named = {path.relative_to(directory).as_posix(): path for path in files}
    return {name: named[name] for name in sorted(named) if name != MANIFEST}


def fingerprint(files: dict[str, Any], facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([files, facts], sort_keys=True).encode()).hexdigest()


def write_manifest(directory: Path, facts: dict[str, Any], source: dict[str, str] | None = None) -> str:
    """List everything in `directory` in its manifest; `facts` are JSON values. Returns the fingerprint.

    `source` says what the data were made from; the same data of another source have the same fingerprint.
    """
    files = {
        name: {"bytes": path.stat().st_size, "sha256": hash_file(path)}
        for name, path in data_files(directory).items()
    }
    manifest = {"fingerprint": fingerprint(files, facts), "facts": facts, "files": files}
    if source:
        manifest = {"source": source, **manifest}
    write_text(directory / MANIFEST, to_json(manifest))
    return str(manifest["fingerprint"])


def read_manifest(directory: Path, *, hint: str) -> dict[str, Any]:
    """Read and check the manifest of a prepared data set; `hint` tells a person how to make one.

    Raises UserError when it is missing or not a manifest.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError("no prepared data here", where=str(directory), hint=hint)
    hint_to_remove = f"remove the folder{', then ' * bool(hint)}{hint}"  # `prepare` does not replace it
    try:
        with explain_os_error("cannot be read", path, hint=hint):
            text = path.read_bytes()
        manifest = Manifest.model_validate_json(text)
        content = json.loads(text)  # also facts that the model does not name, for the fingerprint
    except ValidationError as error:
        what = f"not a data manifest ({first_fault(error)})"
        raise UserError(what, where=str(path), hint=hint_to_remove) from error
    if manifest.fingerprint != fingerprint(content["files"], content["facts"]):
        what = "its fingerprint does not belong to its content"
        raise UserError(what, where=str(path), hint=hint_to_remove)
    return dict(content)


def verify(
    directory: Path,
    settings: dict[str, Any],
    *,
    hint: str,
    needed: Collection[str] = (),
    has_content: bool = True,
    has_shards: bool = True,
) -> list[str]:
    """List the files that are missing, extra or changed, a line each; an empty list means intact.

    The list also has a line for each of the settings (`prepared_with` of a configuration) that the data were
    not made with, and for a `needed` file that the manifest lacks. Without `has_content` only the sizes of
    the files are compared, without `has_shards` only the sizes of the shards.
    """
    manifest = read_manifest(directory, hint=hint)
    misfits = list_misfits(directory, manifest, settings, needed=needed)
    return misfits + list_damage(directory, manifest, has_content=has_content, has_shards=has_shards)


def list_misfits(
    directory: Path, manifest: dict[str, Any], settings: dict[str, Any], *, needed: Collection[str]
) -> list[str]:
    """List how data, whole or damaged, differ from those that a configuration reads, see `verify`."""
    made_with = manifest["facts"].get("settings", {})
    others = [
        f"{directory / MANIFEST}: made with {key} {made_with.get(key)}, the configuration says {value}"
        for key, value in settings.items()
        if made_with.get(key) != value
    ]
    return others + [f"{directory / name}: missing" for name in list_lacking(directory, manifest, needed)]


def list_lacking(directory: Path, manifest: dict[str, Any], needed: Collection[str]) -> list[str]:
    """Name the needed files that these data were made without."""
    known = manifest["files"].keys() | data_files(directory).keys()
    return sorted(name for name in needed if name not in known)


def list_damage(
    directory: Path,
    manifest: dict[str, Any],
    *,
    has_content: bool = True,
    has_shards: bool = True,
    explain: Callable[[Path], str] = lambda path: "",
) -> list[str]:
    """List the files that differ from the manifest; `explain` adds to the line of a changed content."""
    expected, present = manifest["files"], data_files(directory)
    problems = [f"{directory / name}: missing" for name in expected if name not in present]
    problems += [f"{directory / name}: not in the manifest" for name in present if name not in expected]
    for name in sorted(expected.keys() & present.keys()):
        is_read = has_content and (has_shards or not name.endswith(SHARD))
        try:
            num_bytes = present[name].stat().st_size
            if num_bytes != expected[name]["bytes"]:
                problems.append(f"{directory / name}: {num_bytes} bytes, expected {expected[name]['bytes']}")
            elif is_read and hash_file(present[name]) != expected[name]["sha256"]:
                more = explain(present[name])
                problems.append(f"{directory / name}: content changed (SHA-256 differs){more}")
        except OSError as error:
            problems.append(f"{directory / name}: cannot be read ({error.strerror})")
    return problems


def refuse_to_replace(directory: Path) -> None:
    """Raise UserError where a prepared folder cannot or must not replace `directory`."""
    hint = "choose another folder with --data DIR"
    if directory.is_mount():
        raise UserError("is a mount point, which cannot be replaced", where=str(directory), hint=hint)
    if directory.exists() and not directory.is_dir():
        raise UserError("is a file, and is not replaced", where=str(directory), hint=hint)
    has_manifest = (directory / MANIFEST).is_file()
    ours = read_manifest(directory, hint="")["files"] if has_manifest else {}
    if others := sorted(data_files(directory).keys() - ours):
        what = f"holds other files ({others[0]}) than prepared data, and is not replaced"
        raise UserError(what, where=str(directory), hint=f"move them away, or {hint}")


def put_in_place(finished: Path, directory: Path) -> None:
    hint = "remove this folder, and run the same command again"
    with explain_os_error("the old data cannot be removed", directory, hint=hint):
        if directory.exists():
            shutil.rmtree(directory)
    os.replace(finished, directory)
