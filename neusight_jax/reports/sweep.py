"""Sweeps as tables for people."""

from __future__ import annotations

from rich.console import RenderableType

from neusight_jax.reports.text import headed
from neusight_jax.sweeps.run import Sweep


def tables(done: Sweep) -> RenderableType:
    """What was forecast, and where it is."""
    models = dict.fromkeys(load["model"] for load in done.asked.get("workloads", ()))
    resumed = f", {done.resumed_rows} of them from before" if done.resumed_rows else ""
    return headed(f"{done.output}: {done.rows} forecasts of {', '.join(models)}{resumed}", notes=done.notes)
