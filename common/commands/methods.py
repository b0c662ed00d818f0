"""List the methods, or print the card of one: what it does, what it costs, how to call it in your own loop.

A card is the docstring of the method's file, its settings are those of its Config; nothing is imported, so no
torch is needed. --write makes the one page of all cards.

examples:
  ttt methods
  ttt methods blurpool
  ttt methods --write METHODS.md
"""

import argparse
import textwrap
from pathlib import Path

from common import files
from common.errors import EXIT_OK, UserError
from common.training.card import Card, Setting, cards, find_card, plain_loop, used_by

WIDTH = 110
INTRODUCTION = """\
# Methods

Each speed-up is one file: a plain function that anyone can call on their own model, and the few lines that
hook it into this suite, where a configuration switches it on under `methods:`. This page is made from the
files' docstrings by `ttt methods --write METHODS.md`; `ttt methods NAME` prints one card.
"""
LOOP = """\
## In your own loop

The lines of a method stand in these places of a plain PyTorch loop; no other part of this suite is needed.
Data sets of images have a `transform` from PIL images to what the model takes, as torchvision's do. For a
Hugging Face BERT a batch is a dictionary of `input_ids`, `attention_mask`, `token_type_ids` and `labels`, and
the loss `model(**batch).loss`. `tests/test_plain_loop.py` runs the lines of every method.

```python
# With the data: dataset, evaluation_dataset, num_epochs
# With the model: model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# With the optimizer: optimizer
for epoch in range(num_epochs):
    # Each epoch: epoch, from 0
    for images, labels in loader:
        # Each batch: images, labels or batch; step, from 0, and num_steps
        loss = F.cross_entropy(model(images), labels)  # or For the loss
        optimizer.zero_grad()
        loss.backward()
        # Before each step
        optimizer.step()
        # After each step
```
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", nargs="?", help="print the card of this method")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of all cards (Markdown)")


def main(args: argparse.Namespace) -> int:
    """Print the list or a card, or write the page."""
    if args.name and args.write:
        raise UserError("--write makes the page of all methods", hint=f"leave out '{args.name}'")
    if args.write:
        write(args.write)
    elif args.name:
        print(card_text(find_card(args.name)))
    else:
        print(overview())
    return EXIT_OK


def write(path: Path) -> None:
    """Write the page, whole or not at all."""
    if path.suffix != ".md":
        raise UserError("expected a file NAME.md", where=f"--write {path}")
    try:
        with files.write_whole(path) as draft:
            draft.write_text(page())
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(path)) from None
    print(f"{path}: {len(cards())} methods")


def overview() -> str:
    """Return the title of each method, a line each, by the benchmark that it is for."""
    lines: list[str] = []
    for group, found in grouped().items():
        lines += [*[""] * bool(lines), f"{group}:"]
        for card in found:
            lines.append(f"  {card.name:25}{card.title}")
    return "\n".join([*lines, "", "'ttt methods NAME' prints a card"])


def grouped() -> dict[str, list[Card]]:
    """Return the cards by whom they are for."""
    found: dict[str, list[Card]] = {}
    for card in cards():
        package = card.module.split(".")[0]
        found.setdefault("any model" if package == "common" else package, []).append(card)
    return found


def signature(setting: Setting) -> str:
    """Return a setting's type, limits and default."""
    limits = f", {setting.limits}" if setting.limits else ""
    default = "required" if setting.default is None else f"default {setting.default}"
    return f"{setting.kind}{limits}, {default}"


def code(card: Card) -> str:
    """Return the imports and lines that a plain loop needs."""
    imports, lines = plain_loop(card)
    shown, place = [], ""
    for where, line in lines:
        if where != place:
            shown.append(f"# {where}")
        place = where
        shown.append(line)
    return "\n".join([*imports, *[""] * bool(imports), *shown])


def switched_on(card: Card) -> str:
    """Return what to write in a configuration."""
    required = {each.name: "..." for each in card.settings if each.default is None}
    values = ", ".join(f"{name}: {value}" for name, value in required.items())
    return f"{card.name}: {{{values}}}"


def users(card: Card) -> str:
    """Return the configurations that use it."""
    return ", ".join(used_by(card.name)) or "none: off unless you switch it on"


def card_text(card: Card) -> str:
    """Return a card for the screen."""
    lines = [f"{card.name}: {card.title} ({card.path.name} in {card.module.rpartition('.')[0]})", ""]
    for heading, text in card.sections.items():
        if heading != "Use":
            lines += textwrap.wrap(f"{heading}. {text}", WIDTH, subsequent_indent="  ")
    lines += ["", "settings:" if card.settings else "settings: none"]
    lines += [f"  {each.name}: {signature(each)}; {each.description}" for each in card.settings]
    lines += ["", f"in a configuration, under methods:  {switched_on(card)}", f"used by: {users(card)}"]
    lines += ["", "in a plain PyTorch loop:", textwrap.indent(code(card), "  ")]
    return "\n".join(lines)


def page() -> str:
    """Return the page of all cards."""
    rows = ["| method | what it does | relieves | used by |", "|---|---|---|---|"]
    parts = []
    for group, found in grouped().items():
        parts.append(f"## {group[0].upper()}{group[1:]}\n" if group == "any model" else f"## {group}\n")
        for card in found:
            used = ", ".join(f"`{each}`" for each in used_by(card.name)) or "-"
            relieves = ", ".join(card.relieves)
            rows.append(f"| [`{card.name}`](#{card.name}) | {cell(card.summary)} | {relieves} | {used} |")
            parts.append(card_markdown(card))
    return "\n".join([INTRODUCTION, *rows, "", LOOP, *parts]).rstrip("\n") + "\n"


def card_markdown(card: Card) -> str:
    """Return a card for the page."""
    lines = [f"### {card.name}", "", f"{card.title}. [{card.path.name}]({card.module.replace('.', '/')}.py)"]
    for heading, text in card.sections.items():
        if heading != "Use":
            lines += ["", f"**{heading}.** {text}"]
    lines += ["", f"**Used by.** {users(card)}."]
    if card.settings:
        lines += ["", "| setting | type and limits | default | |", "|---|---|---|---|"]
        for each in card.settings:
            kind = f"{each.kind}{', ' * bool(each.limits)}{each.limits}"
            default = "required" if each.default is None else f"`{each.default}`"
            lines.append(f"| `{each.name}` | `{cell(kind)}` | {default} | {cell(each.description)} |")
    return "\n".join([*lines, "", "```python", code(card), "```", ""])


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", r"\|")
