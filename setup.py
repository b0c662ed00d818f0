"""Adds to a wheel what only a clone knows: its commit, and the files beside the packages that commands read.

common/repository.py says where they lie. All else about the package stands in pyproject.toml.
"""

import json
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CLONE = Path(__file__).resolve().parent
sys.path.insert(0, str(CLONE))

from common import repository  # noqa: E402


class BuildWithState(build_py):
    """Builds the packages, and leaves nothing of an earlier build among them."""

    def run(self) -> None:
        folder = Path(self.build_lib)
        if not self.editable_mode:
            shutil.rmtree(folder, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            add_state(folder, self.distribution.get_version())


def add_state(folder: Path, version: str) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    figures = (path.relative_to(CLONE) for path in sorted((CLONE / repository.FIGURES).rglob("*.json")))
    for name in map(Path, (*repository.BESIDE, *figures)):
        copy = folder / repository.BUILT / "repository" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CLONE / name, copy)
    state = repository.code_state(CLONE)
    built = {"version": version, "commit": state.commit, "code": state.digest, "files": names}
    (folder / repository.STATE).write_text(json.dumps(built, indent=1) + "\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildWithState})
