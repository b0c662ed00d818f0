"""Runs of Weights & Biases, offline: `wandb sync` sends them when a person wants that.

W&B would record its machine, user, load and git remote. This is the machine that exports, not that of the
run, so all of these are switched off.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from common.errors import UserError
from common.evidence.trackers.store import Store, import_library
from common.evidence.trackers.tracked_run import RUNNING, Measurement, TrackedRun
from common.files import write_text
from common.repository import digest_text

QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
SWITCHED_OFF: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "host": "not recorded",
    "username": "not recorded",
}


@dataclass
class OpenRun:
    """A run that is under way, its written measurements, and the digest of its last state."""

    handle: Any
    written: set[Measurement] = field(default_factory=set)
    digest: str = ""


class WandbRuns(Store):
    """A folder for each run in wandb/. A run with its digest in exported.json is not written again."""

    view: ClassVar[str] = "wandb sync {out}/wandb/offline-run-*"

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        os.environ.update(QUIET)
        self.wandb = import_library("wandb", title="Weights & Biases")
        self.open: dict[str, OpenRun] = {}
        self.record = out / "exported.json"

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of each exported run; read when no other export writes it."""
        if not self.record.exists():
            return {}
        try:
            return dict(json.loads(self.record.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            hint = "remove it, and every run is exported anew"
            raise UserError("was not written by `ttt export`", where=str(self.record), hint=hint) from error

    def update(self, run: TrackedRun) -> None:
        digest = hashlib.sha256(repr(run).encode()).hexdigest()
        if self.digests.get(run.key) == digest:
            return
        if run.key not in self.open:
            self.open[run.key] = OpenRun(self.begin(run))
        begun = self.open[run.key]
        begun.digest = digest
        for one in run.measurements:
            if one not in begun.written:
                begun.written.add(one)
                begun.handle.log({one.metric: one.value, "samples": one.samples, "seconds": one.seconds})
        begun.handle.summary.update({**run.outcome, "status": run.status})
        if run.status != RUNNING:
            self.finish(run.key, exit_code=0 if run.came_to_its_end else 1)

    def finish(self, key: str, exit_code: int) -> None:
        ended = self.open.pop(key)
        ended.handle.finish(exit_code=exit_code)
        self.digests[key] = ended.digest

    def begin(self, run: TrackedRun) -> Any:
        """Begin a run anew, and remove the folder of an earlier export."""
        run_id = digest_text(run.key, 16)
        for folder in (self.out / "wandb").glob(f"offline-run-*-{run_id}"):
            shutil.rmtree(folder)
        handle = self.wandb.init(
            project=run.experiment,
            group=run.set_name,
            id=run_id,
            name=run.name,
            config={**run.parameters, "provenance": dict(run.tags), "start": run.start},
            tags=[tag[:64] for tag in run.tags["label"].split(", ")],
            dir=str(self.out),
            mode="offline",
            reinit="create_new",
            settings=self.wandb.Settings(**SWITCHED_OFF),
        )
        handle.define_metric("*", step_metric="samples")
        return handle

    def flush(self) -> None:
        write_text(self.record, json.dumps(self.digests, indent=1, sort_keys=True) + "\n")

    def close(self) -> None:
        if self.open:
            with self.hold():
                for key in list(self.open):
                    self.finish(key, exit_code=0)
                self.flush()
