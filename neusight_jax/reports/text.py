"""Parts that all tables for people are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from neusight_jax.forecast import BILL
from neusight_jax.model.intervals import LEVEL
from neusight_jax.units import duration

INTERVAL = f"{LEVEL:.0%} interval"
"""What an interval is called in tables and sentences."""


def between(bounds: tuple[float, float], text: Callable[[float], str] = duration) -> str:
    """An interval as every table and sentence has it, with a unit that both ends have once: 533.4 to 697.7 ms."""
    low, high = map(text, bounds)
    number, _, unit = low.partition(" ")
    return f"{number if unit and high.endswith(f' {unit}') else low} to {high}"


def interval_text(bounds: tuple[float, float] | None) -> str:
    """The interval of a time in a sentence, "" where there is none."""
    return f"{INTERVAL} {between(bounds)}" if bounds is not None else ""


def prices_fact(prices: Mapping[str, float], currency: str, file: str = "") -> dict[str, str]:
    """The prices used, for the header of a page: of an hour of one GPU of each kind, and where they are from."""
    amounts = ", ".join(f"{name} {price:,.4g}" for name, price in prices.items())
    unit, source = f", {currency}" if currency else "", f" ({file})" if file else ""
    return {"Prices": f"an hour of one GPU{unit}: {amounts}{source}"} if prices else {}


def bill_cells(item: Any) -> dict[str, str]:
    """Bill of what a result takes from the grid, by the units of its columns; {} where nobody asked."""
    bill = {name: getattr(item, field) for name, field in zip(("kWh", "$", "t CO2e"), BILL, strict=True)}
    figures = {name: value for name, value in bill.items() if value is not None}
    return {name: f"{value:,.0f}" if value >= 1e3 else f"{value:.4g}" for name, value in figures.items()}


def bill_columns(items: Iterable[Any]) -> tuple[str, ...]:
    """Columns of `bill_cells` that any of the results has."""
    return tuple(dict.fromkeys(name for item in items for name in bill_cells(item)))


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> Table:
    """Plain table: the first `text_columns` to the left, the rest to the right.

    Args:
      header: names of the columns.
      rows: cells as they are printed, one for each column; markup in them is shown, not obeyed.
      text_columns: columns of words, at the front.
    """
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
