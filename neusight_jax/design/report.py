"""Designs as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from neusight_jax.design.answers import Design
from neusight_jax.report import shown, table


def design_tables(design: Design) -> RenderableType:
    """The machine, what it does beside the base, what binds and what more of it would buy."""
    machine = [
        [name, shown(name, value), f"{design.at_bounds[name]} bound" if name in design.at_bounds else ""]
        for name, value in design.free.items()
    ]
    state = "" if design.feasible else "  NO MACHINE IN THE BOUNDS KEEPS EVERY BUDGET; this one comes nearest"
    head = f"best of {design.evaluations} evaluations (seed {design.seed}){state}"
    pairs = [(name, value, design.base_seconds[name]) for name, value in design.seconds.items()]
    pairs += [
        (name, value, design.base_metrics[name]) for name, value in design.metrics.items() if name not in design.seconds
    ]
    effects = [
        [name, shown(name, own), shown(name, before), f"{own / before - 1.0:+.1%}"] for name, own, before in pairs
    ]
    return Group(
        Text(head, style="bold"),
        Text(""),
        table("Machine", ["free field", "value", "ends on"], machine),
        Text(""),
        table("What it does", ["", "design", "base", "change"], effects),
        Text(""),
        _binding(design),
        *(Text(f"note: {note}") for note in design.notes),
    )


def _binding(design: Design) -> Table:
    prices = design.multipliers
    rows = [
        [name, shown(name, limit), f"{prices.left[name]:.1%}", "yes" if price > 0 else "no", f"{price:.2f} %"]
        for (name, limit), price in zip(design.budgets.items(), prices.budgets.values(), strict=True)
    ]
    rows += [[f"bound of {name}", "", "", "yes", f"{price:.2f} %"] for name, price in prices.bounds.items()]
    title = f"Budgets (first-order residual {prices.residual:.2f})"
    return table(title, ["budget", "limit", "left", "binds", "1 % more buys"], rows)


def front_table(designs: Sequence[Design], metric: str, said: Sequence[str] = ()) -> RenderableType:
    """A Pareto front, one design per row, and its notes but for those `said` already."""
    fields = list(designs[0].free) if designs else []
    rows = [
        [shown(metric, each.metrics[metric]), shown("latency_s", each.metrics["latency_s"])]
        + [shown(name, each.free[name]) for name in fields]
        for each in designs
    ]
    front = table("Pareto front", [metric, "latency_s", *fields], rows, text_columns=0)
    return Group(front, *(Text(f"note: {note}") for note in front_notes(designs) if note not in said))


def front_notes(designs: Sequence[Design]) -> list[str]:
    """What the designs of a front have to say, each sentence once."""
    return list(dict.fromkeys(note for each in designs for note in (*each.front_notes, *each.notes)))
