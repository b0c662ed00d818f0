"""The results that are committed, without those that a developer's own runs have left."""

import subprocess
from functools import cache
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from common.repository import ROOT

_PLACE = TemporaryDirectory(prefix="committed-")


def tracked(*folders):
    """Return the files that git knows, of the whole repository or below some of its folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "--", *folders]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


@cache
def committed_results():
    """Return a copy of results/ with what is committed, in a folder of its own."""
    for path in tracked("results"):
        copy = Path(_PLACE.name, path.relative_to(ROOT))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copyfile(path, copy)
    return Path(_PLACE.name, "results")
