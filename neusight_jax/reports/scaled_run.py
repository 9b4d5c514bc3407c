"""Scaled runs as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType

from neusight_jax.reports.page import Report
from neusight_jax.reports.plots import SHOWN, stacked
from neusight_jax.reports.text import headed, table
from neusight_jax.scaling.rules import ScaledRun
from neusight_jax.units import MS, duration, energy_text


def tables(*runs: ScaledRun) -> RenderableType:
    """One run on several targets: totals, what each rule covers, the kernels with the most time on the first target."""
    first = runs[0]
    totals = [
        [
            run.target,
            duration(run.scaled_s),
            f"{run.scaled_s / run.measured_s:.3f}" if run.measured_s > 0 else "-",
            duration(run.scaled_span_s),
            energy_text(run.energy_j) if run.energy_j else "-",
            f"{run.power_w:,.0f}" if run.energy_j else "-",
        ]
        for run in runs
    ]
    rules = [
        [run.target, rule, f"{part['kernels']:.0f}", f"{part['share']:.1%}", duration(part["scaled_s"])]
        for run in runs
        for rule, part in run.coverage().items()
    ]
    top = [
        [
            *(row["name"][:60], row["operator"][:24], row["kind"], row["dtype"], row["rule"]),
            *(f"{row['count']:g}", duration(row["measured_s"]), f"{row['ratio']:.3f}"),
        ]
        for row in first.most_expensive()
    ]
    columns = ["kernel", "operator", "kind", "dtype", "rule", "count", "measured", "ratio"]
    return headed(
        f"{first.source}, measured on {first.origin}: {duration(first.measured_s)} of kernels",
        *("", table("Forecast", ["GPU", "kernels", "ratio", "with idle time", "energy", "W"], totals), ""),
        *(table("Rules", ["GPU", "rule", "kinds", "measured share", "forecast"], rules, text_columns=2), ""),
        table(f"Most measured time, ratio to {first.target}", columns, top, text_columns=5),
        notes=dict.fromkeys(note for run in runs for note in run.notes),
    )


def _where(run: ScaledRun) -> str:
    """The target, and the joules of the kernels there."""
    return f"{run.target}, {energy_text(run.energy_j)}" if run.energy_j else run.target


def report(first: ScaledRun, others: Sequence[ScaledRun] = ()) -> Report:
    """The page of one run on one or several targets."""
    runs = (first, *others)
    covers = [run.coverage() for run in runs]
    rules = dict.fromkeys(rule for cover in covers for rule in cover)
    parts = {
        rule: [
            sum(cover.get(rule, {}).get("measured_s", 0.0) for cover in covers[:1]) / MS,
            *(cover.get(rule, {}).get("scaled_s", 0.0) / MS for cover in covers),
        ]
        for rule in rules
    }
    rows = [f"{first.origin} (measured)", *(run.target for run in runs)]
    top = first.most_expensive(SHOWN)
    names = [f"{place}. {row['name'][:40]}" for place, row in enumerate(top, start=1)]
    kernels = {"measured": [row["measured_s"] / MS for row in top], first.target: [row["scaled_s"] / MS for row in top]}
    beside = stacked("Kernels with the most measured time", names, kernels, "ms")
    return Report(
        title=f"A run measured on {first.origin}, elsewhere",
        facts={"Workload": first.source, "Machine": ", ".join([first.origin, *(run.target for run in runs)])},
        sentence=f"{duration(first.measured_s)} of kernels measured on {first.origin} take "
        + ", ".join(f"{duration(run.scaled_s)} on {_where(run)}" for run in runs)
        + ".",
        plots=[
            stacked("Time of all kernels", rows, parts, "ms", "By the rule that carries a kernel over."),
            replace(beside, layout={**beside.layout, "barmode": "group"}),
        ],
        tables=tables(*runs),
    )
