"""Logs to export, and fixtures that make an export quick and quiet."""

import shutil

import pytest

from tests.command import ttt_here

LIBRARIES = ("mlflow", "tensorboard", "wandb")


@pytest.fixture
def results(golden, tmp_path):
    """Two runs of BERT at size mini; of the second only what was written before its second block."""
    logs = golden.set("bert", num_logs=2, size="mini")
    folder = golden.write(tmp_path / "results", logs)
    path = folder / "result_1.txt"
    lines = path.read_text().splitlines(keepends=True)
    second_block = [number for number, line in enumerate(lines) if '"block_start"' in line][1]
    path.write_text("".join(lines[:second_block]) + lines[second_block][:40])
    return folder, path, "".join(lines)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """MLflow's database without runs: to make one takes MLflow seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    pytest.importorskip("mlflow").MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def prepare_store(request):
    """Return a function that skips without the library of a tracker, and gives MLflow its database."""

    def prepare(tracker, out):
        if tracker in LIBRARIES:
            pytest.importorskip(tracker, reason="the extra `track` is not installed")
        if tracker == "mlflow" and not out.exists():
            out.mkdir(parents=True)
            shutil.copy(request.getfixturevalue("empty_database"), out)

    return prepare


@pytest.fixture
def to_export(prepare_store):
    """Return a function that runs `ttt export`, which must not fail."""

    def export_to(paths, out, tracker, *more):
        prepare_store(tracker, out)
        done = ttt_here("export", paths, "--to", tracker, "--out", out, *more)
        assert done.returncode == 0, done.stderr
        return done

    return export_to
