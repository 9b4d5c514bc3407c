"""Forecasts of jobs as tables for people."""

from __future__ import annotations

from rich.console import RenderableType

from neusight_jax.job.forecast import StepForecast
from neusight_jax.reports.forecast import memory_line
from neusight_jax.reports.text import headed, table
from neusight_jax.trust import LEVEL
from neusight_jax.units import duration

NAMES = {
    "compute_s": "compute",
    "bubble_s": "pipeline bubble",
    "exposed_communication_s": "exposed communication",
    "fixed_s": "beside the work",
}
"""Parts of a step, as tables call them."""


def interval_text(step: StepForecast) -> str:
    """The interval of a step in a few words, nothing where there is none."""
    if step.interval_s is None:
        return ""
    low, high = step.interval_s
    return f", {LEVEL:.0%} within {duration(low)} - {duration(high)}"


def head(step: StepForecast) -> str:
    """A step's model, cluster and load in one line."""
    load = step.workload
    return (
        f"{step.model} on {step.gpus} GPUs{f' ({step.cluster})' if step.cluster else ''}: {load['mode']}, "
        f"{load['global_batch_size']} x {load['sequence_length']} tokens, {load['dtype']}"
    )


def tables(step: StepForecast) -> RenderableType:
    """Layout, total, parts, memory of the fullest rank."""
    load, layout, rate = step.workload, step.workload["layout"], step.tokens_per_s
    ways = ("tensor", "pipeline", "data", "context", "expert", "chunks", "zero")
    split = ", ".join(f"{name} {layout[name]}" for name in ways if layout[name] != (name != "zero"))
    rows = [[NAMES[name], duration(seconds), f"{seconds / step.total_s:.1%}"] for name, seconds in step.parts().items()]
    return headed(
        head(step),
        f"layout {split or 'one GPU'}; {load['micro_batches']} micro-batches of {layout['micro_batch_size']}, "
        f"recompute {layout['recompute']}",
        f"step {duration(step.total_s)}{interval_text(step)} ({rate:,.0f} tokens/s, {rate / step.gpus:,.0f} a GPU)",
        f"fullest rank: {memory_line(step.memory, step.mem_bytes)}",
        "",
        table("Step", ["part", "time", "share"], rows),
        notes=step.notes,
    )
