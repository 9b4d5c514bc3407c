"""Forecasts as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import RenderableType

from neusight_jax.forecast import Forecast
from neusight_jax.graph.graph import Footprint
from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.parallelism import OFF
from neusight_jax.reports import plots
from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.text import headed, interval_text, run_cells, run_line, table
from neusight_jax.units import GIB, GIGA, MIB, MS, TERA, counted, duration, energy_text, with_unit
from neusight_jax.workloads import workload_text

WAYS = ("tensor", "pipeline", "data", "context", "expert", "chunks", "zero", "shards")
"""Ways a job is split."""
NAMES = {
    "compute_s": "compute",
    "bubble_s": "pipeline bubble",
    "exposed_communication_s": "exposed communication",
    "fixed_s": "beside the work",
}
"""Parts of a step, as tables call them."""
PART_NAMES = {**NAMES, "rollout_s": "rollout", "scoring_s": "scoring"}
"""With those of a step of reinforcement learning."""


def head(forecast: Forecast) -> str:
    """The model, the machine and the load in one line."""
    if forecast.gpus == 1 or "layout" not in forecast.workload:
        return workload_text(forecast.workload, forecast.gpu or "the given GPU")
    where = f" ({forecast.gpu})" if forecast.gpu else ""
    return workload_text(forecast.workload, f"{counted(forecast.gpus, 'GPU')}{where}")


def layout_text(layout: Mapping[str, Any]) -> str:
    """The ways a job is split, in one line."""
    return ", ".join(f"{name} {layout[name]}" for name in WAYS if layout[name] != (name not in OFF)) or "one GPU"


def tables(forecast: Forecast) -> RenderableType:
    """Totals, parts, phases, families and the ten most expensive kernels."""
    total = max(forecast.total_s, 1e-30)  # a program that launches nothing takes no time

    def shares(title: str, column: str, seconds: Mapping[str, float]) -> list[RenderableType]:
        rows = [[key, duration(time_s), f"{time_s / total:.1%}"] for key, time_s in seconds.items()]
        return [table(title, [column, "time", "share"], rows), ""]

    parts: list[RenderableType] = []
    if forecast.total_s > forecast.compute_s:
        parts += shares("Step", "part", {PART_NAMES[name]: seconds for name, seconds in forecast.parts.items()})
    if any(forecast.phases.values()):
        ordered = sorted(forecast.phases.items(), key=lambda phase: -phase[1])
        parts += shares("Phases", "phase", {name: seconds for name, seconds in ordered if seconds})
    if forecast.columns:
        top = [
            [
                *(row["node"], row["op"], row["phase"], f"{row['count']:g}"),
                *(duration(row["seconds"]), f"{row['total_s'] / total:.1%}"),
                *(row["tile"], f"{row['waves']:.0f}", f"{row['utilization']:.2f}", row["bound"]),
            ]
            for row in forecast.most_expensive()
        ]
        columns = ["node", "op", "phase", "count", "each", "share", "tile", "waves", "utilization", "bound"]
        parts += shares("Families", "family", forecast.seconds_by("family"))
        parts.append(table("Ten most expensive kernels", columns, top, text_columns=3))
    lines, memory = [_total_line(forecast), *energy_line(forecast)], _memory_lines(forecast)
    lines += [utilization_text(forecast)] if utilization_text(forecast) else []
    lines += [run_line(forecast.run)] if forecast.run else []
    # Whether a served model fits is the first question.
    lines = [*memory, *lines] if forecast.longest_context is not None else [*lines, *memory]
    if layout := forecast.workload.get("layout"):
        batches = f"{counted(forecast.workload['micro_batches'], 'micro-batch', 'es')} of {layout['micro_batch_size']}"
        lines.insert(0, f"layout {layout_text(layout)}; {batches}, recompute {layout['recompute']}")
    return headed(head(forecast), *lines, "", *parts, notes=forecast.notes)


def sentence(forecast: Forecast) -> str:
    """The forecast in one sentence: time, interval, joules, and what a whole run costs where one is asked for."""
    what = {"training": "a training step", "decode": "a decode step"}.get(forecast.mode, f"{forecast.mode} of a batch")
    where = forecast.gpu or counted(forecast.gpus, "GPU")
    interval = "" if forecast.interval_s is None else f" ({interval_text(forecast.interval_s)})"
    energy = f" and {energy_text(forecast.energy_j)}" if forecast.energy_j else ""
    run = f"; {run_line(forecast.run)}" if forecast.run else ""
    lacks = f" It {_verdict(forecast)}." if forecast.fits is False else ""
    return f"{forecast.model} on {where}: {what} takes {duration(forecast.total_s)}{interval}{energy}{run}.{lacks}"


def _total_line(forecast: Forecast) -> str:
    total, seconds = max(forecast.total_s, 1e-30), duration(forecast.total_s)
    interval = "" if forecast.interval_s is None else f", {interval_text(forecast.interval_s)}"
    rates = [f"{seconds} an output token"] if forecast.mode == "decode" else []
    rates += [f"{forecast.tokens / total:,.0f} tokens/s"] if forecast.tokens else []
    if "layout" in forecast.workload and forecast.gpus > 1 and forecast.tokens:
        rates.append(f"{forecast.tokens / total / forecast.gpus:,.0f} a GPU")
    if forecast.columns:
        launches, rate = int(forecast.columns["count"].sum()), forecast.summed("flop") / total / TERA
        whose = " of one GPU" if forecast.gpus > 1 else ""
        rates.append(f"{rate:.2f} TFLOP/s over {launches} kernel launches{whose}")
    return f"total {seconds}{interval}  ({', '.join(rates)})"


def energy_line(forecast: Forecast) -> list[str]:
    """Joules, watts and the clock that the boards settle at."""
    if not forecast.energy_j:
        return []
    joules = f", {forecast.joules_per_token:.3g} J a token" if forecast.joules_per_token else ""
    whose = f", {forecast.power_w / forecast.gpus:,.0f} W a GPU" if forecast.gpus > 1 else ""
    watts = f"{forecast.power_w:,.0f} W{whose} at {forecast.clock_hz / GIGA:.2f} GHz"
    return [f"energy {energy_text(forecast.energy_j)}{joules} ({watts}; the boards alone)"]


def utilization_text(forecast: Forecast) -> str:
    """FLOP utilization of a training step, "" where nobody knows it or the step is none."""
    if forecast.mode != "training" or forecast.mfu is None or forecast.hfu is None:
        return ""
    return f"MFU {forecast.mfu:.1%}, HFU {forecast.hfu:.1%}"


def _memory_lines(forecast: Forecast) -> list[str]:
    whose = "fullest rank: " if forecast.gpus > 1 and "layout" in forecast.workload else ""
    if forecast.memory is None:
        return []
    return [f"{whose}{memory_line(forecast.memory, forecast.mem_bytes)}{_context_text(forecast)}"]


def _context_text(forecast: Forecast) -> str:
    """The longest context that fits, in words."""
    longest = forecast.longest_context
    if longest is None:
        return ""
    if longest:
        return f"; contexts of up to {longest:,} tokens {'fit' if forecast.fits else 'would'}"
    rest = forecast.mem_bytes - forecast.memory_bytes + (forecast.memory.weights if forecast.memory else 0.0)
    return f"; weights of {_gib(max(rest, 0.0))} GiB would"


def memory_line(memory: Footprint, mem_bytes: float) -> str:
    """Memory that a workload needs, by what holds it, and the verdict."""
    parts = ("weights", "gradients", "optimizer", "inputs", "buffers", "activations", "kv_cache")
    sizes = {name.replace("kv_", "KV "): getattr(memory, name) for name in parts}
    contents = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
    verdict = "fits in" if memory.total <= mem_bytes else "DOES NOT FIT in"
    return f"memory {memory.total / GIB:.1f} GiB ({contents}): {verdict} {mem_bytes / GIB:.1f} GiB"


def _gib(size: float) -> str:
    """Bytes as a number of GiB; what is too small for that as MiB, with the unit."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.{1 if size >= GIB else 2}f}"
    return f"{size / MIB:.3g} MiB"


