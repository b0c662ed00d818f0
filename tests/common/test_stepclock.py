"""The line at the start of a run that names its bottleneck, and what it is calculated from."""

import re
import time

import pytest

from common.commands.bench import build
from common.config import load
from common.stepclock import bottleneck

SMALL = [
    "global_batch_size=8",
    "schedule.warmup=5ba",
    "max_duration=60ba",
    "evaluate_every=60ba",
    "evaluate_from=60ba",
]


@pytest.mark.parametrize(
    ("waited_s", "computed_s", "line"),
    [
        (0.5, 1.0, "loader 100 or more, step alone 105, together 100; 5% of the time waits: the step"),
        (8.0, 1.0, "loader 100, step alone 500, together 100; 80% of the time waits: the loader"),
        (8.0, 4.0, "loader 100, step alone 250, together 100; 80% of the time waits: the loader"),  # a GPU
        (0.0, 12.0, "loader 100 or more, step alone 100, together 100; 0% of the time waits: the step"),
    ],
)
def test_rates_alone_and_together(waited_s, computed_s, line):
    found = bottleneck(1000, elapsed_s=10.0, waited_s=waited_s, computed_s=computed_s)
    assert found == f"{line} is the bottleneck"


@pytest.mark.parametrize(("sleep_s", "slower"), [(0.0, "step"), (0.2, "loader")])
def test_a_run_names_what_holds_it_up(sleep_s, slower, tmp_path, capsys):
    run = build(load("language_bert", "optimized", size="mini", settings=SMALL).config, tmp_path)
    batch = next(run.benchmark.synthetic_batches())

    def batches():
        for _ in range(60):
            time.sleep(sleep_s)
            yield batch

    run.train_block(batches(), 0, 60)
    run.log.close()
    line = next(line for line in capsys.readouterr().out.splitlines() if "bottleneck" in line)
    assert f"the {slower} is the bottleneck" in line
    loader, alone, together = (
        float(re.search(rf"{name} (\d+)", line)[1]) for name in ("loader", "alone", "together")
    )
    assert loader == together <= alone
    if sleep_s:
        assert together < alone and together <= 8 / sleep_s  # what such a loader brings
