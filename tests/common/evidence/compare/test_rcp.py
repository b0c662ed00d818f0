"""Run sets against MLCommons' reference convergence points, with the outcomes of their rcp_checker."""

import json
import math

import pytest
from mlperf_logging.rcp_checker import rcp_checker

from common.evidence.compare import rcp
from common.evidence.compare.lines import reproduction_lines
from common.evidence.compare.reported import read_facts
from common.evidence.compare.reproduce import reproduce
from common.evidence.log import IMAGENET_SAMPLES, load
from common.evidence.rules.rounds import last_round
from common.evidence.rules.rule import add
from common.repository import ROOT
from tests.command import ttt_here as ttt

BENCHMARKS = ("resnet", "bert")
BATCHES = (1, 255, 256, 448, 449, 1000, 1632, 2048, 3000, 3264, 4096, 4608, 5000, 8192, 13056, 20000, 32768)
BATCHES += (49152, 60000, 67840, 67841, 10**6)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_points_are_pruned_and_interpolated_as_by_the_official_checker(benchmark):
    ruleset = last_round(benchmark)
    official = rcp_checker.RCP_Checker("training", ruleset, benchmark, verbose=False)
    expected = {record["BS"]: record for record in official.pruned_rcp_data.values()}
    assert len(expected) < len(official.rcp_data)
    points = rcp.load_points(benchmark, ruleset)
    assert [point.batch_size for point in points] == sorted(expected)
    for batch_size in BATCHES:
        record = expected.get(batch_size)
        low = official._find_top_min_rcp(batch_size, "pruned_rcps")
        high = official._find_bottom_max_rcp(batch_size, "pruned_rcps")
        if record is None and low and high:
            _, record = official._create_interp_rcp(batch_size, low, high)
        record = record or (official._find_min_rcp("pruned_rcps") if high else None)
        point = rcp.point_at(benchmark, batch_size, ruleset)
        assert (point is None) == (record is None), batch_size
        if record:
            assert point.mean == pytest.approx(record["RCP Mean"])
            assert point.deviation == pytest.approx(record["RCP Stdev"])
            assert point.least == pytest.approx(record["Min Epochs"], abs=2e-4)  # theirs is found by halving


def test_stops_at_one_evaluation_are_known_to_its_distance():
    # each of five is rounded with a variance of 9 / 12; Student's t of 4 degrees of freedom is 2.7764
    estimate = rcp.mean_of_stops([27] * 5, 3)
    half = 2.7764 * math.sqrt(5 * 9 / 12 / 4) / math.sqrt(5)
    assert estimate.value == 27
    assert estimate.interval.low == pytest.approx(27 - half, abs=1e-4)
    assert estimate.interval.high == pytest.approx(27 + half, abs=1e-4)
    assert rcp.mean_of_stops([10, 20, 60], 0).value == 20  # as a score
    missed = rcp.mean_of_stops([24, 27, 27, 30, math.inf], 3)
    assert (missed.value, missed.interval) == (28, None)
    assert rcp.mean_of_stops([27, 27, 27, math.inf, math.inf], 3) is None
    counts = ([], [None], [36], [0, 24], [24, None], [24, 27], [21, 27, 24])
    assert [rcp.last_step(values) for values in counts] == [0, 0, 36, 24, 0, 3, 0]


def write_closed(golden, folder, benchmark, batch_size, epochs):
    """Write a set of runs that end at these epochs or samples, None for a miss; return its folder."""
    logs = []
    for index, epoch in enumerate(epochs):
        samples = (epoch or 1) * (IMAGENET_SAMPLES if benchmark == "resnet" else 1)
        target = {"resnet": 0.76, "bert": 0.7203}[benchmark] if epoch else 0.5
        last = (600, 620, samples, target, {"epoch_num": epoch or 1})
        lines = golden.timeline(benchmark, [last], launch_s=4000 * index, configuration="closed")
        lines = add("submission_org", key="global_batch_size", value=batch_size)(lines)
        if epoch is None:
            lines[-1] = lines[-1].replace('"success"', '"aborted"')
        logs.append([line.replace('"open"', '"closed"') for line in lines])
    return golden.write(folder, logs)


def published_peers():
    """A set of each batch size in reported.yaml, and each with a miss, with its samples to target."""
    sizes = set()
    for path in sorted(ROOT.glob("*/reported.yaml")):
        facts = read_facts(path)
        unit = IMAGENET_SAMPLES if facts["benchmark"] == "resnet" else 1
        for entry in facts["sets"] + facts["peers"]:
            samples = [count and round(count / unit) for count in entry["samples_to_target"]]
            name, size = f"{facts['benchmark']} {entry['system']}", (unit, entry["global_batch_size"])
            if size not in sizes or None in samples:
                yield pytest.param(facts["benchmark"], entry["global_batch_size"], samples, id=name)
            sizes.add(size)


