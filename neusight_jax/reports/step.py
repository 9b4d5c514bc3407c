"""Forecasts of jobs as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from neusight_jax.job.forecast import StepForecast
from neusight_jax.reports.forecast import memory_line
from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.plots import stacked
from neusight_jax.reports.text import headed, interval_text, table
from neusight_jax.units import GIB, MS, counted, duration
from neusight_jax.workloads import workload_text

WAYS = ("tensor", "pipeline", "data", "context", "expert", "chunks", "zero")
"""Ways a job is split."""
NAMES = {
    "compute_s": "compute",
    "bubble_s": "pipeline bubble",
    "exposed_communication_s": "exposed communication",
    "fixed_s": "beside the work",
}
"""Parts of a step, as tables call them."""


def head(step: StepForecast) -> str:
    """A step's model, cluster and load in one line."""
    return workload_text(step.workload, f"{counted(step.gpus, 'GPU')}{f' ({step.cluster})' if step.cluster else ''}")


def layout_text(layout: Mapping[str, Any]) -> str:
    """The ways a job is split, in one line."""
    return ", ".join(f"{name} {layout[name]}" for name in WAYS if layout[name] != (name != "zero")) or "one GPU"


def tables(step: StepForecast) -> RenderableType:
    """Layout, total, parts, memory of the fullest rank."""
    load, layout, rate = step.workload, step.workload["layout"], step.tokens_per_s
    interval = "" if step.interval_s is None else f", {interval_text(step.interval_s)}"
    rows = [[NAMES[name], duration(seconds), f"{seconds / step.total_s:.1%}"] for name, seconds in step.parts().items()]
    return headed(
        head(step),
        f"layout {layout_text(layout)}; {counted(load['micro_batches'], 'micro-batch', 'es')} of "
        f"{layout['micro_batch_size']}, recompute {layout['recompute']}",
        f"step {duration(step.total_s)}{interval} ({rate:,.0f} tokens/s, {rate / step.gpus:,.0f} a GPU)",
        f"fullest rank: {memory_line(step.memory, step.mem_bytes)}",
        "",
        table("Step", ["part", "time", "share"], rows),
        notes=step.notes,
    )


def cards(step: StepForecast) -> list[tuple[str, str, str]]:
    """The numbers of a step that matter."""
    share = step.exposed_communication_s / step.total_s
    return [
        ("Step", duration(step.total_s), interval_text(step.interval_s)),
        ("Exposed communication", duration(step.exposed_communication_s), f"{share:.1%} of the step"),
        ("Throughput", f"{step.tokens_per_s:,.0f} tokens/s", f"{step.tokens:,} tokens a step"),
        ("Memory", f"{step.memory.total / GIB:.1f} GiB", f"{_verdict(step)}, the fullest rank"),
    ]


def pictures(steps: Mapping[str, StepForecast]) -> list[Plot]:
    """Where steps go, and the memory of their fullest ranks, a bar for each."""
    parts = {NAMES[name]: [step.parts()[name] / MS for step in steps.values()] for name in NAMES}
    memory = [asdict(step.memory) for step in steps.values()]
    held = {name: [each[name] / GIB for each in memory] for name in memory[0] if any(each[name] for each in memory)}
    verdict = ", ".join(dict.fromkeys(map(_verdict, steps.values())))
    return [
        stacked("Where the step goes", list(steps), parts, "ms", "Of the busiest rank."),
        stacked("Memory of the fullest rank", list(steps), held, "GiB", verdict),
    ]


def _verdict(step: StepForecast) -> str:
    return f"{'fits' if step.fits else 'does not fit'} in {step.mem_bytes / GIB:.0f} GiB"


def report(step: StepForecast) -> Report:
    """The page of a job's step."""
    layout = layout_text(step.workload["layout"])
    return Report(
        title=f"{step.model} on {counted(step.gpus, 'GPU')}",
        facts={"Workload": workload_text(step.workload), "Machine": step.cluster, "Layout": layout},
        cards=cards(step),
        plots=pictures({"step": step}),
        tables=tables(step),
    )
