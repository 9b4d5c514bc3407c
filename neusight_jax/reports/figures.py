"""The pictures, each from one result; matplotlib figures without any global state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from neusight_jax.arithmetic import dtype_index
from neusight_jax.comparison import Comparison
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.forecast import Forecast
from neusight_jax.hardware.gpu import GPU
from neusight_jax.reports.text import INTERVAL
from neusight_jax.sensitivities import SECANT, Sensitivity
from neusight_jax.units import MS, TERA, UNITS, duration
from neusight_jax.workloads import workload_text

if TYPE_CHECKING:
    import pandas as pd

_SIZE = (8.0, 5.0)
_LEAST = 5e-4
"""Elasticities below this are left out of the bars."""
_LEAST_SHARE = 1e-3
"""Kernels with a smaller share of the time need not lie inside the frame of a roofline."""


def _axes(title: str, across: str, up: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure, axes


def _scaled(name: str) -> tuple[float, str]:
    """Factor and label of a field or metric in the unit people use."""
    if name.endswith("_flop_per_s"):
        return TERA, f"{name} (TFLOP/s)"
    scale, unit = UNITS.get(name, (1.0, "s"))
    return scale, f"{name} ({unit})"


def roofline(forecast: Forecast, gpu: GPU) -> Figure:
    """Roofline of a GPU with a model's kernels: intensity across, forecast FLOP/s up, area = share of the time.

    Kernels without arithmetic are left out, and the title says their share of the time.
    """
    columns = forecast.columns
    cost = columns["seconds"] * columns["count"]
    real = columns["flop"] > 0
    rest = float(cost[~real].sum() / cost.sum())
    figure, axes = _axes(
        f"{forecast.model} on {forecast.gpu or 'the GPU'}, {forecast.mode} ({rest:.0%} of the time has no arithmetic)",
        "arithmetic intensity, FLOP/byte",
        "TFLOP/s",
    )
    intensity = np.where(real, columns["flop"], 1.0) / columns["bytes"]
    for family in dict.fromkeys(columns["family"][real].astype(str)):
        own = real & (columns["family"].astype(str) == family)
        rate = columns["flop"][own] / columns["seconds"][own] / TERA
        area = 8.0 + 1500.0 * cost[own] / cost.sum()
        axes.scatter(intensity[own], rate, s=area, alpha=0.6, label=family, linewidths=0.5, edgecolors="black")
    least, most = float(intensity[real].min()), float(intensity[real].max())
    span = np.geomspace(min(0.05, 0.5 * least), max(1e3, 2.0 * most), 200)
    peaks = {"fp32 vector": float(np.asarray(gpu.fp32_flop_per_s))}
    matrix = float(np.asarray(gpu.matrix_paths())[dtype_index(forecast.dtype)])
    if not np.isclose(matrix, peaks["fp32 vector"], rtol=1e-3):
        peaks[f"{forecast.dtype} matrix"] = matrix
    for (name, peak), style in zip(peaks.items(), ("-", "--"), strict=False):
        roof = np.minimum(peak, span * float(np.asarray(gpu.mem_bytes_per_s))) / TERA
        axes.plot(span, roof, "black", linestyle=style, linewidth=1.2, label=f"roof, {name}", zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    rates = columns["flop"][real] / columns["seconds"][real] / TERA
    # Kernels of a few elements run orders of magnitude below; they must not press the rest into a corner.
    seen = cost[real] > _LEAST_SHARE * cost.sum()
    axes.set_ylim(bottom=0.4 * float(rates[seen].min() if seen.any() else rates.min()))
    axes.legend(fontsize="small", markerscale=0.5)
    return figure


def bars(result: Sensitivity) -> Figure:
    """Elasticities of the total, one bar per figure, with the exact secant as a mark."""
    total, secants = result.total, result.secants
    names = [name for name in total if max(abs(total[name]), abs(secants[name])) > _LEAST]
    names.sort(key=lambda name: -total[name])
    forecast = result.forecast
    figure, axes = _axes(
        f"{forecast.model} on {forecast.gpu or 'the GPU'}, {forecast.mode}: {duration(result.total_s)}",
        "d log time / d log figure",
        "",
    )
    places = np.arange(len(names))
    values = [total[name] for name in names]
    axes.barh(places, values, color=["tab:blue" if value < 0 else "tab:red" for value in values])
    axes.plot([secants[name] for name in names], places, "k|", markersize=12, label=f"exact, ±{SECANT:.0%}")
    axes.set_yticks(places, names)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.legend(fontsize="small", loc="lower left")
    return figure


def comparison(found: Comparison) -> Figure:
    """Latency of every GPU with its interval, and with prices the cost of a million tokens."""
    items = [item for item in reversed(found.candidates) if item.latency_s is not None]
    panels = 2 if found.priced else 1
    figure = Figure(figsize=(2 + 4 * panels, 1 + 0.4 * len(items)), layout="constrained")
    times, *costs = figure.subplots(1, panels, squeeze=False)[0]
    names = [f"{item.gpu}{'' if item.fits else ' (may not fit)'}" for item in items]
    low, middle, high = (
        np.array([getattr(item, name) for item in items], float) / MS for name in ("low_s", "latency_s", "high_s")
    )
    around = np.nan_to_num([middle - low, high - middle]) if found.has_intervals else None
    times.barh(names, middle, xerr=around)
    times.xaxis.set_major_formatter(lambda value, _: duration(value * MS) if value else "0")
    times.set_xlabel("latency" + (f", {INTERVAL}" if found.has_intervals else ""))
    for axes in costs:
        axes.barh(names, [item.cost_per_million_tokens or 0.0 for item in items])
        several = f" on {found.num_gpus} GPUs" if found.num_gpus > 1 else ""
        axes.set_xlabel(f"{found.currency or 'cost'} per million tokens{several}")
        axes.set_yticks([])
    figure.suptitle(workload_text(found.workload))
    return figure


def heat_map(frame: pd.DataFrame, across: str, up: str) -> Figure:
    """A sweep over two fields as a map of seconds; other fields and workloads are averaged as logarithms."""
    for name in (across, up):
        if name not in frame.columns:
            raise unknown_name("column", name, map(str, frame.columns))
    logs = frame.assign(_log=np.log(frame["seconds"])).pivot_table(index=up, columns=across, values="_log")
    if min(logs.shape) < 2:
        raise InputError(f"a heat map needs at least two values of {across} and {up}, found {logs.shape[::-1]}")
    (scale_x, label_x), (scale_y, label_y) = _scaled(across), _scaled(up)
    several = int(frame.groupby([across, up]).size().max())
    title = ", ".join(map(str, frame["model"].unique())) if "model" in frame else ""
    mean = f" (geometric mean of {several} forecasts)" if several > 1 else ""
    figure, axes = _axes(f"{title}{mean}", label_x, label_y)
    mesh = axes.pcolormesh(
        np.asarray(logs.columns, float) / scale_x,
        np.asarray(logs.index, float) / scale_y,
        np.exp(logs.to_numpy()),
        shading="nearest",
        norm="log",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, places in ((axes.xaxis, logs.columns), (axes.yaxis, logs.index)):
        _plain_ticks(axis, np.asarray(places, float) / (scale_x if axis is axes.xaxis else scale_y))
    bar = figure.colorbar(mesh, ax=axes, label="forecast")
    low, high = mesh.get_clim()
    ticks = np.geomspace(low, high, 6).tolist()
    bar.set_ticks(ticks, labels=[duration(value) for value in ticks])
    bar.ax.minorticks_off()
    return figure


def _plain_ticks(axis: Any, places: np.ndarray) -> None:
    """Ticks at up to eight of the places, as plain numbers: a log axis within a decade has powers of ten alone."""
    chosen = places[np.unique(np.linspace(0, len(places) - 1, min(len(places), 8)).round().astype(int))]
    axis.set_ticks(chosen, labels=[f"{value:.4g}" for value in chosen])
    axis.set_ticks([], minor=True)
