"""Sensitivities as tables for people."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType

from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.variant import ALL_RATES, KNOBS
from neusight_jax.reports import forecast as forecasts
from neusight_jax.reports import plots
from neusight_jax.reports.page import Report
from neusight_jax.reports.text import headed, table
from neusight_jax.sensitivities import LEAST, SECANT, Sensitivity
from neusight_jax.units import duration, title_of

FAMILIES_SHOWN = 6
"""Columns of families, dearest first."""


def tables(result: Sensitivity) -> RenderableType:
    """Elasticities in total, by family and by phase; rows that are zero everywhere are left out."""
    forecast, total, phases = result.forecast, result.total, result.by("phase")
    families = dict(list(result.by("family").items())[:FAMILIES_SHOWN])
    exact = {f"exact ±{SECANT:.0%}": result.secants} if result.secants else {}
    parts = {"total": total, **exact, **families, **(phases if len(phases) > 1 else {})}
    names = [name for name in total if any(abs(part[name]) > 5e-4 for part in parts.values())]
    trusted = result.trusted
    names.sort(key=lambda name: trusted[name])
    waves = "whole waves" if result.relaxation == 0 else f"waves relaxed by {result.relaxation:g}"
    summary = f"total {duration(result.total_s)}; elasticities with {waves}"
    if result.relaxation > 0:
        bias = result.relaxed_total_s / result.total_s - 1.0
        summary += f" (total {duration(result.relaxed_total_s)}, bias {bias:+.2%})"
    if result.host:
        summary += f"; {result.host:.1%} of it is the host's, which no machine buys"
    rows = [[name, *(f"{part[name]:+.3f}" for part in parts.values())] for name in names]
    return headed(
        forecasts.head(forecast), summary, "", table("", ["d log time / d log", *parts], rows), notes=result.notes
    )


def helps(result: Sensitivity) -> list[str]:
    """The three figures that would help most, in words: what a tenth more of them does; the host's share if large."""
    # Peaks, SMs and clock move together on a real chip: their rows say it, and those of single ones would repeat it.
    joined = {ALL_RATES, *(name for fields in KNOBS.values() for name in fields)}
    trusted = {name: slope for name, slope in result.trusted.items() if name not in joined}
    best = sorted((name for name in trusted if trusted[name] < -LEAST), key=lambda name: trusted[name])[:3]
    lines = [f"10 % more {title_of(name)}: {1.0 - 1.1 ** trusted[name]:.1%} less time" for name in best]
    host = [f"{result.host:.0%} of the step is the host's, which no machine buys"] if result.host > LEAST else []
    return [*lines, *host] or ["no single figure of the machine takes as much as 0.1 % off"]


def report(result: Sensitivity, machine: GPU | None = None) -> Report:
    """The page of elasticities, with the forecast that they belong to."""
    forecast = result.forecast
    below = forecasts.report(forecast, machine)
    return Report(
        title=f"{below.title}: sensitivity",
        sentence=f"{below.sentence} Most would help: {'; '.join(helps(result))}.",
        facts=below.facts,
        cards=below.cards,
        plots=[plots.elasticities({forecast.gpu: result}), *below.plots],
        tables=Group(tables(result), "", forecasts.tables(replace(forecast, notes=()))),
    )
