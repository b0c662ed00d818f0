"""The card of a method: what the docstring of its file says, read without importing it, so without torch.

What.               what it does
Effect on quality.  published and measured
Effect on time.     the same
Relieves.           entries of RELIEVES, with commas; free text after a full stop, colon or semicolon
When not.           where it does harm
Use.                its one or two lines in a plain PyTorch loop, each `PLACE: code in backticks`;
                    `PLACE after NAME, NAME:` where the lines of other methods come before
Source.             paper, published code
Unlike Composer.    every default and form that differs from MosaicML Composer's
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from common.arguments import benchmark_names
from common.config.names import read_methods
from common.config.schema import Strict
from common.errors import UserError, nearest
from common.evidence.paths import STUDY
from common.repository import ROOT, WORKSPACE, available_methods, benchmarks, module_file

SECTIONS = (
    "What",
    "Effect on quality",
    "Effect on time",
    "Relieves",
    "When not",
    "Use",
    "Source",
    "Unlike Composer",
)
RELIEVES = (
    "data loading",
    "host-to-device copy",
    "forward pass",
    "backward pass",
    "optimizer",
    "communication",
    "evaluation",
    "number of steps",
    "everything",
    "nothing",
)
PLACES = (  # where a line of `Use` stands in a plain loop, in this order
    "With the data",  # before anything is built on them
    "With the model",  # before the optimizer is built
    "With the optimizer",  # before the first step
    "Each epoch",  # before its first batch
    "Each batch",  # before the model sees it
    "For the loss",  # in the place of the plain one
    "Before each step",  # between backward and step
    "After each step",
)
MEASURED = WORKSPACE / "results" / STUDY / "methods"
USUAL = {"F": "torch.nn", "v2": "torchvision.transforms"}  # names that a person has imported anyway
LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
HEADING = re.compile(rf"^({'|'.join(SECTIONS)})\.(?: |$)", re.MULTILINE)
LINE = re.compile(rf"(?:({'|'.join(PLACES)})(?: after ([a-z0-9_, ]+))?: )?`([^`]+)`")


class Measured(Strict):
    """The ratio of steps per second with and without a method, as `ttt list methods --measure` writes it.

    `pairs` are samples/s without and with it, in new processes for each pair; loader and evaluation excluded.
    """

    method: str
    benchmark: str
    size: str
    names: tuple[str, str]  # configurations without it and with it
    pairs: tuple[tuple[float, float], ...]
    ratio: float
    low: float | None = None  # its interval; None of a single pair
    high: float | None = None
    hardware: str
    versions: dict[str, str]
    commit: str

    @property
    def speed(self) -> str:
        limits = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.ratio:.2f}x{limits}"

    def describe(self) -> str:
        proxy = ", a proxy" if self.size == "mini" else ""
        return (
            f"Training steps {self.speed} as fast as without it, loader and evaluation "
            f"apart: `{self.names[1]}` against `{self.names[0]}` in {len(self.pairs)} pairs, "
            f"{self.benchmark} at size {self.size}{proxy}, {self.hardware}, commit {self.commit[:7]}. "
            "Quality: not measured."
        )


def read_measured(file: Path) -> Measured:
    """Read a file of `ttt list methods --measure`. Raises UserError for anything else."""
    try:
        return Measured.model_validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        hint = "remove it and measure again"
        raise UserError("no figures of `ttt list methods --measure`", where=str(file), hint=hint) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key of a method's Config, as it is written there; `default` is None where it must be given."""

    name: str
    kind: str
    default: str | None
    limits: str
    description: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """The card of a method; `title` is the first line of its file's docstring."""

    name: str
    module: str
    title: str
    sections: dict[str, str]
    settings: tuple[Setting, ...]

    @property
    def relieves(self) -> tuple[str, ...]:
        """The parts of a training that it relieves; an unknown word is returned as it is."""
        words = re.split(r"[.:;(]", self.sections.get("Relieves", ""))[0]
        return tuple(" ".join(part.split()).lower() for part in words.split(",") if part.strip())

    @property
    def measured(self) -> str:
        """The committed measurements of this method, in words; those of a single pair are left out."""
        figures = [read_measured(file) for file in sorted(MEASURED.glob(f"*-{self.name}.json"))]
        return " ".join(figure.describe() for figure in figures if figure.low is not None) or "Not measured."

    @property
    def summary(self) -> str:
        return self.sections["What"].split(". ")[0].rstrip(".")

    @property
    def use(self) -> list[tuple[str, str]]:
        """The lines of its section `Use`, each with its place in a plain loop, one of PLACES."""
        place, lines = "", []
        for named_place, _, code in LINE.findall(self.sections.get("Use", "")):
            place = named_place or place
            lines.append((place, format_line(code)))
        return lines

    @property
    def after(self) -> list[str]:
        """The methods whose lines come before those of this one."""
        named = [names for _, names, _ in LINE.findall(self.sections.get("Use", "")) if names]
        return ", ".join(named).split(", ") if named else []

    @property
    def path(self) -> Path:
        return ROOT / module_file(self.module)

    def sources(self) -> dict[str, str]:
        """Map the names that the lines of `use` call to the modules that define them."""
        called = {name for _, code in self.use for name in names_in(code)}
        modules = {name: USUAL[name] for name in called & USUAL.keys()}
        modules |= {name: module for name, module in plain_forms().items() if name in called}
        for node in ast.parse(self.path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in called:
                modules[node.name] = self.module
            elif isinstance(node, ast.ImportFrom):
                modules |= {name.name: str(node.module) for name in node.names if name.name in called}
        return modules


def list_faults(card: Card) -> Iterator[str]:
    """Yield the faults of a card: missing sections, and words that this module does not know."""
    if missing := [name for name in SECTIONS if name not in card.sections]:
        yield f"its docstring has no section {', '.join(f'`{name}.`' for name in missing)}"
    elif tuple(card.sections) != SECTIONS:
        yield f"its sections stand in this order: {', '.join(SECTIONS)}"
    if unknown := [word for word in card.relieves if word not in RELIEVES]:
        yield f"`Relieves.` says '{', '.join(unknown)}'; it starts with some of: {', '.join(RELIEVES)}"
    if not 1 <= len(card.use) <= 2:
        yield "`Use.` holds one or two lines of code in backticks"
    for place, code in card.use:
        if place not in PLACES:
            yield f"before `{code}` in `Use.` stands one of: {', '.join(PLACES)}"
        try:
            ast.parse(code)
        except SyntaxError:
            yield f"`{code}` in `Use.` is no Python"


def check_card(card: Card) -> Card:
    """Return a card. Raises UserError for its first fault."""
    for fault in list_faults(card):
        hint = "see the head of common/training/card.py"
        raise UserError(fault, where=module_file(card.module), hint=hint)
    return card


def format_line(code: str) -> str:
    """Format a line of code: the body of an `if` below it, two spaces before a comment."""
    if code.startswith("if "):
        condition, _, block = code.partition(": ")
        return "\n    ".join([f"{condition}:", *block.split("; ")])
    return code.replace(" # ", "  # ")


@cache
def plain_forms() -> dict[str, str]:
    """Map the name to the module of each function in the files of methods."""
    return {
        node.name: card.module
        for card in cards()
        for node in ast.parse(card.path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def names_in(code: str) -> set[str]:
    nodes = ast.walk(ast.parse(code))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def plain_loop(card: Card) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the imports that a plain loop needs for a method, and its lines with their places, in order."""
    needed = [*map(find_card, card.after), card]
    lines = [line for needed_card in needed for line in needed_card.use]
    lines.sort(key=lambda line: PLACES.index(line[0]))
    names: dict[str, list[str]] = {}
    for name, module in sorted({pair for needed_card in needed for pair in needed_card.sources().items()}):
        names.setdefault(module, []).append("functional as F" if name == "F" else name)
    return [f"from {module} import {', '.join(names[module])}" for module in sorted(names)], lines


def read_card(name: str, module: str) -> Card:
    """Read the card of a method's file. Raises UserError for one that is no Python, or has no docstring."""
    file = module_file(module)
    try:
        tree = ast.parse((ROOT / file).read_text())
    except SyntaxError as error:
        raise UserError(f"is no Python: {error.msg}", where=f"{file}:{error.lineno}") from error
    text = ast.get_docstring(tree)
    if text is None:
        raise UserError("a method needs a docstring with its card", where=file)
    title, *parts = HEADING.split(text)
    sections = {
        heading: " ".join(part.split()) for heading, part in zip(parts[::2], parts[1::2], strict=True)
    }
    return Card(
        name=name,
        module=module,
        title=title.strip().partition("\n")[0].rstrip("."),
        sections=sections,
        settings=tuple(
            read_setting(line)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and node.name == "Config"
            for line in node.body
            if isinstance(line, ast.AnnAssign)
        ),
    )


def read_setting(line: ast.AnnAssign) -> Setting:
    """Read one key: its type, and default, limits and description from its `Field` if it has one."""
    kind, value, description = ast.unparse(line.annotation), line.value, ""
    limits = [">= 0", "<= 1"] if kind == "Fraction" else []
    if kind == "CountOrAuto":
        kind, limits = "int", ["> 0, or auto"]
    kind = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", "float" if kind == "Fraction" else kind)
    default = None if value is None else ast.unparse(value)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        positional = value.args[0] if value.args else None
        written = keywords.get("default", keywords.get("default_factory", positional))
        default = None if written is None else ast.unparse(written)
        limits += [f"{sign} {ast.unparse(keywords[key])}" for key, sign in LIMITS.items() if key in keywords]
        if "description" in keywords:
            description = str(ast.literal_eval(keywords["description"]))
    return Setting(
        name=ast.unparse(line.target),
        kind=kind,
        default=default,
        limits=", ".join(limits),
        description=description,
    )


@cache
def cards() -> list[Card]:
    """List the cards of all methods: those that fit any model, then each benchmark's own."""
    methods = {pair for benchmark in benchmarks() for pair in available_methods(benchmark).items()}
    read = [read_card(name, module) for name, module in methods]
    return sorted(read, key=lambda card: (not card.module.startswith("common."), card.module))


def cards_by_group(benchmark: str | None = None) -> dict[str, list[Card]]:
    """Map `any model` and the benchmarks, or one of them, to the cards of their methods."""
    groups: dict[str, list[Card]] = {}
    for card in cards():
        package = card.module.split(".")[0]
        if benchmark in (None, package) or package == "common":
            groups.setdefault("any model" if package == "common" else package, []).append(card)
    return groups


def find_card(name: str) -> Card:
    """Find a card by the method's name. Raises UserError with the nearest name."""
    known = {card.name: card for card in cards()}
    if name in chain(*benchmark_names().items()):
        raise UserError(f"'{name}' is a benchmark", hint=f"ttt list methods {name} lists its methods")
    if name not in known:
        raise UserError(f"no such method '{name}'", hint=nearest(name, known))
    return known[name]


def used_by(name: str) -> list[str]:
    """List the configurations, as `benchmark configuration`, that use a method at size full."""
    return [user for user, methods in methods_in_use().items() if name in methods]


@cache
def methods_in_use() -> dict[str, dict[str, Any]]:
    """Map each `benchmark configuration` to its methods at size full."""
    in_use = {benchmark: read_methods(benchmark, "full") for benchmark in benchmarks()}
    return {f"{folder} {name}": methods for folder in in_use for name, methods in in_use[folder].items()}
