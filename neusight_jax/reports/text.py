"""What all tables for people are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> Table:
    """A plain table: the first `text_columns` to the left, the rest to the right."""
    out = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for position, name in enumerate(header):
        out.add_column(name, justify="left" if position < text_columns else "right", no_wrap=True)
    for row in rows:
        out.add_row(*map(Text, row))
    return out


def headed(head: str, *parts: RenderableType, notes: Iterable[str] = ()) -> Group:
    """A bold head, the parts below it (text as it stands, no markup), and every note on a line of its own."""
    lines = [*parts, *(f"note: {note}" for note in notes)]
    return Group(Text(head, style="bold"), *(Text(line) if isinstance(line, str) else line for line in lines))
