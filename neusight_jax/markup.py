"""Tables as HTML and as Markdown: what rich prints on a terminal, for pages, notebooks and pull requests."""

from __future__ import annotations

from html import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from neusight_jax.units import quantity

NOTE = "note: "
"""How a line begins that says what an answer assumes, or what to know before trusting it."""
NOTEBOOK_STYLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"


def parts_of(renderable: RenderableType) -> list[Table | Text]:
    """Texts and tables of a renderable in their order, groups opened. Raises: `TypeError` for anything else."""
    if hasattr(renderable, "__rich__"):
        renderable = renderable.__rich__()
    if isinstance(renderable, Group):
        return [part for child in renderable.renderables for part in parts_of(child)]
    if isinstance(renderable, Table | Text):
        return [renderable]
    if isinstance(renderable, str):
        return [Text(renderable)]
    raise TypeError(f"no parts of {type(renderable).__name__}; expected texts, tables and groups of them")


def without_notes(renderable: RenderableType) -> tuple[Group, list[str]]:
    """Tables without their notes, and the notes: what an answer assumes, which a page says first."""
    parts = parts_of(renderable)
    noted = [isinstance(part, Text) and part.plain.startswith(NOTE) for part in parts]
    notes = [str(part).removeprefix(NOTE) for part, is_note in zip(parts, noted, strict=True) if is_note]
    rest = [part for part, is_note in zip(parts, noted, strict=True) if not is_note]
    return Group(*rest), list(dict.fromkeys(notes))


def markup(renderable: RenderableType) -> str:
    """HTML of texts and tables; cells that are quantities carry their value for sorting."""
    parts = parts_of(renderable)
    return "\n".join(
        _table(part) if isinstance(part, Table) else _text(part.plain, bold=part.style == "bold") for part in parts
    )


def markdown(renderable: RenderableType) -> str:
    """Markdown of texts and tables, as pull requests show them."""
    blocks = [
        _pipes(part) if isinstance(part, Table) else f"**{part}**" if part.style == "bold" else str(part)
        for part in parts_of(renderable)
        if isinstance(part, Table) or part.plain.strip()
    ]
    return "\n\n".join(blocks)


def _pipes(table: Table) -> str:
    title = f"**{table.title}**\n\n" if table.title else ""
    rules = ["---" if column.justify == "left" else "---:" for column in table.columns]
    columns = [[str(cell).replace("|", "\\|") for cell in column.cells] for column in table.columns]
    rows = [[str(column.header) for column in table.columns], rules, *map(list, zip(*columns, strict=True))]
    return title + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _text(text: str, *, bold: bool) -> str:
    if not text.strip():
        return ""
    return f"<p><strong>{escape(text)}</strong></p>" if bold else f"<p>{escape(text)}</p>"


def _table(table: Table) -> str:
    caption = f"<caption>{escape(str(table.title))}</caption>" if table.title else ""
    sides = ["left" if column.justify == "left" else "right" for column in table.columns]
    head = "".join(
        f'<th scope="col" style="text-align:{side}">{escape(str(column.header))}</th>'
        for column, side in zip(table.columns, sides, strict=True)
    )
    columns = [list(column.cells) for column in table.columns]
    rows = "\n".join(
        "<tr>" + "".join(_cell(str(cell), side) for cell, side in zip(row, sides, strict=True)) + "</tr>"
        for row in zip(*columns, strict=True)
    )
    return (
        f'<div style="overflow-x:auto"><table style="{NOTEBOOK_STYLE}">{caption}'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
    )


def _cell(text: str, side: str) -> str:
    amount = quantity(text)
    value = "" if amount is None else f' data-value="{amount[0]:.9g}"'
    number, bracket, interval = text.partition(" (")
    if side == "left" or not bracket:
        return f'<td{value} style="text-align:{side}">{escape(text)}</td>'
    # A narrow table breaks between a number and its interval, and nowhere else.
    parts = (f'<span style="white-space:nowrap">{escape(part)}</span>' for part in (number, f"({interval}"))
    return f'<td{value} style="text-align:right;white-space:normal">{" ".join(parts)}</td>'
