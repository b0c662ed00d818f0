"""Method cards: what is read from a file, and `ttt list methods` as a person types it."""

import json
import re
import sys

import pytest
from pydantic import Field

from common.commands.methods import page
from common.config.schema import Strict
from common.config.validation import validate
from common.errors import UserError
from common.repository import available_methods
from common.training.card import LINE, cards, check_card, find_card, plain_loop, read_card, used_by
from common.training.method import Method, apply_hook
from common.training.registry import kind_of
from tests.command import ttt_here

FILE = '''"""A name.

What. Does one thing, in
two lines. And more.
Effect on quality. None.
Effect on time. Half.
Relieves. Backward pass, optimizer: the rest (of, it).
When not. Never.
Use. With the model after unpad, sparse_head: `model = halve(model,
0.5)`. After each step: `count(model)`.
Source. Somewhere.
Unlike Composer. Nothing.
"""

from torch import nn


def halve(model: nn.Module) -> None: ...


class Halve(Method):
    class Config(Strict):
        share: Fraction
        mode: Literal["a", "b"] = "a"
        names: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, description="which")
        every_steps: int | None = Field(default=None, ge=1, lt=9, description="how often")
'''


def test_a_card_is_read_from_its_file(tmp_path, monkeypatch):
    (tmp_path / "halve.py").write_text(FILE)
    monkeypatch.setattr("common.training.card.ROOT", tmp_path)
    card = read_card("halve", "halve")
    assert card.title == "A name" and card.summary == "Does one thing, in two lines"
    assert card.relieves == ("backward pass", "optimizer")
    assert card.use == [("With the model", "model = halve(model, 0.5)"), ("After each step", "count(model)")]
    assert card.after == ["unpad", "sparse_head"]
    assert [
        (each.name, each.kind, each.default, each.limits, each.description) for each in card.settings
    ] == [
        ("share", "float", None, ">= 0, <= 1", ""),
        ("mode", "Literal['a', 'b']", "'a'", "", ""),
        ("names", "list[str]", None, "", "which"),
        ("every_steps", "int | None", "None", ">= 1, < 9", "how often"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("Source. Somewhere.", "", "halve.py: its docstring has no section `Source.`"),
        ("Backward pass, opt", "Backward, opt", "halve.py: `Relieves.` says 'backward'; it starts with some"),
        (
            "With the model after",
            "Before step after",
            "halve.py: before `model = halve(model, 0.5)` in",
        ),
        ("`count(model)`", "`count(`", "halve.py: `count(` in `Use.` is no Python"),
        ("def halve(", "def halve", "halve.py:18: is no Python: "),
    ],
)
def test_a_fault_of_a_card_is_named_with_its_file(tmp_path, monkeypatch, before, after, message):
    assert before in FILE
    (tmp_path / "halve.py").write_text(FILE.replace(before, after))
    monkeypatch.setattr("common.training.card.ROOT", tmp_path)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        check_card(read_card("halve", "halve"))


METHOD = "from common.training.method import Method\nclass OwnOne(Method):\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_here", "own_one.py: cannot be imported: ModuleNotFoundError: No module"),
        ("class Own: ...", "own_one.py: has no class OwnOne; a method's class has the name of its file"),
        ("class OwnOne: ...", "own_one.py: OwnOne has to be a Method"),
        (
            f"{METHOD} def on_step_end(self): ...",
            "own_one.py: `on_step_end` is no hook .* after_step, batch",
        ),
        (f"{METHOD} def after_steps(self): ...", "`after_steps` is no hook .*; did you mean after_step"),
    ],
)
def test_a_method_without_its_class_is_a_mistake(tmp_path, monkeypatch, text, message):
    (tmp_path / "own_one.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_one", raising=False)
    with pytest.raises(UserError, match=message):
        kind_of("own_one", "own_one")


def test_a_hook_that_returns_nothing_and_a_default_that_its_setting_refuses_are_mistakes():
    class Own(Method):
        class Config(Strict):
            share: float = Field(default=2.0, le=1)

        def loss(self, loss): ...

    with pytest.raises(UserError, match="methods.own: its `loss` returned nothing"):
        apply_hook(Own("own", None), "loss", abs)
    with pytest.raises(UserError, match="methods.own.share: .* 1"):
        validate(Own.Config, {}, {}, ("methods", "own"))


