"""Elasticities of jobs as tables for people."""

from __future__ import annotations

from rich.console import RenderableType

from neusight_jax.job.elasticities import HOST, StepSensitivity
from neusight_jax.reports.step import head
from neusight_jax.reports.text import headed, table
from neusight_jax.units import duration


def tables(found: StepSensitivity) -> RenderableType:
    """One row per figure that matters, the best first."""
    rows = {name: value for name, value in found.total.items() if abs(value) > 5e-4 and name != HOST}
    cells = [[name, f"{value:+.3f}"] for name, value in sorted(rows.items(), key=lambda each: each[1])]
    return headed(
        head(found.step),
        f"step {duration(found.step.total_s)}; {found.total[HOST]:.1%} of it is the host's, which no machine buys",
        "",
        table("", ["d log time / d log", "total"], cells),
        notes=found.notes,
    )
