"""Forecasts as tables for people."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import RenderableType

from neusight_jax.forecast import Forecast
from neusight_jax.graph.graph import Footprint
from neusight_jax.hardware.gpu import GPU
from neusight_jax.reports import plots
from neusight_jax.reports.page import Report
from neusight_jax.reports.text import headed, interval_text, table
from neusight_jax.units import GIB, MIB, TERA, duration, with_unit
from neusight_jax.workloads import workload_text


def tables(forecast: Forecast) -> RenderableType:
    """Totals, phases, families and the ten most expensive kernels."""
    total = max(forecast.total_s, 1e-30)  # a program that launches nothing takes no time

    def shares(title: str, column: str) -> RenderableType:
        seconds = forecast.seconds_by(column)
        return table(title, [column, "time", "share"], [[key, *_share(each, total)] for key, each in seconds.items()])

    top = [
        [
            *(row["node"], row["op"], row["phase"], f"{row['count']:g}"),
            *(duration(row["seconds"]), f"{row['total_s'] / total:.1%}"),
            *(row["tile"], f"{row['waves']:.0f}", f"{row['utilization']:.2f}", row["bound"]),
        ]
        for row in forecast.most_expensive()
    ]
    columns = ["node", "op", "phase", "count", "each", "share", "tile", "waves", "utilization", "bound"]
    return headed(
        workload_text(forecast.workload, forecast.gpu or "the given GPU"),
        *(_total_line(forecast), *_memory_lines(forecast), ""),
        *(shares("Phases", "phase"), "", shares("Families", "family"), ""),
        table("Ten most expensive kernels", columns, top, text_columns=3),
        notes=forecast.notes,
    )


def _share(seconds: float, total: float) -> tuple[str, str]:
    return duration(seconds), f"{seconds / total:.1%}"


def _total_line(forecast: Forecast) -> str:
    total, seconds = max(forecast.total_s, 1e-30), duration(forecast.total_s)
    interval = "" if forecast.interval_s is None else f", {interval_text(forecast.interval_s)}"
    rates = [f"{seconds} an output token"] if forecast.mode == "decode" else []
    rates += [f"{forecast.tokens / total:,.0f} tokens/s"] if forecast.tokens else []
    launches = int(forecast.columns["count"].sum())
    rates.append(f"{forecast.summed('flop') / total / TERA:.2f} TFLOP/s over {launches} kernel launches")
    return f"total {seconds}{interval}  ({', '.join(rates)})"


def _memory_lines(forecast: Forecast) -> list[str]:
    return [] if forecast.memory is None else [memory_line(forecast.memory, forecast.mem_bytes)]


def memory_line(memory: Footprint, mem_bytes: float) -> str:
    """What a workload needs, by what holds it, and the verdict."""
    parts = ("weights", "gradients", "optimizer", "inputs", "buffers", "activations", "kv_cache")
    sizes = {name.replace("kv_", "KV "): getattr(memory, name) for name in parts}
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
    verdict = "fits in" if memory.total <= mem_bytes else "DOES NOT FIT in"
    return f"memory {memory.total / GIB:.1f} GiB ({listed}): {verdict} {mem_bytes / GIB:.1f} GiB"


def _gib(size: float) -> str:
    """Bytes as a number of GiB; what is too small for that as MiB, with the unit."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.{1 if size >= GIB else 2}f}"
    return f"{size / MIB:.3g} MiB"


def report(forecast: Forecast, machine: GPU | None = None) -> Report:
    """The page of a forecast; `machine` for its roofline."""
    pictures = [plots.shares(forecast), plots.kernels(forecast)]
    if machine is not None:
        pictures.insert(1, plots.roofline({forecast.gpu: (forecast, machine)}))
    return Report(
        title=f"{forecast.model} on {forecast.gpu or 'the given GPU'}",
        facts={"Workload": workload_text(forecast.workload), **machine_fact(forecast.gpu, machine)},
        cards=cards(forecast),
        plots=pictures,
        tables=tables(forecast),
    )


def machine_fact(name: str, machine: GPU | None) -> dict[str, str]:
    """A machine in the header: its name and the figures that say most."""
    names = ("num_sms", "clock_hz", "mem_bytes_per_s") if machine is not None else ()
    figures: list[Any] = [with_unit(each, float(getattr(machine, each))) for each in names]
    if machine is not None:
        figures.append(f"{float(np.asarray(machine.mem_bytes)) / GIB:.4g} GiB")
    return {"Machine": ", ".join([name or "the given GPU", *figures])}


def cards(forecast: Forecast) -> list[tuple[str, str, str]]:
    """The numbers of a forecast that matter."""
    total = max(forecast.total_s, 1e-30)
    found = [("Step", duration(forecast.total_s), interval_text(forecast.interval_s))]
    if forecast.tokens:
        found.append(("Throughput", f"{forecast.tokens / total:,.0f} tokens/s", f"{forecast.tokens:,} tokens a step"))
    launches = int(forecast.columns["count"].sum())
    found.append(("Arithmetic", f"{forecast.summed('flop') / total / TERA:.3g} TFLOP/s", f"{launches:,} launches"))
    if forecast.memory is not None:
        verdict = "fits" if forecast.fits else "does not fit"
        found.append(
            ("Memory", f"{forecast.memory.total / GIB:.1f} GiB", f"{verdict} in {forecast.mem_bytes / GIB:.0f} GiB")
        )
    return found
