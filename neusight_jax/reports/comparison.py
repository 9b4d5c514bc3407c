"""Comparisons as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from neusight_jax.comparison import Candidate, Comparison
from neusight_jax.reports.page import Report
from neusight_jax.reports.plots import bars_with_interval
from neusight_jax.reports.text import (
    INTERVAL,
    between,
    cells_table,
    headed,
    interval_text,
    prices_fact,
    run_cells,
    short_number,
)
from neusight_jax.units import GIB, MS, duration, energy_text
from neusight_jax.workloads import workload_text


def tables(comparison: Comparison) -> RenderableType:
    """One row per GPU; `=` marks a tie."""
    several, priced = comparison.num_gpus > 1, comparison.priced
    measure = "cost" if comparison.by == "cost" else "time"
    rows = [_cells(item, comparison) for item in comparison.candidates]
    parts: list[RenderableType] = [cells_table("", rows)]
    if any(item.tie for item in comparison.candidates):
        parts.append("= ties with the first of its rank: the interval of their ratio holds 1")
    if comparison.has_intervals and len(rows) > 1:
        parts.append(
            f"against the best: {measure} over that of the first, with the {INTERVAL} of this ratio, narrow where "
            "machines are alike: their forecasts are then off alike"
        )
    if several:
        costs = ", costs" if priced else ""
        parts.append(f"throughput{costs} and latency are of {comparison.num_gpus} GPUs at once, memory is of one")
    head = f"{workload_text(comparison.workload)}, by {comparison.by}"
    return headed(head, *parts, notes=(*_own_notes(comparison), *comparison.notes))


def _cells(item: Candidate, comparison: Comparison) -> dict[str, str]:
    """The cells of a GPU by their columns."""
    several = comparison.num_gpus > 1
    cells = {"rank": f"{item.rank or '-'}{'=' if item.tie else ''}", "GPU": item.gpu}
    if several:
        cells["GPUs"] = str(comparison.num_gpus)
    cells["latency"] = "-" if item.latency_s is None else duration(item.latency_s)
    if comparison.has_intervals:
        cells[INTERVAL] = "-" if item.interval_s is None else between(item.interval_s)
    cells["against the best"] = _against_best(item)
    cells |= {"samples/s": short_number(item.samples_per_s), "tokens/s": short_number(item.tokens_per_s)}
    if comparison.workload["mode"] == "training" and any(other.mfu for other in comparison.candidates):
        cells |= {"MFU": _share(item.mfu), "HFU": _share(item.hfu)}
    run = run_cells(item.run, comparison.currency)
    # Columns are those that any of the runs has.
    names = dict.fromkeys(name for other in comparison.candidates for name in run_cells(other.run, comparison.currency))
    cells |= {name: run.get(name, "-") for name in names}
    cells |= {"memory": "-" if item.memory_bytes is None else f"{item.memory_bytes / GIB:.1f} GiB"}
    cells |= {"fits": {True: "yes", False: "no", None: "-"}[item.fits]}
    if comparison.priced:
        hour = f"per {'GPU ' if several else ''}hour{f' {comparison.currency}' if comparison.currency else ''}"
        cells |= {hour: short_number(item.price_per_hour), "per run": short_number(item.cost_per_run)}
        cells |= {"per 1k samples": short_number(item.cost_per_1k_samples)}
        cells |= {"per 1M tokens": short_number(item.cost_per_million_tokens)}
    return cells


def _against_best(item: Candidate) -> str:
    """The ratio to the first GPU, with its interval where there is one and it is not the first itself."""
    if item.ratio is None:
        return "-"
    if item.ratio_low is None or item.ratio_high is None or item.ratio_low == item.ratio_high:
        return f"{item.ratio:.3g}"
    return f"{item.ratio:.3g} ({between((item.ratio_low, item.ratio_high), '{:.3g}'.format)})"


def _own_notes(comparison: Comparison) -> list[str]:
    """The notes of single GPUs, each once with the GPUs that it is of."""
    whose: dict[str, list[str]] = {}
    for item in comparison.candidates:
        for note in item.notes:
            whose.setdefault(note.replace(item.gpu, "it"), []).append(item.gpu)
    return [f"{_some(names)}: {note}" for note, names in whose.items()]


def _some(names: Sequence[str]) -> str:
    """Names in a line, the first six where there are many."""
    rest = len(names) - 6
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:6])} and {rest} others"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def report(comparison: Comparison) -> Report:
    """The page of a comparison."""
    items = [item for item in comparison.candidates if item.latency_s is not None]
    names = [f"{item.gpu}{'' if item.fits else ' (may not fit)'}" for item in items]
    latencies = [(item.latency_s or 0.0) / MS for item in items]
    bounds = [(None if item.low_s is None else item.low_s / MS, (item.high_s or 0.0) / MS) for item in items]
    pictures = [bars_with_interval("Latency", names, latencies, bounds if comparison.has_intervals else None, "ms")]
    if comparison.priced:
        unit = f"{comparison.currency or 'cost'} per million tokens"
        costs = [item.cost_per_million_tokens for item in items]
        pictures.append(bars_with_interval("Cost", names, costs, None, unit))
    facts = {
        "Workload": workload_text(comparison.workload),
        "Machine": ", ".join(item.gpu for item in comparison.candidates),
    }
    prices = {item.gpu: item.price_per_hour for item in comparison.candidates if item.price_per_hour is not None}
    facts |= prices_fact(prices, comparison.currency, comparison.price_file)
    title = f"{comparison.workload['model']} on {len(comparison.candidates)} GPUs"
    return Report(title, facts, _sentence(comparison), pictures, tables(comparison))


def _sentence(comparison: Comparison) -> str:
    """The best, what it takes and costs, and how the next that is told from it compares."""
    first, *rest = comparison.candidates or (None,)
    if first is None or not first.rank:
        return f"None of {len(comparison.candidates)} GPUs can run {comparison.workload['model']}."
    best = "costs least" if comparison.by == "cost" else "is the fastest"
    words = [f"{first.gpu} {best}: {duration(first.latency_s or 0.0)} a step"]
    words += [interval_text(first.interval_s)] * (first.interval_s is not None)
    words += [energy_text(first.energy_j)] if first.energy_j else []
    if first.cost_per_million_tokens is not None:
        words.append(f"{short_number(first.cost_per_million_tokens)} {comparison.currency} per million tokens")
    tied = [item.gpu for item in rest if item.rank == first.rank]
    words += [f"a tie with {_some(tied)}"] * bool(tied)
    following = next((item for item in rest if item.rank > first.rank), None)
    much = "costs" if comparison.by == "cost" else "takes"
    after = f"; {following.gpu} {much} {_against_best(following)} times as much" if following else ""
    return f"{', '.join(words)}{after}."
