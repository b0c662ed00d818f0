"""The speed of steps with each method: methods that act at size mini, kept figures, text of the card."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.intervals import student_of_logs
from common.files import save_text
from common.measure import steptime
from common.repository import commit
from common.study import method_steps
from common.training import card as card_module
from common.training.card import cards, find_card
from tests.command import one_line, ttt_here


@pytest.fixture
def times(tmp_path, monkeypatch):
    """Pairs in the place of timings, by method; a method without any fails."""
    pairs = {"ema": [(100.0, 98.0), (110.0, 109.0), (90.0, 89.0), (105.0, 103.0)]}

    def time_pair(configs, number):
        (method,) = configs[1].methods.keys() - configs[0].methods.keys()
        if method not in pairs:
            raise UserError("its process died")
        return pairs[method][number]

    monkeypatch.setattr(steptime, "buildable", lambda config: None)
    monkeypatch.setattr(method_steps.step_pairs, "time_pair", time_pair)
    monkeypatch.setattr(method_steps, "expect_pair_s", lambda benchmark, size: 30.0)
    monkeypatch.setattr(card_module, "MEASURED", tmp_path / "study" / "methods")
    return pairs


def measure(tmp_path, only="ema", num_pairs=4, dry_run=False):
    options = {"measure": "mini", "name": only, "pairs": num_pairs, "dry_run": dry_run, "results": tmp_path}
    return method_steps.measure(SimpleNamespace(**options))


def test_most_methods_can_act_at_size_mini_and_the_others_say_why():
    subjects, reasons = method_steps.choose_subjects("mini", None)
    names = {subject.method: subject.names for subject in subjects}
    assert len(names) == len(subjects) >= 30 and names.keys() | reasons.keys() == {
        card.name for card in cards()
    }
    assert names.keys().isdisjoint(reasons) and all(reasons.values())
    assert {"compile", "compile_layers", "fp8"} <= reasons.keys()
    assert names["channels_last"] == ("baseline-channels_last", "baseline")
    assert names["ema"] == ("baseline", "baseline+ema")
    last = "baseline+unpad+sparse_head"
    assert names["last_layer_subset"] == (last, f"{last}+last_layer_subset")
    for subject in subjects:
        without, with_it = (set(config.methods) for config in subject.configs)
        assert subject.method in with_it - without, subject


def test_the_card_takes_its_figure_from_the_file(tmp_path, times, capsys):
    assert find_card("ema").measured == "Not measured."
    assert measure(tmp_path, dry_run=True) == EXIT_OK and not list(tmp_path.iterdir())
    assert "about 2 minutes" in capsys.readouterr().out
    assert measure(tmp_path) == EXIT_OK
    (path,) = tmp_path.rglob("*.json")
    assert path.name == "bert-mini-ema.json" and json.loads(path.read_text())["pairs"] == list(
        map(list, times["ema"])
    )
    limits = student_of_logs([other / one for one, other in times["ema"]])
    text = find_card("ema").measured
    for expected in (
        f"0.99x ({limits.low:.2f} to {limits.high:.2f})",
        "`baseline+ema` against `baseline` in 4 pairs, language_bert at size mini, a proxy",
        f"commit {commit()[:7]}",
    ):
        assert expected in text


def read_pairs(folder):
    (path,) = folder.rglob("*.json")
    return json.loads(path.read_text())["pairs"]


def test_pairs_that_are_there_are_kept_and_those_of_another_state_are_not_continued(
    tmp_path, times, monkeypatch
):
    assert measure(tmp_path, num_pairs=2) == EXIT_OK
    there = read_pairs(tmp_path)
    monkeypatch.setattr(method_steps.repository, "commit", lambda: "another")
    assert measure(tmp_path, num_pairs=2) == EXIT_OK and read_pairs(tmp_path) == there
    times["ema"] = [(1.0, 2.0)] * 3
    assert measure(tmp_path, num_pairs=3) == EXIT_OK and read_pairs(tmp_path) == [[1.0, 2.0]] * 3
    times["ema"].append((1.0, 3.0))
    assert measure(tmp_path) == EXIT_OK and read_pairs(tmp_path) == [[1.0, 2.0]] * 3 + [[1.0, 3.0]]


@pytest.mark.parametrize(("key", "other"), [("hardware", "another"), ("names", ["baseline", "other"])])
def test_pairs_of_another_machine_or_other_names_are_not_taken_for_this_ones(tmp_path, times, key, other):
    assert measure(tmp_path, num_pairs=2) == EXIT_OK
    (path,) = tmp_path.rglob("*.json")
    figure = json.loads(path.read_text())
    path.write_text(json.dumps(figure | {key: other, "pairs": [[1.0, 2.0]] * 2}))
    assert measure(tmp_path, num_pairs=2) == EXIT_OK
    assert json.loads(path.read_text()) == figure


def test_pairs_that_another_command_adds_before_the_lock_are_kept(tmp_path, times, monkeypatch):
    @contextmanager
    def lock_folders(folders):
        (subject,), _ = method_steps.choose_subjects("mini", "ema")
        figure = method_steps.summarize(subject, [(1.0, 2.0), (1.0, 3.0)])
        save_text(subject.path(tmp_path), figure.model_dump_json())
        yield

    monkeypatch.setattr(method_steps.run_sets, "lock_folders", lock_folders)
    assert measure(tmp_path, num_pairs=2) == EXIT_OK and read_pairs(tmp_path) == [[1.0, 2.0], [1.0, 3.0]]


def test_a_method_that_fails_leaves_no_file(tmp_path, times, capsys):
    assert measure(tmp_path, "swa") == EXIT_FINDINGS
    assert "swa: its process died" in capsys.readouterr().out and not list(tmp_path.rglob("*.json"))


def test_mistakes_are_one_line():
    for arguments in (["--dry-run"], ["--measure", "mini", "--pairs", "1"], ["blurpol", "--measure", "mini"]):
        one_line(ttt_here("methods", *arguments))
