"""Prices: the rows that come with the suite, a person's own, and files that are refused."""

import pytest

from common.errors import UserError
from common.study.prices import PRICES, choose_prices, load_prices

ROW = """
  - name: mine
    cloud: aws
    region: us-east-1
    instance: p4d.24xlarge
    device: A100
    num_devices: 8
    on_demand: 24.0
    spot: 8.0
    date: 2026-01-21
    source: a page
"""


def write(tmp_path, text):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    return path


def test_the_published_setting_costs_what_was_published():
    published = next(row for row in load_prices() if row.name == "published-8xA100")
    assert published.cost(27, 8) == pytest.approx(14.77, abs=0.05)  # "about 27 minutes for $14.77"
    assert all(row.source and row.date for row in load_prices())


def test_devices_are_paid_by_their_share_and_an_own_machine_whole(tmp_path):
    (row,) = load_prices(write(tmp_path, "prices:" + ROW))
    assert row.cost(30, 8) == pytest.approx(12.0) and row.cost(30, 8, spot=True) == pytest.approx(4.0)
    assert row.cost(30, 2) == pytest.approx(3.0) and row.cost(30, 16) == pytest.approx(24.0)
    mine, own = choose_prices([row], ["mine", "own=0.12"])
    assert mine == row and own.cost(30, 8) == pytest.approx(0.06) and own.cost(30, 8, spot=True) is None
    assert own.cost(30, 16, num_machines=2) == pytest.approx(0.12)
    assert row.is_of("8xA100-SXM4-80GB") and own.is_of("2cpu-EPYC")
    assert not row.is_of("1xH200") and not row.is_of("2cpu-EPYC")
    large = row.model_copy(update={"device": "A100-80GB"})
    assert large.is_of("8xA100-SXM4-80GB") and large.is_of("8xA100") and not large.is_of("8xA100-PCIE-40GB")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("on_demand: 24.0", "on_demand: -1", r"prices.yaml:8: prices\.0\.on_demand: input should be greater"),
        ("date: 2026-01-21", "date: 21.01.2026", r"prices.yaml:10: prices\.0\.date"),
        ("a page", "a page\n    sauce: x", r"prices.yaml:12: prices\.0\.sauce: unknown key"),
        ("a page", "a page" + ROW, "prices.yaml:12: 'mine' is the name of another"),
    ],
)
def test_a_row_is_strict(tmp_path, before, after, says):
    with pytest.raises(UserError, match=says):
        load_prices(write(tmp_path, ("prices:" + ROW).replace(before, after)))


@pytest.mark.parametrize(
    ("name", "says"),
    [("aws-p5-2205", "did you mean aws-p5-20"), ("own=0", "no price is called 'own=0'")],
)
def test_a_name_that_no_row_has_is_answered_with_the_nearest(name, says):
    with pytest.raises(UserError, match=says):
        choose_prices(load_prices(PRICES), [name])
