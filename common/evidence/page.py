"""Fill jinja templates, escaping text in HTML, and the generated blocks of Markdown pages."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.evidence.records import printable
from common.files import save_text


def fill_template(template: Path, filters: Mapping[str, Callable[..., Any]] = {}, **values: object) -> str:
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=template.suffix == ".html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(values)


def save_page(path: Path, text: str) -> None:
    """Write a page or a picture to `path`, whole or not at all, and say so. Raises: UserError."""
    save_text(path, text)
    print(f"wrote {printable(str(path))}")


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    lines.insert(1, "|---" * len(titles) + "|")
    return "\n".join(lines) + "\n"


def fill_blocks(page: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    for block, write in blocks.items():
        page = fill_block(page, block, write())
    return page


def fill_block(page: str, block: str, text: str) -> str:
    """Return a page with `text` between its only `<!-- block -->` and `<!-- end -->`; else ValueError."""
    pattern = rf"(<!-- {block} -->\n).*?(<!-- end -->)"
    filled, count = re.subn(pattern, lambda match: match[1] + text + match[2], page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{count} blocks are called {block}")
    return filled
