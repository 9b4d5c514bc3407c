"""Elasticities of jobs as tables for people."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType

from neusight_jax.job.elasticities import HOST, StepSensitivity
from neusight_jax.reports import step as steps
from neusight_jax.reports.page import Report
from neusight_jax.reports.plots import elasticities
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


def report(found: StepSensitivity) -> Report:
    """The page of a job's elasticities, with the step that they belong to."""
    below = steps.report(found.step)
    machine = {name: value for name, value in found.total.items() if name != HOST}
    best = min(machine, key=lambda name: machine[name])
    host = ("Host", f"{found.total[HOST]:.1%}", "of the step, which no machine buys")
    cards = [*below.cards[:1], ("Moves most", best, f"one percent more: {machine[best]:+.2f} % of the time"), host]
    listed = Group(tables(found), "", steps.tables(replace(found.step, notes=())))
    pictures = [elasticities(machine), *below.plots]
    return Report(f"{below.title}: sensitivity", below.facts, cards, pictures, listed)
