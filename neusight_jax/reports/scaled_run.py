"""Scaled runs as tables for people."""

from __future__ import annotations

from rich.console import RenderableType

from neusight_jax.reports.text import headed, table
from neusight_jax.scaling.scale import ScaledRun
from neusight_jax.units import duration


def tables(*runs: ScaledRun) -> RenderableType:
    """One run on several targets: totals, what each rule covers, the kernels with the most time on the first target."""
    first = runs[0]
    totals = [
        [
            run.target,
            duration(run.scaled_s),
            f"{run.scaled_s / run.measured_s:.3f}" if run.measured_s > 0 else "-",
            duration(run.scaled_span_s),
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
        *("", table("Forecast", ["GPU", "kernels", "ratio", "with idle time"], totals), ""),
        *(table("Rules", ["GPU", "rule", "kinds", "measured share", "forecast"], rules, text_columns=2), ""),
        table(f"Most measured time, ratio to {first.target}", columns, top, text_columns=5),
        notes=dict.fromkeys(note for run in runs for note in run.notes),
    )
