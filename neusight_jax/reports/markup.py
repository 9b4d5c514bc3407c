"""Tables as HTML: what rich prints on a terminal, as elements that a page or a notebook shows."""

from __future__ import annotations

from html import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from neusight_jax.units import quantity

NOTEBOOK_STYLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"


def markup(renderable: RenderableType) -> str:
    """HTML of texts, tables and groups of them; cells that are quantities carry their value for sorting.

    Raises: `TypeError` for anything else.
    """
    if hasattr(renderable, "__rich__"):
        renderable = renderable.__rich__()
    if isinstance(renderable, Group):
        return "\n".join(markup(part) for part in renderable.renderables)
    if isinstance(renderable, Table):
        return _table(renderable)
    if isinstance(renderable, str | Text):
        return _text(str(renderable), bold=isinstance(renderable, Text) and renderable.style == "bold")
    raise TypeError(f"no HTML of {type(renderable).__name__}; expected texts, tables and groups of them")


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
    return f'<td{value} style="text-align:{side}">{escape(text)}</td>'
