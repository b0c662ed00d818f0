"""List the methods, of all benchmarks or of one, or print the card of a method.

A card says what its method does, what it costs, and how to call it in your own loop. The card is read from
the docstring and the Config of the method's file; nothing is imported, so no torch is needed. --out writes
the page of all cards. --measure SIZE times training steps with and without each method that can act at that
size; the figures go to results/study/methods, where the cards find them.

examples:
  ttt list methods bert
  ttt list methods unpad
  ttt list methods --out METHODS.md
  ttt list methods --measure mini --dry-run
"""

import argparse
import textwrap
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path

from common.arguments import add_shared, benchmark_names, whole_number
from common.errors import EXIT_OK, UserError
from common.evidence.page import fill_template
from common.files import save_text
from common.repository import SIZES
from common.training import card as method_cards
from common.training.card import Card, Setting, cards, check_card, find_card, plain_loop, used_by

WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a method, to print its card, or a benchmark, to list the methods that it can use"
    parser.add_argument("name", nargs="?", help=text)
    add_shared(parser, "--out", help="write the page of all cards, NAME.md (Markdown)")
    text = "time steps with and without each method, or the one called NAME"
    parser.add_argument("--measure", choices=SIZES, help=text)
    text = "pairs of timings for each method; default: 4"
    parser.add_argument("--pairs", type=whole_number(2, 100), metavar="N", help=text)
    text = "with --measure: say how long it takes, and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    add_shared(parser, "--results")


def main(args: argparse.Namespace) -> int:
    if args.out and (args.name or args.measure):
        raise UserError("--out makes the page of all", hint=f"leave out '{args.name or '--measure'}'")
    if args.measure:
        from common.study.method_steps import measure  # scipy and torch, which cards do without

        return measure(args)
    if args.dry_run or args.pairs:
        raise UserError("needs --measure", where="--dry-run" if args.dry_run else "--pairs")
    benchmark = benchmark_names().get(args.name, args.name)
    if args.out:
        write(args.out)
    elif benchmark in (None, *benchmark_names().values()):
        print(overview(benchmark))
    else:
        print(card_text(check_card(find_card(args.name))))
    return EXIT_OK


def write(path: Path) -> None:
    if path.suffix != ".md":
        raise UserError("expected a file NAME.md", where=f"--out {path}")
    num_methods = len([*map(check_card, cards())])
    save_text(path, page())
    print(f"{path}: {num_methods} methods")


def overview(benchmark: str | None) -> str:
    """Return the titles of all methods, or of those that a benchmark can use, a line each."""
    lines: list[str] = []
    for group, group_cards in method_cards.cards_by_group(benchmark).items():
        lines += [*[""] * bool(lines), f"{group}:"]
        lines += [f"  {card.name:25}{card.title}" for card in group_cards]
    return "\n".join([*lines, "", "'ttt list methods NAME' prints a card"])


def signature(setting: Setting) -> str:
    default = "required" if setting.default is None else f"default {setting.default}"
    return ", ".join(filter(None, (setting.kind, setting.limits, default)))


def code(card: Card) -> str:
    """Return the imports and lines that a plain loop needs, below a comment for each place."""
    imports, lines = plain_loop(card)
    blocks = [[f"# {place}", *(line for _, line in group)] for place, group in groupby(lines, itemgetter(0))]
    return "\n".join([*imports, *[""] * bool(imports), *chain(*blocks)])


def users(card: Card) -> str:
    return ", ".join(used_by(card.name)) or "none: off unless you switch it on"


def card_text(card: Card) -> str:
    lines = [f"{card.name}: {card.title} ({card.path.name} in {card.module.rpartition('.')[0]})", ""]
    for heading, text in card.sections.items():
        if heading != "Use":
            lines += textwrap.wrap(f"{heading}. {text}", WIDTH, subsequent_indent="  ")
    lines += textwrap.wrap(f"Measured. {card.measured}", WIDTH, subsequent_indent="  ")
    lines += ["", "settings:" if card.settings else "settings: none"]
    lines += [f"  {setting.name}: {signature(setting)}; {setting.description}" for setting in card.settings]
    required = ", ".join(f"{setting.name}: ..." for setting in card.settings if setting.default is None)
    switch = f"{card.name}: {{{required}}}"
    lines += ["", f"in a configuration, under methods:  {switch}", f"used by: {users(card)}"]
    lines += ["", "in a plain PyTorch loop:", textwrap.indent(code(card), "  ")]
    return "\n".join(lines)


def page() -> str:
    template = Path(__file__).parent / "templates" / "methods.md.j2"
    filters = {"cell": lambda text: text.replace("|", r"\|")}
    values = {"groups": method_cards.cards_by_group(), "users": users, "used_by": used_by, "code": code}
    return fill_template(template, filters, **values)
