"""Answers about serving as tables for people."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

from rich.console import RenderableType

from neusight_jax.job.parallelism import Parallelism
from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.plots import bars_with_interval, scatter
from neusight_jax.reports.text import INTERVAL, between, cells_table, headed, prices_fact, run_cells
from neusight_jax.serving.choices import Serving, ServingChoice, layout_of
from neusight_jax.units import MS, duration, figure_text


def tables(serving: Serving) -> RenderableType:
    """The best layout of every GPU in order; `=` marks a tie."""
    first = _first_by_gpu(serving.choices)
    answers = [choice for choice in first.values() if choice.replicas]
    rows = [_cells(choice, serving) for choice in answers]
    parts: list[RenderableType] = []
    if rows:
        parts.append(cells_table("", rows))
    parts.append(
        f"users: most of one replica within the targets; tok: output tokens; W: mean of all GPUs, the boards alone; "
        f"in brackets: {INTERVAL}, of TPOT that of the kernels alone"
    )
    if any(choice.tie for choice in answers):
        parts.append("= ties: their intervals overlap that of the best of the group")
    if answers and answers[0].command:
        parts.append(f"a replica of the first: {answers[0].command}")
    hidden = len(serving.choices) - len(first)
    if hidden:
        parts.append(f"the best layout of each GPU; {hidden} others are in --json")
    unable = (choice for choice in first.values() if not choice.replicas and choice.notes)
    refusals = [f"{choice.machine}: {choice.notes[0]}" for choice in unable]
    return headed(_head(serving), *parts, notes=(*refusals, *serving.notes))


def _first_by_gpu(choices: Iterable[ServingChoice]) -> dict[str, ServingChoice]:
    """The first choice of every GPU, or two of them, in their order."""
    first: dict[str, ServingChoice] = {}
    for choice in choices:
        first.setdefault(choice.machine, choice)
    return first


_ORDERS = {"gpus": "number of GPUs"}
"""What an order is called, where its name does not say it."""


def _head(serving: Serving) -> str:
    load = serving.workload
    users, rate = load["users"], load["request_rate"]
    demand = f"{users:g} users" if users is not None else f"{rate:g} requests/s"
    pairs = (("first token", load["ttft_s"]), ("token", load["tpot_s"]))
    targets = [f"{name} within {duration(most)}" for name, most in pairs if most is not None]
    whose = "half" if load["percentile"] == 50.0 else "95 %"
    met = f", {' and '.join(targets)} for {whose} of requests" if targets else ""
    lengths = f"{load['input_tokens']:,} tokens in, {load['output_tokens']:,} out"
    held = "".join(f", GPUs held at {figure_text(name, value)}" for name, value in load.get("limits", {}).items())
    return (
        f"{load['model']} ({load['products']}): {demand}, {lengths}{met}{held}; "
        f"by {_ORDERS.get(serving.by, serving.by)}"
    )


def _cells(choice: ServingChoice, serving: Serving) -> dict[str, str]:
    """The cells of a choice by their columns."""
    key = f"p{serving.workload['percentile']:g}"
    low, high = choice.intervals["gpus"]
    cells = {
        "rank": f"{choice.rank or '-'}{'=' if choice.tie else ''}",
        "GPU": choice.machine.replace("NVIDIA ", "").replace("AMD Instinct ", ""),
        "GPUs": f"{choice.gpus}" if low == high else f"{choice.gpus} ({between((low, high), '{:g}'.format)})",
        "layout": _layout(choice),
        f"TTFT {key}": _bounded(choice.ttft_s[key], choice.intervals["ttft_s"]),
        f"TPOT {key}": _bounded(choice.tpot_s[key], choice.intervals["tpot_s"]),
        "users": f"{choice.max_users or 0:,}",
        "tok/s/GPU": f"{choice.tokens_per_s_gpu or 0.0:,.0f}",
        "W": "-" if choice.power_w is None else f"{choice.power_w:,.0f}",
        "J/tok": "-" if choice.joules_per_token is None else f"{choice.joules_per_token:.3g}",
    }
    cells |= run_cells(choice.run, serving.currency)
    if serving.by == "cost":
        costs = choice.costs
        unit = f" {serving.currency}" if serving.currency else ""
        cells[f"hour{unit}"] = f"{costs['per_hour']:.2f}" if costs else "-"
        cells["1M in/out"] = f"{costs['input']:.2f}/{costs['output']:.2f}" if costs else "-"
        interval = between(choice.intervals["cost"], "{:.2f}".format)
        cells["1M tokens"] = f"{costs['tokens']:.2f} ({interval})" if costs else "-"
    return cells


def _layout(choice: ServingChoice) -> str:
    """Replicas and how each is split; those that prefill, then those that decode."""

    def split(replicas: float | None, layout: Parallelism) -> str:
        more = (f" {name}{ranks}" for name, ranks in (("DP", layout.data), ("EP", layout.expert)) if ranks > 1)
        return f"{replicas:g} x TP{layout.tensor}{''.join(more)}"

    decode, first = split(choice.replicas, choice.layout), choice.prefill
    return f"{split(first['replicas'], layout_of(first))} + {decode}" if first else decode


def _bounded(value: float, interval: tuple[float, float]) -> str:
    low, high = interval
    if math.isinf(high):
        return f"{duration(value)} or more"
    return f"{duration(value)} ({between(interval, partial(duration, digits=3))})" if low > 0 else duration(value)


def report(serving: Serving) -> Report:
    """The page of an answer about serving: GPUs that each kind takes, times to tokens, costs."""
    first = _first_by_gpu(choice for choice in serving.choices if choice.replicas)
    shown, key = list(first.values()), f"p{serving.workload['percentile']:g}"
    names = [choice.machine for choice in shown]
    counts, bounds = [float(choice.gpus or 0) for choice in shown], [choice.intervals["gpus"] for choice in shown]
    pictures = [_front(serving, key), bars_with_interval("GPUs", names, counts, bounds, "GPUs")]
    for title, field in (("Time to the first token", "ttft_s"), ("Time of a token", "tpot_s")):
        bounds = [(choice.intervals[field][0] / MS, choice.intervals[field][1] / MS) for choice in shown]
        values = [getattr(choice, field)[key] / MS for choice in shown]
        pictures.append(bars_with_interval(f"{title}, {key}", names, values, bounds, "ms"))
    powered = [choice.joules_per_token for choice in shown if choice.joules_per_token is not None]
    if powered and len(powered) == len(shown):
        pictures.append(bars_with_interval("Energy", names, powered, None, "J an output token"))
    priced = [choice for choice in shown if choice.costs]
    if serving.by == "cost" and len(priced) == len(shown):
        costs, bounds = [choice.costs["tokens"] for choice in shown], [choice.intervals["cost"] for choice in shown]
        unit = f"{serving.currency or 'cost'} per million tokens"
        pictures.insert(1, bars_with_interval("Cost", names, costs, bounds, unit))
    facts = {"Workload": _head(serving), "Machine": ", ".join(dict.fromkeys(choice.gpu for choice in serving.choices))}
    hours = {item.gpu: item.costs["per_hour"] / (item.gpus or 1) for item in priced if item.machine == item.gpu}
    facts |= prices_fact(hours, serving.currency)
    title, drawn = f"Serving {serving.workload['model']}", pictures if shown else ()
    return Report(title, facts, _sentence(serving), drawn, tables(serving))


def _sentence(serving: Serving) -> str:
    """The best choice: how many GPUs, how laid out, times to tokens, watts and dollars."""
    best = next((choice for choice in serving.choices if choice.replicas), None)
    if best is None:
        return f"No GPU serves {serving.workload['model']} within the targets."
    cells = _cells(best, serving)
    words = [f"The load takes {cells['GPUs']} {best.machine} ({cells['layout']})"]
    first = _first_by_gpu(serving.choices)
    tied = [name for name, choice in first.items() if choice.rank == best.rank and name != best.machine]
    words += [f"a tie with {', '.join(tied)}"] if tied else []
    words += [f"{name} {text}" for name, text in cells.items() if name.startswith(("TTFT", "TPOT"))]
    words += [f"{cells['W']} W, {cells['J/tok']} J an output token"] * (best.power_w is not None)
    if best.costs:
        money = f" {serving.currency}" if serving.currency else ""
        words.append(f"{best.costs['per_hour']:.2f}{money} an hour, {cells['1M tokens']}{money} per million tokens")
    return f"{'; '.join(words)}."


def _front(serving: Serving, key: str) -> Plot:
    """Every layout by the tokens a user sees in a second and those that a GPU makes, with the target of users."""
    series: dict[str, list[tuple[float, float, str]]] = {}
    for choice in serving.choices:
        if choice.replicas and choice.tpot_s[key] > 0.0:
            point = (1.0 / choice.tpot_s[key], choice.tokens_per_s_gpu or 0.0, _layout(choice))
            series.setdefault(choice.machine, []).append(point)
    most = serving.workload["tpot_s"]
    limits = {f"target, {duration(most)} a token": 1.0 / most} if most else {}
    across, up = f"tokens/s of a user, {key}", "tokens/s of a GPU"
    return scatter("Throughput against speed", series, across, up, limits, better=(1, 1))
