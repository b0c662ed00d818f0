"""Tables on a terminal, and as wide as they need to be in a pipe."""

import sys
from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def open_console(width: int) -> Console:
    """Return a console of the terminal's width; of `width` columns where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()
) -> Table:
    """Return rows of text, which is no markup, as a table; columns in `left` hold words, others numbers."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.pad_edge = False
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
