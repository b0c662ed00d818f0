"""Data sets of the Hugging Face hub by name, where there is a network."""

import re
from pathlib import Path

from common.errors import UserError, name_error
from common.repository import install_hint

NAME = re.compile(r"(?P<repo_id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
TAKEN, LEFT_OUT = ["*.parquet", "*.tar"], ["test[-./]*", "*/test[-./]*"]  # the test splits have no classes
CACHED = "datasets--"  # begins the folder of a data set in the hub's cache


def find_source(source: Path) -> Path:
    """Return `source` where it is a folder; else download the data set of this name, OWNER/NAME[@REVISION].

    The files go to the hub's cache (`HF_HOME`); its credentials are those of `hf auth login`. A path that
    cannot be such a name is returned as it is. Raises UserError where the hub does not give the data set.
    """
    match = NAME.fullmatch(source.as_posix())
    if source.is_dir() or match is None or Path(source.parts[0]).exists():
        return source
    where = f"--source {source}"
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        hint = f"to download a data set of this name from Hugging Face, {install_hint('hf')}"
        raise UserError("no such folder", where=where, hint=hint) from error
    print(f"no folder {source}; downloading this data set from Hugging Face", flush=True)
    try:
        folder = huggingface_hub.snapshot_download(
            match["repo_id"],
            repo_type="dataset",
            revision=match["revision"],
            allow_patterns=TAKEN,
            ignore_patterns=LEFT_OUT,
        )
    except (OSError, ValueError, getattr(errors, "HTTPError", OSError)) as error:
        reason = name_error(error).partition(". ")[0]
        what = f"no such folder, and Hugging Face gives no such data set, or is not reached ({reason})"
        raise UserError(what, where=where, hint="for a gated data set: hf auth login") from error
    return Path(folder)


def origin(folder: Path) -> dict[str, str]:
    """Return name and revision of the data set of which `folder` is the hub's cached copy, or nothing."""
    for snapshot in (folder, *folder.parents):
        name = snapshot.parent.parent.name
        if snapshot.parent.name == "snapshots" and name.startswith(CACHED):
            return {"hub": name.removeprefix(CACHED).replace("--", "/"), "revision": snapshot.name}
    return {}
