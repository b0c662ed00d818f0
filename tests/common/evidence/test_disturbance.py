"""A log names the disturbances of its run, and the audit finds a pace that jumps."""

import json
from dataclasses import replace

import pytest

from common.evidence.audit import audit_log
from common.evidence.disturbance import disturbed_blocks, disturbed_runs, slow_runs, summarize_disturbance
from common.evidence.log import RunSet, parse_log
from common.evidence.records import TOKEN
from common.evidence.score import score
from common.evidence.text import notes


def log_of(*records):
    lines = [
        TOKEN + json.dumps({"time_ms": 1_700_000_000_000 + at, "key": key, "value": value, "metadata": more})
        for at, (key, value, more) in enumerate(records)
    ]
    return parse_log("\n".join(lines).encode(), "result_0.txt")


def pace(*rates, method="blurpool"):
    found = audit_log(log_of(("method", method, {}), *(("throughput", rate, {}) for rate in rates)))
    return [finding.line for finding in found if finding.rule == "T231"]


def test_a_pace_that_jumps_is_found_at_its_slow_block_and_growing_images_change_it_less():
    assert pace(140, 2498, 2440) == [2]
    assert pace(2498, 140) == [3]
    assert pace(412, 337, 404) == pace(100) == pace() == []
    assert pace(400, 150, 100) == pace(400, 150, 80, method="progressive_crops") == [4]
    assert pace(400, 150, 100, method="progressive_crops") == []
    resumed = log_of(("throughput", 2498, {}), ("resumed", 40, {}), ("throughput", 140, {}))
    assert not [finding for finding in audit_log(resumed) if finding.rule == "T231"], "a gap is no pace"


def load(others=0.0, **facts):
    return ("machine_load", others, {"cores": 2, "steal": 0.0, "threads": 2} | facts)


@pytest.mark.parametrize(
    ("record", "word"),
    [
        (load(1.0), "other programs"),
        (load(steal=0.9), "host"),
        (load(cores=64, gpus=[{"reasons": 1}, {"reasons": 0x40}]), "GPU of rank 1 too hot"),
        (load(cores=64, gpus=[{"other_processes": 2}]), "other processes on the GPU of rank 0: 2"),
    ],
)
def test_a_disturbed_block_is_named_in_one_line(record, word):
    log = log_of(load(), record)
    assert [word in text for _, text in disturbed_blocks(log)] == [True]
    line = summarize_disturbance(log)
    assert "1 of 2 blocks" in line and word in line and "\n" not in line


def test_a_quiet_block_and_nonsense_in_a_record_are_not_named():
    quiet = [load(0.2), load(1.0, threads=1), load(3.0, cores=64), load(gpus=[{"reasons": 4}])]
    quiet += [load(3.0, cores=64, threads=64, gpus=[{}]), ("seed", 1, {})]
    nonsense = [load("x"), load(gpus=[3]), load(gpus=1), load(steal=[])]
    assert summarize_disturbance(log_of(*quiet, *nonsense)) == ""


def test_threads_that_gave_way_are_a_warning_and_stand_beside_the_score():
    lowered = ("threads_lowered", "1\x1b[2J", {"before": 2, "step": 40})
    log = log_of(("configuration_name", "any", {}), lowered)
    assert [(f.line, f.severity) for f in audit_log(log) if f.rule == "T233"] == [(2, "warning")]
    assert "step 40" in summarize_disturbance(log) and summarize_disturbance(log).isprintable()
    scored = score(RunSet(folder="set", logs=(log,)))
    assert "1 disturbed" in scored.label and any("threads" in note for note in notes([scored]))


@pytest.mark.parametrize(
    ("rates", "texts"),
    [
        ([(332, 144, 87, 107, 96, 358), (285, 299, 295, 349, 374, 288)], {0: "3.9 times slower"}),
        ([(100, 100), (90, 110), (95, 60)], {}),  # 1.7 times
        ([(100, 100), (90, 110), (95, 55)], {2: "1.9 times slower than its siblings before sample 1"}),
        ([(100, 101, 99)] * 4 + [(100, 100, 98), (70, 71, 69)], {5: "1.43 times slower than its siblings"}),
        ([(100, 101)] * 4 + [(101, 100), (120, 85)], {5: "times slower in its second half"}),
        (
            [(100, 101, 99), (101, 100, 102)] * 4 + [(66, 67, 68)] * 2,
            dict.fromkeys((8, 9), "times slower than its siblings"),
        ),
        ([(100, 101)] * 4 + [(99, 100), (88, 87)], {}),  # unusual, and of no account
        ([(60, 95), (100, 80), (75, 110), (120, 70), (85, 100), (65, 70)], {}),  # as they vary
        ([(100, 100)], {}),
        ([(), ()], {}),
    ],
)
def test_a_run_that_jumps_drifts_or_is_slow_against_its_siblings_is_named(rates, texts):
    slow = slow_runs([dict(enumerate(run)) for run in rates])
    assert slow.keys() == texts.keys() and all(texts[index] in slow[index] for index in texts)


def test_a_run_that_its_siblings_outpace_stands_beside_the_score_and_can_be_left_out():
    def timed(rate):
        return log_of(*(("throughput", rate, {"samples": number}) for number in (1, 2, 3)))

    logs = tuple(replace(timed(rate), path=f"result_{rate}.txt") for rate in (100, 99, 40))
    assert list(disturbed_runs(logs)) == [2]
    run_set = RunSet(folder="set", logs=logs)
    scored = score(run_set)
    assert "1 disturbed" in scored.label and len(scored.runs) == 3
    assert any("result_40.txt: 2.5 times slower" in note for note in notes([scored]))
    left = score(run_set, include_disturbed=False)
    assert "1 disturbed left out" in left.label and len(left.runs) == 2
