"""A comparison as a picture: latency and, with prices, cost of every GPU, intervals as bars of error."""

from __future__ import annotations

from pathlib import Path

from neusight_jax.compare import Comparison
from neusight_jax.errors import InputError
from neusight_jax.files import write_atomically
from neusight_jax.report import duration
from neusight_jax.units import MS
from neusight_jax.workload import workload_text

SUFFIXES: tuple[str, ...] = (".png", ".svg", ".pdf")


def write_plot(found: Comparison, path: Path) -> None:
    """Draw a comparison. Raises: `InputError` without matplotlib, for another suffix, or when it cannot be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: cannot draw {path.suffix or 'a file without suffix'}; give .png, .svg or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a plot needs matplotlib; install it with `pip install '.[plot]'`") from None
    items = [item for item in reversed(found.candidates) if item.latency_s is not None]
    priced = any(item.cost_per_million_tokens is not None for item in items)
    figure = Figure(figsize=(10 if priced else 6, 1 + 0.4 * len(items)), layout="constrained")
    axes = figure.subplots(1, 2 if priced else 1, squeeze=False)[0]
    names = [f"{item.gpu}{'' if item.fits else ' (may not fit)'}" for item in items]
    seconds = [(item.latency_s or 0.0) / MS for item in items]
    around = [
        [(value - (item.low_s or item.latency_s or 0.0) / MS) for value, item in zip(seconds, items, strict=True)],
        [((item.high_s or item.latency_s or 0.0) / MS - value) for value, item in zip(seconds, items, strict=True)],
    ]
    axes[0].barh(names, seconds, xerr=around if any(item.low_s for item in items) else None)
    axes[0].xaxis.set_major_formatter(lambda value, _: duration(value * MS) if value else "0")
    axes[0].set_xlabel("latency" + (", 80% interval" if any(item.low_s for item in items) else ""))
    if priced:
        axes[1].barh(names, [item.cost_per_million_tokens or 0.0 for item in items])
        several = f" on {found.num_gpus} GPUs" if found.num_gpus > 1 else ""
        axes[1].set_xlabel(f"{found.currency or 'cost'} per million tokens{several}")
        axes[1].set_yticks([])
    figure.suptitle(workload_text(found.workload))
    write_atomically(path, lambda target: figure.savefig(target))