SETS = [
    *published_peers(),
    pytest.param("resnet", 3264, [35, 35, 35, 35, 34], id="a little faster: scaled"),
    pytest.param("resnet", 4096, [36, 36, 37, 36, 36], id="a pruned point"),
    pytest.param("resnet", 4096, [30, 31, 30, 31, 30], id="too fast"),
    pytest.param("resnet", 1024, [36, 36, 36, 36, 36], id="small and slower"),
    pytest.param("resnet", 1024, [20, 20, 20, 20, 20], id="small and faster"),
    pytest.param("resnet", 10**5, [90, 90, 90, 90, 90], id="too large"),
    pytest.param("resnet", 3264, [36, 36, 36, 36, None], id="one miss"),
    pytest.param("resnet", 3264, [36, 36, 36, None, None], id="two misses"),
    pytest.param("bert", 448, [2_380_000 + 10_000 * n for n in range(10)], id="bert, scaled"),
    pytest.param("bert", 3000, [2_800_000 + 10_000 * n for n in range(10)], id="bert, between"),
    pytest.param("bert", 256, [2_500_000 + 10_000 * n for n in range(10)], id="bert, below the smallest"),
]


def outcome(folder):
    """Return ours and the official checker's: (it passes, the scale)."""
    (run_set,) = load([folder])
    benchmark = run_set.lead.benchmark
    ours = reproduce(run_set, None).convergence
    passes, _, scale = rcp_checker.check_directory(
        str(folder), "training", last_round(benchmark), False, False, rcp_pass="pruned_rcps"
    )
    return ours, passes, scale


def test_sets_of_every_verdict_are_judged_as_by_the_official_checker(golden, tmp_path):
    verdicts = set()
    for number, case in enumerate(SETS):
        ours, passes, scale = outcome(write_closed(golden, tmp_path / str(number), *case.values))
        assert (ours.verdict in (rcp.ACCEPTED, rcp.SCALED)) == passes, case.id
        if passes:
            assert ours.scale == pytest.approx(scale), case.id
            assert (ours.verdict == rcp.SCALED) == (scale > 1), case.id
        verdicts.add(ours.verdict)
    assert verdicts == {rcp.ACCEPTED, rcp.SCALED, rcp.REFUSED, rcp.UNKNOWN}


def test_the_published_logs_are_judged_as_by_the_official_checker(published):
    for run_set in load([published]):
        ours, passes, _ = outcome(run_set.lead.file.parent)
        assert not passes and ours.verdict == rcp.REFUSED


def test_a_set_without_a_published_counterpart_is_beside_the_reference_too(golden, tmp_path):
    done = ttt("reproduce", write_closed(golden, tmp_path, "resnet", 3264, [36] * 5), "--json")
    (entry,) = json.loads(done.stdout)["sets"]
    assert entry["why_not"] and entry["factors"] == []
    reference = entry["reference_convergence"]
    assert (reference["ruleset"], reference["unit"], reference["verdict"]) == ("4.0.0", "epochs", "accepted")
    assert (reference["measured"], reference["point"]["batch_sizes"]) == (36, [3264])


@pytest.mark.parametrize(
    ("benchmark", "batch_size", "epochs", "measured", "note"),
    [
        ("resnet", 3264, [36], 36, "wants 5 runs, the set has 1"),
        ("resnet", 3264, [36, 36], 36, "wants 5 runs, the set has 2"),
        ("resnet", 3264, [36] * 4, 36, "wants 5 runs, the set has 4"),
        ("bert", 448, [2_800_000] * 2, 2_800_000, "wants 10 runs, the set has 2"),
        ("bert", 448, [1] * 10, None, "epoch_num in the logs counts no samples"),
        ("resnet", None, [36] * 5, 36, "state no batch size"),
        ("resnet", -1, [36] * 5, 36, "state no batch size"),
        ("resnet", 3264, [None] * 5, None, "no epoch_num"),
    ],
)
def test_a_set_that_says_too_little_has_no_verdict(
    golden, tmp_path, benchmark, batch_size, epochs, measured, note
):
    (run_set,) = load([write_closed(golden, tmp_path, benchmark, batch_size, epochs)])
    comparison = reproduce(run_set, None)
    convergence = comparison.convergence
    assert (convergence.verdict, convergence.measured) == (rcp.UNKNOWN, measured)
    assert note in convergence.note
    lines = [line for line in reproduction_lines(comparison) if "closed reference" in line or note in line]
    assert lines[0].startswith("  closed reference  ") and note in lines[-1] and "unknown" in lines[-1]
    if len(epochs) < 5:
        limits = next(line for line in reproduction_lines(comparison) if "or more" in line)
        assert ("over all runs" in limits) == (len(epochs) > 1)
