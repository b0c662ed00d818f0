import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from common.evidence.audit import audit
from common.evidence.log import RunSet, load, parse_log
from common.evidence.report import Checked, render
from common.evidence.reported import reported

HOSTILE = "<script>alert(1)</script>$\\frac{\x1b[2J\u202e"


def page(run_sets, published=()):
    checked = [Checked(run_set=found, findings=audit(found), official="not run") for found in run_sets]
    return render(checked, published)


@pytest.fixture(scope="module")
def two_sets(golden, tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    for configuration, block_s in (("baseline", 80.0), ("optimized", 40.0)):
        golden.write(root, golden.set(size="mini", configuration=configuration, block_s=block_s))
    return load([root])


def test_the_page_has_scores_plots_findings_differences_and_reported_numbers(two_sets):
    text = page(two_sets, reported())
    assert text.count("<svg ") == 3
    for part in (
        "8xA100-mini-optimized",
        "unverified, proxy",
        "+  lr: 2.048",
        "python 3.11",
        "110.513",
        "mini: a proxy",
    ):
        assert part in text


def test_the_page_loads_and_runs_nothing(two_sets):
    text = page(two_sets)
    assert "default-src 'none'" in text
    assert not re.search(r"<script|<link|<img|@import|src=|javascript:", text)


def test_plots_are_well_formed_and_follow_the_theme(two_sets):
    for svg in re.findall(r"<svg .*?</svg>", page(two_sets), re.DOTALL):
        ElementTree.fromstring(svg)
        assert "currentColor" in svg


def test_the_same_logs_give_the_same_page(two_sets):
    assert page(two_sets) == page(two_sets)


@pytest.mark.parametrize("key", ["submission_platform", "configuration_name", "submission_org", "method"])
def test_a_hostile_value_is_escaped(golden, key):
    logs = []
    for index, lines in enumerate(golden.set()):
        text = "\n".join(lines).replace("0123abc", HOSTILE).replace("name: optimized", f"name: {HOSTILE}")
        text = re.sub(
            rf'("key": "{key}", "value": )"[^"]*"', lambda found: found[1] + json.dumps(HOSTILE), text
        )
        logs.append(parse_log(text.encode(), f"result_{index}.txt"))
    text = page([RunSet(folder="<script>", logs=tuple(logs))])
    assert "&lt;script&gt;" in text
    assert not set("\x1b\u202e") & set(text) and "<script" not in text
    for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_unreadable_and_missed_runs_still_make_a_page():
    nothing = parse_log(b"", "result_0.txt")
    assert "no score" in page([RunSet(folder="here", logs=(nothing,))])