def report(forecast: Forecast, machine: GPU | None = None) -> Report:
    """The page of a forecast; `machine` for its roofline."""
    kernels = [plots.shares(forecast), plots.kernels(forecast)] if forecast.columns else []
    if machine is not None and kernels:
        kernels.insert(1, plots.roofline({forecast.gpu: (forecast, machine)}))
    if kernels and forecast.energy_j:
        kernels.append(plots.power({forecast.gpu: (forecast, machine)}))
    job = "layout" in forecast.workload
    layout = {"Layout": layout_text(forecast.workload["layout"])} if job else {}
    where = counted(forecast.gpus, "GPU") if job else forecast.gpu or "the given GPU"
    return Report(
        title=f"{forecast.model} on {where}",
        sentence=sentence(forecast),
        facts={"Workload": workload_text(forecast.workload), **machine_fact(forecast.gpu, machine), **layout},
        cards=cards(forecast),
        plots=[*(pictures({"step": forecast}) if forecast.total_s > forecast.compute_s else ()), *kernels],
        tables=tables(forecast),
    )


def pictures(forecasts: Mapping[str, Forecast]) -> list[Plot]:
    """Where steps go, and the memory of their fullest ranks, a bar for each."""
    shown = dict.fromkeys(name for forecast in forecasts.values() for name in forecast.parts)
    parts = {PART_NAMES[name]: [one.parts.get(name, 0.0) / MS for one in forecasts.values()] for name in shown}
    memory = [asdict(forecast.memory) for forecast in forecasts.values() if forecast.memory is not None]
    held = {
        name: [footprint[name] / GIB for footprint in memory]
        for name in memory[0]
        if any(footprint[name] for footprint in memory)
    }
    verdict = ", ".join(dict.fromkeys(map(_verdict, forecasts.values())))
    return [
        plots.stacked("Where the step goes", list(forecasts), parts, "ms", "Of the busiest rank."),
        plots.stacked("Memory of the fullest rank", list(forecasts), held, "GiB", verdict),
    ]


