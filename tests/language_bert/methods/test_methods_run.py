"""Methods that no configuration uses, all in a short real run, alone and beside those of `optimized`."""

import pytest

from tests.command import ttt
from tests.runs import SHORT, records

pytestmark = [pytest.mark.on_demand, pytest.mark.usefixtures("prepared_data")]
METHODS = ("seq_length_warmup={how: segment}", "alibi={}", "gated_linear_units={}")


@pytest.mark.parametrize("configuration", ["baseline", "optimized"])
def test_a_short_run_trains_evaluates_and_passes_every_checker(tmp_path, configuration):
    sets = ["--set", *SHORT, *(f"methods.{each}" for each in METHODS)]
    where = ["--results", tmp_path / "results", "--systems", tmp_path / "systems"]
    done = ttt("run", "language_bert", configuration, "--size", "mini", "--seed", 3, *where, *sets)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "results").rglob("result_*.txt")
    lines = records(path)
    used = {line["value"] for line in lines if line["key"] == "method"}
    assert {each.split("=")[0] for each in METHODS} <= used
    losses = [line["value"] for line in lines if line["key"] == "train_loss"]
    assert losses and all(0 < loss < 7 for loss in losses)
    checked = ttt("check", tmp_path / "results")
    assert checked.returncode == 0, checked.stdout
