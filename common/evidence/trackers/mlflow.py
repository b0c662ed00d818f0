"""Runs of an MLflow store: one experiment for each benchmark and size, in SQLite unless an address is given.

MLflow 3.13 and later refuse their own folders of files (mlruns). mlflow-skinny with SQLAlchemy and Alembic
writes a database that `mlflow ui` shows.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from common.errors import UserError, name_error
from common.evidence.trackers.store import Store, import_library
from common.evidence.trackers.tracked_run import RUNNING, Measurement, TrackedRun

KEY = "ttt.run"  # the tag that tells a run from every other


class MlflowStore(Store):
    """Metrics over samples and time, parameters and tags. `uri` names a server or another database."""

    view: ClassVar[str] = "mlflow ui --backend-store-uri {out}  (pip install mlflow)"

    def __init__(self, out: Path, uri: str = "") -> None:
        super().__init__(out)
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before the import, which would start it
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # 7 would wait minutes without a word
        self.mlflow = import_library("mlflow", title="MLflow")
        modules = ("sqlalchemy", "alembic")
        self.sqlalchemy, _ = (import_library(module, title="MLflow's database") for module in modules)
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self.is_local = not uri
        self.uri = uri or f"sqlite:///{out.absolute() / 'mlflow.db'}"
        self.client: Any = None

    def __str__(self) -> str:
        return self.uri

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let no other export write into a local database meanwhile; turn MLflow's errors into one line."""
        try:
            with super().hold() if self.is_local else nullcontext():
                yield
        except (self.mlflow.exceptions.MlflowException, self.sqlalchemy.exc.SQLAlchemyError) as error:
            raise UserError(f"MLflow refuses: {name_error(error, 200)}", where=self.uri) from error

    def update(self, run: TrackedRun) -> None:
        self.client = self.client or self.mlflow.MlflowClient(tracking_uri=self.uri)
        run_id, names = self.find_or_create(run)
        entities = self.mlflow.entities
        new = {name: str(value) for name, value in run.parameters.items() if name not in names}
        tags = {**run.tags, "status": run.status}
        metrics = [
            entities.Metric(one.metric, one.value, one.time_ms, one.samples)
            for one in self.missing(run_id, run)
        ]
        self.client.log_batch(
            run_id,
            metrics=metrics,
            params=[entities.Param(name, text) for name, text in new.items()],
            tags=[entities.RunTag(name, text) for name, text in tags.items()],
        )
        if run.status != RUNNING:
            status = "FINISHED" if run.came_to_its_end else "FAILED"
            self.client.set_terminated(run_id, status, run.stop_ms)

    def find_or_create(self, run: TrackedRun) -> tuple[str, set[str]]:
        """Return the id of a run and the names of its parameters, which MLflow lets nobody change."""
        experiment = self.client.get_experiment_by_name(run.experiment)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            where = (
                {"artifact_location": (self.out.absolute() / "artifacts").as_uri()} if self.is_local else {}
            )
            experiment_id = self.client.create_experiment(run.experiment, **where)
        known = self.client.search_runs([experiment_id], f"tags.`{KEY}` = '{run.key}'", max_results=1)
        if known:
            return known[0].info.run_id, set(known[0].data.params)
        tags = {KEY: run.key, "mlflow.source.git.commit": run.tags.get("commit", "").partition(" ")[0]}
        created = self.client.create_run(experiment_id, run.start_ms, tags, run.name)
        return created.info.run_id, set()

    def missing(self, run_id: str, run: TrackedRun) -> list[Measurement]:
        """Return the measurements that the store lacks, those of the run's end included."""
        wanted = list(run.measurements)
        if run.stop_ms is not None:
            seconds = (run.stop_ms - run.start_ms) / 1000
            wanted += [
                Measurement(name, value, run.num_samples, run.stop_ms, seconds)
                for name, value in run.outcome.items()
            ]
        known = {
            (name, metric.step, metric.timestamp)
            for name in {one.metric for one in wanted}
            for metric in self.client.get_metric_history(run_id, name)
        }
        return [one for one in wanted if (one.metric, one.samples, one.time_ms) not in known]
