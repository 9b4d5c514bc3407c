"""A comparison as a table for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from neusight_jax.compare import Candidate, Comparison
from neusight_jax.report import duration, table
from neusight_jax.units import GIB
from neusight_jax.workload import workload_text


def comparison_table(found: Comparison) -> RenderableType:
    """One row per GPU; `=` marks a tie."""
    priced = any(item.price_per_hour is not None for item in found.candidates)
    spread = any(item.low_s is not None for item in found.candidates)
    several = found.num_gpus > 1
    header = [
        "rank",
        "GPU",
        *(["GPUs"] if several else []),
        "latency",
        *(["interval"] if spread else []),
        "samples/s",
        "tokens/s",
        "memory",
        "fits",
    ]
    unit = f" {found.currency}" if found.currency else ""
    if priced:
        header += [f"per {'GPU ' if several else ''}hour{unit}", "per run", "per 1k samples", "per 1M tokens"]
    rows = [_row(item, found.num_gpus, spread, priced) for item in found.candidates]
    parts: list[RenderableType] = [Text(f"{workload_text(found.workload)}, by {found.by}", style="bold")]
    parts.append(table("", header, rows, text_columns=2))
    if any(item.tie for item in found.candidates):
        parts.append(Text("= ties: their intervals overlap that of the best of the group"))
    if several:
        costs = ", costs" if priced else ""
        parts.append(Text(f"throughput{costs} and latency are of {found.num_gpus} GPUs at once, memory is of one"))
    parts += [Text(f"note: {line}") for line in (*_own_notes(found), *found.notes)]
    return Group(*parts)


def _own_notes(found: Comparison) -> list[str]:
    """The notes of single GPUs, each once with the GPUs that it is of."""
    whose: dict[str, list[str]] = {}
    for item in found.candidates:
        for note in item.notes:
            whose.setdefault(note.replace(item.gpu, "it"), []).append(item.gpu)
    return [f"{', '.join(names)}: {note}" for note, names in whose.items()]


def _row(item: Candidate, num_gpus: int, spread: bool, priced: bool) -> list[str]:
    rank = "-" if not item.rank else f"{item.rank}{'=' if item.tie else ''}"
    cells = [rank, item.gpu, *([str(num_gpus)] if num_gpus > 1 else [])]
    cells.append("-" if item.latency_s is None else duration(item.latency_s))
    if spread:
        cells.append(
            "-" if item.low_s is None or item.high_s is None else f"{duration(item.low_s)} - {duration(item.high_s)}"
        )
    cells += [_number(item.samples_per_s), _number(item.tokens_per_s)]
    cells += [f"{item.memory_bytes / GIB:.1f} GiB", "yes" if item.fits else "no"]
    if priced:
        costs = (item.price_per_hour, item.cost_per_run, item.cost_per_1k_samples, item.cost_per_million_tokens)
        cells += [_number(cost) for cost in costs]
    return cells


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
