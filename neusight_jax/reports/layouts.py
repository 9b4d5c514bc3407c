"""Layouts of jobs as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType

from neusight_jax.forecast import Forecast
from neusight_jax.graph.memory import CROWDED_SHARE
from neusight_jax.hardware.files import gpu_in
from neusight_jax.layouts.answers import Choice, Layouts, Machine
from neusight_jax.reports import forecast as forecasts
from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.plots import bars_with_interval, scatter
from neusight_jax.reports.text import (
    INTERVAL,
    between,
    cells_table,
    command_text,
    headed,
    interval_text,
    prices_fact,
    run_cells,
    run_line,
)
from neusight_jax.units import GIB, MS, duration, energy_text
from neusight_jax.workloads import workload_text

WAYS = {"tensor": "TP", "pipeline": "PP", "data": "DP", "context": "CP", "expert": "EP"}
"""Ways to split, as tables call them."""
CROWDED = f"! above {CROWDED_SHARE:.0%} of the memory by estimate, which is right to a fifth: it may not fit"


def tables(layouts: Layouts) -> RenderableType:
    """One row per machine where there are several, then the layouts of each; `=` marks a tie."""
    load = layouts.workload
    if any(item.command for machine in layouts.machines for item in machine.choices):
        return headed(_head(load), *_recipes(layouts), notes=layouts.notes)
    parts: list[RenderableType] = []
    if len(layouts.machines) > 1:
        rows = [_machine_cells(machine, layouts.currency) for machine in layouts.machines if machine.choices]
        if rows:
            parts += [cells_table("Machines, by their best layout", rows), ""]
    for machine in layouts.machines:
        parts.append(machine.verdict)
        if machine.choices:
            rows = [_cells(item, layouts.currency) for item in machine.choices]
            parts.append(cells_table("", rows))
            parts += [f"{item.rank}: {item.why}" for item in machine.choices[:1]]
        parts += _near_lines(machine)
        parts.append("")
    if any(_crowded(item) for machine in layouts.machines for item in machine.choices):
        parts.append(CROWDED)
    if any(machine.tie for machine in layouts.machines):
        parts.append("= before a machine: its interval reaches that of the first")
    if any(item.tie for machine in layouts.machines for item in machine.choices):
        parts.append("= cannot be told from the first of its rank: they differ by less than such forecasts err")
    return headed(_head(load), *parts, notes=layouts.notes)


def _head(load: Mapping[str, Any]) -> str:
    lora = load.get("lora")
    stored = f", frozen weights in {lora['weight_dtype']}" if lora and lora.get("weight_dtype") else ""
    adapters = f", LoRA of rank {lora['rank']}{stored}" if lora else ""
    return f"{workload_text(load)}, {load['optimizer'] or 'no optimizer'}{adapters}"


def _recipes(layouts: Layouts) -> list[RenderableType]:
    """The recipe of every machine, what others lack, and the commands of the first and of the smallest of each GPU."""
    fit = [machine for machine in layouts.machines if machine.choices]
    rows = [_recipe_cells(machine, layouts.currency) for machine in fit]
    parts: list[RenderableType] = [cells_table("", rows)]
    parts += [machine.verdict for machine in layouts.machines if not machine.choices]
    if any(machine.tie for machine in fit):
        parts.append("= its interval reaches that of the first")
    if any(_crowded(machine.choices[0]) for machine in fit):
        parts.append(CROWDED)
    fewest = {gpu_in(machine.name): machine for machine in sorted(fit, key=lambda machine: -machine.gpus)}
    for machine in dict.fromkeys((fit[0].name, *(machine.name for machine in fewest.values()))):
        item = next(other.choices[0] for other in fit if other.name == machine)
        parts += ["", f"{machine}:", *(f"  $ {command_text(line)}" for line in (item.command, item.trainer))]
    return parts


def _named(machine: Machine) -> str:
    return f"{'=' if machine.tie else ''}{machine.name}"


def _recipe_cells(machine: Machine, currency: str) -> dict[str, str]:
    item = machine.choices[0]
    cells = {"machine": _named(machine), "recipe": layout_text(item.step.workload["layout"])}
    cells |= {"step": duration(item.step.total_s), "tokens/s": f"{item.step.tokens_per_s:,.0f}"}
    cells |= run_cells(item.step.run, currency) if item.step.run else _interval_cell(item.step)
    cells |= {"J/token": f"{item.step.joules_per_token or 0.0:.3g}", "MFU": f"{item.step.mfu or 0.0:.1%}"}
    return cells | {"memory": f"{item.step.memory_bytes / GIB:.1f} GiB{'!' if _crowded(item) else ' '}"}


def layout_text(layout: Mapping[str, Any]) -> str:
    """A layout in a few words."""
    words = [f"{short}{layout[name]}" for name, short in WAYS.items() if layout[name] > 1]
    words += [f"ZeRO-{layout['zero']}"] * (layout["zero"] > 0)
    words += [f"over {layout['shards']}"] * (layout["shards"] > 0)
    words += [f"{layout['chunks']} chunks"] * (layout["chunks"] > 1)
    words += ["SP"] * layout["sequence_parallel"] + [f"micro-batch {layout['micro_batch_size']}"]
    if layout["recompute"] != "none":
        words.append(f"recompute {layout['recompute']}")
    return " ".join(words)


def _near_lines(machine: Machine) -> list[str]:
    """Layouts that nearly fit, and how much they lack."""
    return [
        f"nearly fits, {(step.memory_bytes - step.mem_bytes) / GIB:.2g} GiB too large by estimate: "
        f"{layout_text(step.workload['layout'])}, {duration(step.total_s)}"
        for step in machine.near_misses
    ]


def _crowded(item: Choice) -> bool:
    return item.step.memory_bytes > CROWDED_SHARE * item.step.mem_bytes


def _cells(item: Choice, currency: str) -> dict[str, str]:
    step = item.step
    shares = {"compute": step.compute_s, "bubble": step.bubble_s, "exposed": step.exposed_communication_s}
    cells = {"rank": f"{item.rank}{'=' if item.tie else ''}", **_rates(step)}
    cells |= {name: f"{seconds / step.total_s:.1%}" for name, seconds in shares.items()} | _efficiency(step, currency)
    cells["memory"] = f"{step.memory_bytes / GIB:.1f} GiB{'!' if _crowded(item) else ' '}"
    if item.cost_per_million_tokens is not None:
        cells["per 1M tokens"] = f"{item.cost_per_million_tokens:,.4g}"
    return cells


def _machine_cells(machine: Machine, currency: str) -> dict[str, str]:
    best = machine.choices[0]
    cells = {"machine": _named(machine), **_rates(best.step), **_efficiency(best.step, currency)}
    if best.cost_per_million_tokens is not None:
        cells["per GPU hour"] = f"{machine.price_per_hour:,.4g}"
        cells["per 1M tokens"] = f"{best.cost_per_million_tokens:,.4g}"
    return cells


def _rates(step: Forecast) -> dict[str, str]:
    """A layout and how fast its step is."""
    cells = {"layout": layout_text(step.workload["layout"]), "step": duration(step.total_s), **_interval_cell(step)}
    return cells | {"tokens/s": f"{step.tokens_per_s:,.0f}", "a GPU": f"{step.tokens_per_s / step.gpus:,.0f}"}


def _efficiency(step: Forecast, currency: str) -> dict[str, str]:
    """Joules, utilization, and what a whole run costs."""
    cells = {"J/token": f"{step.joules_per_token or 0.0:.3g}", "MFU": f"{step.mfu or 0.0:.1%}"}
    return {**cells, "HFU": f"{step.hfu or 0.0:.1%}", **run_cells(step.run, currency)}


def _interval_cell(step: Forecast) -> dict[str, str]:
    return {} if step.interval_s is None else {INTERVAL: between(step.interval_s)}


def _best(machine: Machine) -> str:
    """The first layout of a machine, how many others tie with it, and the interval of its step."""
    first = machine.choices[0]
    others = sum(item.rank == first.rank for item in machine.choices) - 1
    words = [layout_text(first.step.workload["layout"])]
    words += [f"a tie with {others} more"] if others else []
    words += [interval_text(first.step.interval_s)] if first.step.interval_s is not None else []
    return "; ".join([*words, f"{energy_text(first.step.energy_j)} a step, {first.step.power_w:,.0f} W"])


def report(layouts: Layouts) -> Report:
    """The page of a search for layouts: the best of every machine, and where their steps go."""
    load = layouts.workload
    best = {machine.name: machine.choices[0] for machine in layouts.machines if machine.choices}
    shown = (
        best
        if len(best) > 1
        else {
            f"{item.rank}: {layout_text(item.step.workload['layout'])}": item
            for machine in layouts.machines
            for item in machine.choices
        }
    )
    steps = [item.step for item in shown.values()]
    ends = [step.interval_s for step in steps if step.interval_s is not None]
    bounds = [(low / MS, high / MS) for low, high in ends] if len(ends) == len(steps) else None
    latencies = [step.total_s / MS for step in steps]
    joules = [step.joules_per_token for step in steps]
    pictures = [
        _times_and_memory(layouts),
        bars_with_interval("Step", list(shown), latencies, bounds, "ms"),
        *forecasts.pictures({name: item.step for name, item in shown.items()}),
        bars_with_interval("Energy", list(shown), joules, None, "J a token"),
    ]
    facts = {"Workload": workload_text(load), "Machine": ", ".join(machine.name for machine in layouts.machines)}
    prices = {machine.name.partition("x ")[2] or machine.name: machine.price_per_hour for machine in layouts.machines}
    facts |= prices_fact({name: price for name, price in prices.items() if price is not None}, layouts.currency)
    title, drawn = f"Layouts of {load['model']}", pictures if steps else ()
    return Report(title, facts, _sentence(layouts), drawn, tables(layouts))


def _sentence(layouts: Layouts) -> str:
    """The first machine by its best layout: what a step takes, and what it costs."""
    machine = next((machine for machine in layouts.machines if machine.choices), None)
    if machine is None:
        return f"No layout of {layouts.workload['model']} fits."
    best = machine.choices[0]
    cost = ""
    if best.step.run:
        cost = f", {run_line(best.step.run, layouts.currency)}"
    elif best.cost_per_million_tokens is not None:
        cost = f", {best.cost_per_million_tokens:,.4g} {layouts.currency} per million tokens"
    tied = [other.name for other in layouts.machines if other.tie and other is not machine]
    tie = f", a tie with {', '.join(tied)}" if machine.tie and tied else ""
    return f"{machine.name}{tie}: {duration(best.step.total_s)} a step with {_best(machine)}{cost}."


def _times_and_memory(layouts: Layouts) -> Plot:
    """Every layout that fits by its step and the memory of its fullest rank, and the memory that a GPU has."""
    series = {
        machine.name: [
            (item.step.memory_bytes / GIB, item.step.total_s / MS, layout_text(item.step.workload["layout"]))
            for item in machine.choices
        ]
        for machine in layouts.machines
        if machine.choices
    }
    sizes = {machine.choices[0].step.mem_bytes / GIB for machine in layouts.machines if machine.choices}
    limits = {f"{size:.0f} GiB of a GPU": size for size in sorted(sizes)}
    axes = "memory of the fullest rank, GiB", "step, ms"
    return scatter("Time against memory", series, *axes, limits, better=(-1, -1))