def test_lines_of_other_methods_come_before_and_everything_is_imported():
    imports, lines = plain_loop(find_card("last_layer_subset"))
    assert [code for _, code in lines] == [
        "model = unpad(model)",
        "read_masked_tokens(model)",
        "compute_needed_tokens(model)",
    ]
    assert "from language_bert.methods.unpad import unpad" in imports and len(imports) == 3
    imports, _ = plain_loop(find_card("label_smoothing"))
    assert "from torch.nn import functional as F" in imports


def test_nothing_of_use_is_dropped_but_the_places():
    for card in cards():
        assert LINE.sub("", card.sections["Use"]).strip(" ,.") == "", f"{card.module}: say it in the code"


def test_configurations_that_use_a_method_are_found():
    assert "language_bert optimized" in used_by("unpad") and "language_bert baseline" not in used_by("unpad")
    assert used_by("alibi") == []


@pytest.mark.parametrize(
    ("arguments", "benchmark"),
    [([], ""), (["bert"], "language_bert"), (["image_classification"], "image_classification")],
)
def test_the_list_names_every_method_or_those_that_a_benchmark_can_use(arguments, benchmark):
    done = ttt_here("list", "methods", *arguments)
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    every = {card.name for card in cards()}
    assert listed == set(available_methods(benchmark)) < every if benchmark else listed == every
    assert max(map(len, done.stdout.splitlines())) < 80 and "..." not in done.stdout


def measured_file(folder, **changes):
    figures = {
        "method": "ema",
        "benchmark": "language_bert",
        "size": "mini",
        "names": ["baseline", "baseline+ema"],
    }
    figures |= {"pairs": [[2.0, 1.0], [2.0, 1.0]], "ratio": 0.5, "low": 0.4, "high": 0.6}
    figures |= {"hardware": "1xH100", "versions": {}, "commit": "0123456789"}
    path = folder / "bert-mini-ema.json"
    path.write_text(json.dumps(figures | changes))
    return path


def test_a_card_tells_what_was_measured_in_more_than_one_pair(tmp_path, monkeypatch):
    monkeypatch.setattr("common.training.card.MEASURED", tmp_path)
    assert find_card("ema").measured == "Not measured." and "no method was measured yet." in page()
    path = measured_file(tmp_path)
    assert "0.50x (0.40 to 0.60)" in find_card("ema").measured and "was measured yet" not in page()
    measured_file(tmp_path, low=None, high=None, pairs=[[2.0, 1.0]])
    assert find_card("ema").measured == "Not measured."
    path.write_text(path.read_text()[:-9])
    with pytest.raises(UserError, match=r"bert-mini-ema\.json: no figures of `ttt list methods --measure`"):
        print(find_card("ema").measured)


def test_a_card_is_printed():
    done = ttt_here("methods", "progressive_resizing")
    assert done.returncode == 0, done.stderr
    for expected in (
        "Effect on time. A step costs",
        "delay_fraction: float, >= 0, <= 1, required; the part of all epochs",
        "used by: image_classification mosaic",
        "from image_classification.methods.progressive_resizing import image_size_px, resize_images",
    ):
        assert expected in done.stdout


def test_the_page_is_written_whole(tmp_path):
    done = ttt_here("methods", "--out", tmp_path / "PAGE.md")
    assert done.returncode == 0 and f"{len(cards())} methods" in done.stdout
    assert (tmp_path / "PAGE.md").read_text().startswith("# Methods\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["blurpol"], "no such method 'blurpol'; did you mean blurpool?"),
        (["blurpool", "--out", "PAGE.md"], "leave out 'blurpool'"),
        (["--out", "PAGE.md", "--measure", "mini"], "leave out '--measure'"),
        (["--pairs", "3"], "--pairs: needs --measure"),
        (["--out", "page.html"], "expected a file NAME.md"),
        (["--out", "README.md/PAGE.md"], "README.md/PAGE.md: cannot write"),
    ],
)
def test_mistakes_are_answered_with_one_line(arguments, message):
    done = ttt_here("methods", *arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and message in done.stderr