def _verdict(forecast: Forecast) -> str:
    return f"{'fits' if forecast.fits else 'does not fit'} in {forecast.mem_bytes / GIB:.0f} GiB"


def machine_fact(name: str, machine: GPU | None) -> dict[str, str]:
    """A machine in the header: its name and the figures that say most."""
    names = ("num_sms", "clock_hz", "mem_bytes_per_s") if machine is not None else ()
    figures: list[Any] = [with_unit(figure, float(getattr(machine, figure))) for figure in names]
    if machine is not None:
        figures.append(f"{float(np.asarray(machine.mem_bytes)) / GIB:.4g} GiB")
    return {"Machine": ", ".join([name or "the given GPU", *figures])}


def cards(forecast: Forecast) -> list[tuple[str, str, str]]:
    """The numbers of a forecast that matter."""
    total = max(forecast.total_s, 1e-30)
    numbers = [("Step", duration(forecast.total_s), interval_text(forecast.interval_s))]
    if forecast.energy_j:
        joules = f"{forecast.joules_per_token:.3g} J a token, " if forecast.joules_per_token else ""
        numbers.append(("Energy", energy_text(forecast.energy_j), f"{joules}{forecast.power_w:,.0f} W"))
    if forecast.tokens:
        numbers.append(("Throughput", f"{forecast.tokens / total:,.0f} tokens/s", f"{forecast.tokens:,} tokens a step"))
    if forecast.gpus > 1 and "layout" in forecast.workload:
        exposed = forecast.exposed_communication_s
        numbers.append(("Exposed communication", duration(exposed), f"{exposed / total:.1%} of the step"))
    if forecast.columns:
        launches, whose = int(forecast.columns["count"].sum()), " of one GPU" if forecast.gpus > 1 else ""
        rate = f"{forecast.summed('flop') / total / TERA:.3g} TFLOP/s"
        numbers.append(("Arithmetic", rate, f"{launches:,} launches{whose}"))
    if utilization := utilization_text(forecast):
        mfu, hfu = utilization.split(", ")
        numbers.append(("Utilization", mfu, f"{hfu} of {forecast.peak_flop_per_s / TERA:,.0f} TFLOP/s"))
    if forecast.run:
        run = run_cells(forecast.run)
        numbers.append(("The whole run", run.pop("the run"), ", ".join(f"{name} {run[name]}" for name in run)))
    if forecast.memory is not None:
        numbers.append(("Memory", f"{forecast.memory.total / GIB:.1f} GiB", _verdict(forecast)))
    return numbers
