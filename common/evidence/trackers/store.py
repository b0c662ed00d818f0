"""The place where a tracker finds its runs."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from common.errors import UserError
from common.evidence.trackers.tracked_run import TrackedRun
from common.files import explain_os_error, locked
from common.repository import install_hint


class Store(ABC):
    """Runs in a folder. A run may be exported again, with more measurements or none; it stays one run."""

    view: ClassVar[str]  # the command that shows the runs, with {out} for the folder

    def __init__(self, out: Path) -> None:
        self.out = out

    def __str__(self) -> str:
        return str(self.out)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let no other export write into the folder meanwhile. Raises UserError where none can write."""
        lock = self.out / ".export.lock"
        failure = explain_os_error("cannot export into this folder", self.out)
        with failure, locked(lock, "exports into this folder"):
            yield

    @abstractmethod
    def update(self, run: TrackedRun) -> None:
        """Write a run, or its records since the last time."""

    def flush(self) -> None:  # noqa: B027  # stores that write at once have nothing to do
        """Write the runs that `update` has gathered."""

    def close(self) -> None:  # noqa: B027
        """End open runs; nothing is updated afterwards."""


def import_library(module: str, *, title: str) -> Any:
    """Import an optional library. Raises UserError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        lacks = error.name or module
        missing = "" if module.startswith(lacks) else f" (it needs {lacks})"
        raise UserError(f"{title} is not installed{missing}", hint=install_hint("track")) from error
