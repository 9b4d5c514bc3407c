"""Designs as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from neusight_jax.designs.answers import Design
from neusight_jax.reports.text import headed, table
from neusight_jax.units import with_unit


def tables(design: Design) -> RenderableType:
    """The machine, what it does beside the base, what binds and what more of it would buy."""
    machine = [
        [name, with_unit(name, value), f"{design.at_bounds[name]} bound" if name in design.at_bounds else ""]
        for name, value in design.free.items()
    ]
    state = "" if design.feasible else "  NO MACHINE IN THE BOUNDS KEEPS EVERY BUDGET; this one comes nearest"
    own, base = {**design.seconds, **design.metrics}, {**design.base_seconds, **design.base_metrics}
    effects = [
        [name, with_unit(name, value), with_unit(name, base[name]), f"{value / base[name] - 1.0:+.1%}"]
        for name, value in own.items()
    ]
    return headed(
        f"best of {design.evaluations} evaluations (seed {design.seed}){state}",
        *("", table("Machine", ["free field", "value", "ends on"], machine)),
        *("", table("What it does", ["", "design", "base", "change"], effects), "", _binding(design)),
        notes=design.notes,
    )


def _binding(design: Design) -> RenderableType:
    prices = design.multipliers
    rows = [
        [name, with_unit(name, limit), f"{prices.left[name]:.1%}", "yes" if price > 0 else "no", f"{price:.2f} %"]
        for (name, limit), price in zip(design.budgets.items(), prices.budgets.values(), strict=True)
    ]
    rows += [[f"bound of {name}", "", "", "yes", f"{price:.2f} %"] for name, price in prices.bounds.items()]
    title = f"Budgets (first-order residual {prices.residual:.2f})"
    return table(title, ["budget", "limit", "left", "binds", "1 % more buys"], rows)


def front_table(designs: Sequence[Design], metric: str, said: Sequence[str] = ()) -> RenderableType:
    """A Pareto front, one design per row, and its notes but for those `said` already."""
    fields = list(designs[0].free) if designs else []
    rows = [
        [with_unit(metric, each.metrics[metric]), with_unit("latency_s", each.metrics["latency_s"])]
        + [with_unit(name, each.free[name]) for name in fields]
        for each in designs
    ]
    front = table("Pareto front", [metric, "latency_s", *fields], rows, text_columns=0)
    return Group(front, *(Text(f"note: {note}") for note in front_notes(designs) if note not in said))


def front_notes(designs: Sequence[Design]) -> list[str]:
    """What the designs of a front have to say, each sentence once."""
    return list(dict.fromkeys(note for each in designs for note in (*each.front_notes, *each.notes)))
