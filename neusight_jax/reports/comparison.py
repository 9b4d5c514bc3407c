"""Comparisons as tables for people."""

from __future__ import annotations

from rich.console import RenderableType

from neusight_jax.comparison import Candidate, Comparison
from neusight_jax.reports.page import Report
from neusight_jax.reports.plots import bars_with_interval
from neusight_jax.reports.text import headed, table
from neusight_jax.units import GIB, MS, duration
from neusight_jax.workloads import workload_text


def tables(found: Comparison) -> RenderableType:
    """One row per GPU; `=` marks a tie."""
    several, priced = found.num_gpus > 1, found.priced
    rows = [_cells(item, found) for item in found.candidates]
    parts: list[RenderableType] = [
        table("", list(rows[0]) if rows else [], [list(row.values()) for row in rows], text_columns=2)
    ]
    if any(item.tie for item in found.candidates):
        parts.append("= ties: their intervals overlap that of the best of the group")
    if several:
        costs = ", costs" if priced else ""
        parts.append(f"throughput{costs} and latency are of {found.num_gpus} GPUs at once, memory is of one")
    head = f"{workload_text(found.workload)}, by {found.by}"
    return headed(head, *parts, notes=(*_own_notes(found), *found.notes))


def _cells(item: Candidate, found: Comparison) -> dict[str, str]:
    """The cells of a GPU by their columns."""
    several = found.num_gpus > 1
    low, high = (None if each is None else duration(each) for each in (item.low_s, item.high_s))
    cells = {"rank": f"{item.rank or '-'}{'=' if item.tie else ''}", "GPU": item.gpu}
    if several:
        cells["GPUs"] = str(found.num_gpus)
    cells["latency"] = "-" if item.latency_s is None else duration(item.latency_s)
    if found.has_intervals:
        cells["interval"] = f"{low} - {high}" if low and high else "-"
    cells |= {"samples/s": _number(item.samples_per_s), "tokens/s": _number(item.tokens_per_s)}
    cells |= {"memory": f"{item.memory_bytes / GIB:.1f} GiB", "fits": "yes" if item.fits else "no"}
    if found.priced:
        hour = f"per {'GPU ' if several else ''}hour{f' {found.currency}' if found.currency else ''}"
        cells |= {hour: _number(item.price_per_hour), "per run": _number(item.cost_per_run)}
        cells |= {"per 1k samples": _number(item.cost_per_1k_samples)}
        cells |= {"per 1M tokens": _number(item.cost_per_million_tokens)}
    return cells


def _own_notes(found: Comparison) -> list[str]:
    """The notes of single GPUs, each once with the GPUs that it is of."""
    whose: dict[str, list[str]] = {}
    for item in found.candidates:
        for note in item.notes:
            whose.setdefault(note.replace(item.gpu, "it"), []).append(item.gpu)
    return [f"{', '.join(names)}: {note}" for note, names in whose.items()]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def report(found: Comparison) -> Report:
    """The page of a comparison."""
    items = [item for item in found.candidates if item.latency_s is not None]
    names = [f"{item.gpu}{'' if item.fits else ' (may not fit)'}" for item in items]
    latencies = [(item.latency_s or 0.0) / MS for item in items]
    bounds = [(None if item.low_s is None else item.low_s / MS, (item.high_s or 0.0) / MS) for item in items]
    pictures = [bars_with_interval("Latency", names, latencies, bounds if found.has_intervals else None, "ms")]
    if found.priced:
        unit = f"{found.currency or 'cost'} per million tokens"
        costs = [item.cost_per_million_tokens for item in items]
        pictures.append(bars_with_interval("Cost", names, costs, None, unit))
    best = [item for item in items if item.rank == 1]
    cards = [(f"Best by {found.by}", ", ".join(item.gpu for item in best), "a tie" if len(best) > 1 else "")]
    if best:
        low, high = (None if each is None else duration(each) for each in (best[0].low_s, best[0].high_s))
        cards.append(
            ("Its latency", duration(best[0].latency_s or 0.0), f"80% interval {low} to {high}" if low else "")
        )
    title = f"{found.workload['model']} on {len(found.candidates)} GPUs"
    facts = {"Workload": workload_text(found.workload), "Machine": ", ".join(item.gpu for item in found.candidates)}
    return Report(title, facts, cards, pictures, tables(found))
