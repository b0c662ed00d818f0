"""Every rule on simulated studies: wrong in at most 5 %, intervals that hold in 92 to 98 %, power of 80 %."""

import re

import pytest

from common.evidence import intervals
from common.evidence.compare import sequential
from common.study import page, simulations

BOUNDS = {"false positives": (0, intervals.ALPHA), "coverage": (0.92, 0.98), "found": (intervals.POWER, 1)}


@pytest.fixture(scope="module")
def shares():
    """The forecasts, which no rule reads and no random number depends on, are left out: they take long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "detectable", lambda *_: None)
        patch.setattr(intervals, "sign_detectable", lambda *_: None)
        patch.setattr(sequential, "_Future", lambda *_: None)
        return {name: simulations.simulate_all(truths) for name, truths in page.SIMULATED.items()}


@pytest.mark.parametrize("name", page.SIMULATED)
def test_no_rule_is_wrong_more_often_than_it_says_but_where_an_assumption_does_not_hold(name, shares):
    rows = simulations.rows_of(page.SIMULATED[name])
    for (rule, truth, kind), share in zip(rows, shares[name], strict=True):
        least, most = BOUNDS[kind]
        assert (least <= share <= most) == (name == "simulations"), (rule, truth, kind, share)
    assert simulations.NUM_STUDIES >= 2000


@pytest.mark.parametrize("name", page.SIMULATED)
def test_the_page_shows_these_shares(name, shares):
    """To a point: other versions of NumPy and SciPy round differently."""
    text = page.TABLE_PAGE.read_text(encoding="utf-8")
    table = text.partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) ([\d.]+) % \|$", table, re.MULTILINE)
    assert [row[:3] for row in rows] == simulations.rows_of(page.SIMULATED[name])
    assert [float(row[3]) for row in rows] == pytest.approx([100 * share for share in shares[name]], abs=1)
    assert page.fill_block(text, name, table.lstrip()) == text


def test_the_findings_on_the_page_are_those_of_the_committed_studies():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.fill_blocks(text, page.BLOCKS) == text
    assert "`optimized`" in page.BLOCKS["sweeps"]()
    front = page.FRONT.read_text(encoding="utf-8")
    assert page.fill_block(front, "searched", page.describe_searched()) == front
    with pytest.raises(ValueError, match="0 blocks are called x"):
        page.fill_block(text, "x", "")


def test_without_holms_correction_equal_recipes_and_idle_switches_seem_to_differ(monkeypatch):
    monkeypatch.setattr(simulations, "NUM_STUDIES", 200)
    monkeypatch.setattr(intervals, "holm", list)
    assert simulations.share(simulations.false_gains, 14, seed=1) > 0.1


def test_without_the_step_of_accuracies_one_of_two_equal_curves_seems_to_be_ahead(monkeypatch):
    monkeypatch.setattr(intervals, "rounding_squares", lambda counts, resolution: 0 * counts)
    assert simulations.share(simulations.false_leads, simulations.SATURATING, 360, 2, seed=1) > 0.05


def test_holms_correction_is_that_of_the_paper():
    assert intervals.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert intervals.holm([0.9, 0.8]) == [1.0, 1.0] and intervals.holm([]) == []
