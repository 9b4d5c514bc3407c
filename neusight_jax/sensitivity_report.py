"""Sensitivities as tables for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from neusight_jax.report import duration, table
from neusight_jax.sensitivity import SECANT, Sensitivity
from neusight_jax.workload import workload_text

FAMILIES_SHOWN = 6
"""Columns of families, dearest first."""


def sensitivity_tables(result: Sensitivity) -> RenderableType:
    """Elasticities in total, by family and by phase; rows that are zero everywhere are left out."""
    forecast = result.forecast
    total, secants = result.total, result.secants
    families = dict(list(result.by("family").items())[:FAMILIES_SHOWN])
    phases = result.by("phase") if len(result.by("phase")) > 1 else {}
    parts = {**families, **phases}
    shown = [name for name in total if any(abs(each[name]) > 5e-4 for each in (total, secants, *parts.values()))]
    shown.sort(key=lambda name: total[name])
    head = workload_text(forecast.workload, forecast.gpu or "the given GPU")
    waves = "whole waves" if result.relaxation == 0 else f"waves relaxed by {result.relaxation:g}"
    summary = f"total {duration(result.total_s)}; elasticities with {waves}"
    if result.relaxation > 0:
        bias = result.relaxed_total_s / result.total_s - 1.0
        summary += f" (total {duration(result.relaxed_total_s)}, bias {bias:+.2%})"
    rows = [[name, *(f"{each[name]:+.3f}" for each in (total, secants, *parts.values()))] for name in shown]
    header = ["d log time / d log", "total", f"exact ±{SECANT:.0%}", *parts]
    notes = [Text(f"note: {note}") for note in forecast.notes]
    return Group(Text(head, style="bold"), Text(summary), Text(""), table("", header, rows), *notes)
