"""Points that no log measured: published sets as published, predictions by the formula of estimates."""

import json
import math
import re
from statistics import geometric_mean

import pytest

from common.evidence.audit import audit_paths
from common.evidence.compare.reported import read_facts
from common.evidence.log import load
from common.evidence.records import finite
from common.repository import ROOT
from common.study.explore import page_data, recipe_name, render
from common.study.points import name_devices, predicted_points, published_points, read_benches
from common.study.predict.sources import stated_config
from common.study.prices import load_prices
from tests.common.study.test_explore import PLACE, RESULTS, block, rows, study_run

OPTIMIZED = RESULTS / "reference-2cpu-mini-optimized" / "bert"


def write_bench(folder, hardware, *, name="language_bert_0", size="mini", shapes=("160 tokens",), **others):
    rates = [{"configuration": "optimized", "shape": shape, "samples_per_s": 2000.0} for shape in shapes]
    path = folder / "throughput" / hardware / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": name.rpartition("_")[0], "size": size, "rates": rates} | others))


def write_profile(folder, phase=None, evaluation_s=(0.3, 0.3)):
    """Write a profile of the recipe of `OPTIMIZED`, its one phase changed by `phase`; return its file."""
    config = stated_config(load([OPTIMIZED])[0].lead)
    own = {"shape": "160 tokens", "share": 1.0, "batch": 16, "step_ms": 4.0, "deviation": 0.01}
    own |= {"first_pass_per_s": None, "num_turns": 8} | (phase or {})
    figures = {"config": config, "num_ranks": 1, "delay_data_ms": 0, "evaluation_s": evaluation_s}
    path = folder / "profile" / "1xH100" / "language_bert_0.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(figures | {"phases": [own]}))
    return path


def predicted(folder, *logs, report=print):
    return predicted_points([folder], read_benches([folder], print), load(logs) if logs else [], report)


def test_published_sets_are_those_of_the_files():
    points = published_points()
    files = [read_facts(path) for path in ROOT.glob("*/reported.yaml")]
    entries = [entry for facts in files for entry in facts["sets"] + facts["peers"]]
    assert len(points) == len(entries) >= 20
    by_source = {re.sub("^.*, ", "", point.source): point for point in points}
    for entry in entries:
        point, missed = by_source[entry["source"]], entry["samples_to_target"]
        stated = [m if reached else None for m, reached in zip(entry["minutes"], missed, strict=True)]
        assert [finite(run.minutes) for run in point.runs] == stated
        assert [run.quality for run in point.runs] == entry["quality"]
        assert re.match("[0-9]+x[A-Z]", point.hardware) and point.kind == "published" and point.size == "full"
    assert any(run.minutes == math.inf for point in points for run in point.runs), "one missed its target"


def test_a_prediction_is_samples_over_rate_and_evaluations(tmp_path):
    write_bench(tmp_path, "8xH100")  # the rate of one of its devices
    (point,) = predicted(tmp_path, OPTIMIZED)
    samples = geometric_mean([16_000] * 3 + [17_600] * 3 + [19_200] * 2 + [20_800, 22_400])
    minutes = (samples / 2000 + 3 * 384 / 3 / 2000 + 0.0017) / 60  # evaluated thrice, started in 1.7 ms
    assert point.runs[0].minutes == pytest.approx(minutes, rel=1e-9)
    assert point.interval[0] < minutes < point.interval[1]
    assert (point.kind, point.benchmark, point.hardware) == ("predicted", "bert", "1xH100")
    assert (point.runs[0].quality, point.runs[0].samples_per_s) == (0.2, pytest.approx(2000))


def test_the_newest_bench_of_one_shape_counts_and_runs_of_studies_do_not(tmp_path):
    write_bench(tmp_path, "1xH100", name="language_bert_2")
    write_bench(tmp_path, "1xH100", name="language_bert_9")
    write_bench(tmp_path, "1xH100", name="language_bert_10")
    write_bench(tmp_path, "1xA100", shapes=("128 tokens", "160 tokens"))
    write_bench(tmp_path, "8xA100", size="full")
    (point,) = predicted(tmp_path, OPTIMIZED)
    assert point.path.endswith("language_bert_10.json")
    assert predicted(tmp_path, RESULTS / "study" / "tuned") == []
    assert predicted(tmp_path) == []


def test_a_profile_of_the_same_recipe_goes_before_a_bench(tmp_path):
    write_bench(tmp_path, "1xH100")
    path = write_profile(tmp_path)
    (point,) = predicted(tmp_path, OPTIMIZED)
    assert point.runs[0].samples_per_s == pytest.approx(4000) and "profile" in point.path
    figures = json.loads(path.read_text())
    figures["config"]["optimizer"]["learning_rate"] *= 2
    path.write_text(json.dumps(figures))
    (point,) = predicted(tmp_path, OPTIMIZED)
    assert point.runs[0].samples_per_s == pytest.approx(2000)


