"""Parts that all tables for people are made of."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from neusight_jax.markup import NOTE
from neusight_jax.model.intervals import LEVEL
from neusight_jax.units import duration

if TYPE_CHECKING:
    from neusight_jax.runs import RunCost

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


def run_cells(run: RunCost | None, currency: str = "") -> dict[str, str]:
    """Cost of a whole run by its columns; {} where none was asked for."""
    if run is None:
        return {}
    interval = "" if run.interval_s is None else f" ({between(run.interval_s)})"
    cells = {"the run": f"{duration(run.total_s)}{interval}", "GPU-hours": _amount(run.gpu_hours)}
    if run.lost_share:
        cells["lost to failures"] = f"{run.lost_share:.1%}"
    amounts = {f"cost{f' {currency}' if currency else ''}": run.cost, "kWh": run.energy_kwh}
    amounts |= {"$ of power": run.electricity_dollars, "t CO2e": run.co2e_t}
    return cells | {name: _amount(value) for name, value in amounts.items() if value is not None}


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.3g}"


def short_number(value: float | None) -> str:
    """A number to four digits, or all before the point; a dash of none."""
    return "-" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def run_line(run: RunCost, currency: str = "") -> str:
    """Cost of a whole run in one line."""
    cells = run_cells(run, currency)
    parts = [f"the whole run: {_amount(run.steps)} steps, {cells.pop('the run')}"]
    parts += [f"{name} {value}" if name.startswith("cost") else f"{value} {name}" for name, value in cells.items()]
    return ", ".join(parts)


def command_text(command: str) -> str:
    """A command line over several lines, as a shell takes it."""
    lines = textwrap.wrap(command, 110, break_long_words=False, break_on_hyphens=False)
    return " \\\n      ".join(lines)


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


def cells_table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Table of rows, each a cell by the name of its column; a row that lacks one has a dash."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    return table(title, header, [[row.get(name, "-") for name in header] for row in rows], 2)


def headed(head: str, *parts: RenderableType, notes: Iterable[str] = ()) -> Group:
    """A bold head, the parts below it (text as it stands, no markup), and every note on a line of its own."""
    lines = [*parts, *(f"{NOTE}{note}" for note in notes)]
    return Group(Text(head, style="bold"), *(Text(line) if isinstance(line, str) else line for line in lines))
