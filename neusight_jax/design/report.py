"""Designs as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from neusight_jax.design.answers import Design
from neusight_jax.report import duration, table
from neusight_jax.units import GB, GIGA, MIB, TERA

UNITS: dict[str, tuple[float, str]] = {
    "clock_hz": (GIGA, "GHz"),
    "mem_bytes_per_s": (GB, "GB/s"),
    "link_bytes_per_s": (GB, "GB/s"),
    "l2_bytes": (MIB, "MiB"),
    "mem_bytes": (GB, "GB"),
    "tdp_w": (1.0, "W"),
    "process_nm": (1.0, "nm"),
    "num_sms": (1.0, "SMs"),
    "area_mm2": (1.0, "mm2"),
    "power_w": (1.0, "W"),
    "dollars": (1.0, "$"),
    "pin_bit_per_s": (GIGA, "Gbit/s"),
    "tokens_per_s": (1.0, "tokens/s"),
}


def shown(name: str, value: float) -> str:
    """A figure with the unit people use."""
    if name.endswith("_flop_per_s"):
        return f"{value / TERA:.4g} TFLOP/s"
    if name in UNITS:
        scale, unit = UNITS[name]
        return f"{value / scale:.5g} {unit}"
    return duration(value)


def design_tables(design: Design) -> RenderableType:
    """The machine, what it does beside the base, what binds and what more of it would buy."""
    base = {name: float(getattr(design.gpu, name)) for name in design.free}
    machine = [[name, shown(name, value)] for name, value in base.items()]
    state = "" if design.feasible else "  NO MACHINE IN THE BOUNDS KEEPS EVERY BUDGET; this one comes nearest"
    head = f"best of {design.evaluations} evaluations (seed {design.seed}){state}"
    pairs = [(name, value, design.base_seconds[name]) for name, value in design.seconds.items()]
    pairs += [(name, value, design.base_metrics[name]) for name, value in design.metrics.items()]
    effects = [
        [name, shown(name, own), shown(name, before), f"{own / before - 1.0:+.1%}"] for name, own, before in pairs
    ]
    return Group(
        Text(head, style="bold"),
        Text(""),
        table("Machine", ["free field", "value"], machine),
        Text(""),
        table("What it does", ["", "design", "base", "change"], effects),
        Text(""),
        _binding(design),
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


def front_table(designs: Sequence[Design], metric: str) -> Table:
    """A Pareto front, one design per row."""
    fields = list(designs[0].free) if designs else []
    rows = [
        [shown(metric, each.metrics[metric]), shown("latency_s", each.metrics["latency_s"])]
        + [shown(name, each.free[name]) for name in fields]
        for each in designs
    ]
    return table("Pareto front", [metric, "latency_s", *fields], rows, text_columns=0)