def test_kept_estimates_and_projections_name_all_their_devices(tmp_path):
    write_bench(
        tmp_path,
        "1xH100",
        size="full",
        projected={
            "mosaic": {"minutes": 9.5, "low": 9, "high": 10, "assuming": "as published"},
            "optimized": {"minutes": 9.5, "high": float("nan"), "assuming": "as an older version wrote"},
            "odd": {"minutes": "9"},
            "no": 3,
        },
    )
    (kept,) = (RESULTS / "estimates").glob("*/*.json")
    record = json.loads(kept.read_text()) | {"devices": 4, "hardware": "2xH200"}
    path = tmp_path / "estimates" / "here" / "language_bert_0.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    estimate, projection, older = predicted(tmp_path)
    assert (projection.hardware, projection.runs[0].minutes, projection.interval) == ("8xH100", 9.5, (9, 10))
    assert (older.runs[0].minutes, older.interval) == (9.5, None)
    assert (estimate.hardware, estimate.runs[0].minutes) == ("4xH200", record["minutes"])
    assert (name_devices("H200", 1), name_devices("H200", 2)) == ("H200", "2xH200")
    assert estimate.interval == (record["low"], record["high"])
    data = page_data([], read_benches([tmp_path], print), load_prices(), PLACE, [estimate, projection])
    (price,) = [price for price in data["prices"] if price["name"] == "aws-p5en-2026"]
    assert price["fits"] == {"4xH200": [pytest.approx(63.296 / 2), None]}


@pytest.mark.parametrize(
    ("phase", "evaluation_s"),
    [({}, [0.1, "x"]), ({"step_ms": float("nan")}, [0.1, 0.1]), ({"share": -1e308}, [0.1, 0.1])],
)
def test_a_profile_without_usable_rates_is_named_and_left_out(tmp_path, phase, evaluation_s):
    write_profile(tmp_path, phase, evaluation_s)
    said = []
    assert predicted(tmp_path, OPTIMIZED, report=said.append) == []
    (line,) = said
    assert "language_bert_0.json is left out: no rates" in line


@pytest.mark.parametrize("text", ["{", "{}", "[" * 50_000, '{"minutes": NaN}', "null", "\x00"])
def test_a_file_that_is_no_estimate_is_named_and_left_out(tmp_path, text):
    (kept,) = (RESULTS / "estimates").glob("*/*.json")
    for name, content in (("good", kept.read_text()), ("bad", text)):
        path = tmp_path / "estimates" / name / "language_bert_0.json"
        path.parent.mkdir(parents=True)
        path.write_text(content)
    said = []
    assert len(predicted(tmp_path, report=said.append)) == 1
    assert len(said) == 1 and "bad" in said[0] and "left out" in said[0]


def test_a_page_of_points_alone_marks_each_kind(tmp_path):
    points = published_points() + predicted(RESULTS, RESULTS / "reference-2cpu-mini-baseline" / "bert")
    data = block(render(page_data([], [], load_prices(), tmp_path, points)))
    kinds = {cell["folder"]: cell["kind"] for cell in data["cells"]}
    assert len(kinds) == len(points) and {*kinds.values()} == {"published", "predicted"}
    for row in rows(data):
        cell = data["cells"][row["cell"]]
        assert (row["status"] == 5) == (cell["kind"] == "predicted") == (cell["range"] is not None)
        assert (tmp_path / row["href"]).resolve().is_file()


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("with-unpad", "optimized+unpad"),
        ("without-ema", "optimized-ema"),
        ("without-fixres.progressive_crops", "optimized-fixres-progressive_crops"),
        ("without-no_unpad", "optimized+unpad"),
        ("with-no_blurpool", "optimized-blurpool"),
        ("optimized-0.3", "optimized"),
    ],
)
def test_a_cell_of_an_ablation_is_called_by_what_it_turns(tmp_path, cell, expected):
    study_run(tmp_path, cell=cell, source=OPTIMIZED / "result_0.txt")
    (entry,) = audit_paths([tmp_path / "study"])
    assert recipe_name(entry.run_set.lead, cell) == expected
    (shared,) = page_data([entry], [], [], tmp_path)["cells"]
    assert (shared["name"], shared["configuration"]) == (cell, expected)


def test_a_method_of_no_name_hides_no_other_run(tmp_path):
    study_run(tmp_path, cell="with-unpad", values={"method": ["a"]})
    (entry,) = audit_paths([tmp_path / "study"])
    assert len(page_data([entry], [], [], tmp_path)["cells"]) == 1
