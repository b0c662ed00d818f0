"""Commands in a terminal: nothing is cut, no number is wrapped.

tests/golden has it at 80 columns; `.venv/bin/python -m tests.terminal` writes it anew.
"""

import re

import pytest

from common.repository import ROOT
from common.run.stepclock import join_parts, time_left
from tests.runs import BERT, open_place
from tests.terminal import ESCAPE, GOLDEN, MISTAKES, SEEN_AT_80, SETS, answers, seen, text_of

FIGURES = ("0.958", "0.896 to 1.025", "0.321", "0.291 to 0.367", "2.99x", "2.59 to 3.33", "23.366 to 24.420")


@pytest.mark.parametrize("name", SEEN_AT_80)
def test_80_columns_show_what_they_showed(name):
    code, sent = seen(80, *SEEN_AT_80[name])
    text = text_of(sent)
    assert code == 0 and max(map(len, text.splitlines())) <= 80
    assert text == (GOLDEN / name).read_text()


def test_wrong_inputs_are_answered_in_one_line_each(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(MISTAKES) == 25
    assert answers() == (GOLDEN / "mistakes.txt").read_text()


def test_an_old_name_works_and_a_person_is_told_the_new_one():
    lines = (("list", "methods", "unpad"), ("methods", "unpad"))
    new, old = (text_of(seen(80, *words)[1]) for words in lines)
    assert old == f"note: ttt methods is now: ttt list methods\n{new}"


@pytest.mark.parametrize(("columns", "options"), [(80, []), (120, []), (200, []), (80, ["--wide"])])
def test_score_shows_minutes_interval_and_speed_up_whole_at_every_width(columns, options):
    code, sent = seen(columns, "score", *options, *SETS)
    text = text_of(sent)
    assert code == 0 and all(figure in text for figure in FIGURES)
    shows_rest = columns == 200 or bool(options)
    assert ("107,618,028" in text) == ("18,240" in text) == shows_rest
    assert ("ttt score --wide" in text) != shows_rest
    if not options:
        assert max(map(len, text.splitlines())) <= columns


PARTS = {
    "elapsed": "45.2 s",
    "step": "step 112/17500",
    "rate": "24674 sequences/s",
    "loss": "loss 6.123",
    "quality": "quality 0.1234 of 0.2",
    "left": "about 357 s to the last step",
}


def test_the_status_line_leaves_out_whole_parts_the_least_important_first():
    whole = join_parts(PARTS, None)
    assert whole.strip().split("  ") == list(PARTS.values())
    for width in range(len(whole) + 1):
        line = join_parts(PARTS, width)
        assert len(line) <= width and set(line.strip().split("  ")) <= {*PARTS.values(), ""}
    assert {"quality", "left", "step"} <= {name for name in PARTS if PARTS[name] in join_parts(PARTS, 79)}
    assert join_parts(PARTS, 30).strip() == PARTS["quality"]


@pytest.mark.parametrize(
    ("steps", "per_s", "expected_s", "text"),
    [
        (100, 10, 0.2, "about 1 s left"),
        (100, 10, -3, "about 10 s to the last step"),
        (17500, 0.1, 0, "about 49 h to the last step"),
    ],
)
def test_the_time_left_is_never_0_and_that_of_the_steps_where_no_run_was_timed(
    steps, per_s, expected_s, text
):
    assert time_left(steps, per_s, expected_s) == text


@pytest.mark.on_demand
def test_the_status_line_of_a_run_fits_80_columns_and_says_what_was_not_evaluated(tmp_path):
    long = ("max_duration=400ba", "evaluate_every=200ba", "evaluate_from=200ba", "global_batch_size=16")
    with open_place(tmp_path) as place:
        code, sent = seen(80, *place.arguments((*BERT, *long)))
    drawn = [part for part in re.split(r"[\r\n]+", ESCAPE.sub("", sent)) if "  step " in part]
    assert code == 1 and drawn and all(len(part) < 80 for part in drawn)
    assert all(re.search(r"\d (s|min|h) (left|to the last step)$", part.rstrip()) for part in drawn), drawn
    assert "not evaluated yet" in drawn[0] and "quality" not in drawn[0]
    assert "quality 0." in drawn[-1] and "nan" not in sent
