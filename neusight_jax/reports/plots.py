"""The pictures of reports and of the explorer, each from one result, as traces of plotly.js."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from neusight_jax.arithmetic import dtype_index
from neusight_jax.forecast import Forecast
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import PHASES
from neusight_jax.reports.page import Plot
from neusight_jax.reports.text import INTERVAL
from neusight_jax.sensitivities import Sensitivity
from neusight_jax.units import MS, TERA, duration, title_of

SHOWN = 15
"""Kernels or rows in a picture of the most expensive ones."""
LEAST = 5e-4
"""Elasticities below this are left out."""
INK = "var(--ink)"
"""Colours are custom properties of `page.css`, light and dark."""
LIGHT_BAR = "var(--bar)"
DWARFED = 20.0
"""An axis is in logarithms where the largest value is more than this many times the median."""
FAINT = 0.4
"""Opacity of a machine that is only compared with."""
FASTER, SLOWER = "var(--c2)", "var(--c3)"
_MOST_POINTS = 400
_PLACES = {**{name: at for at, name in enumerate(PHASES)}, "recomputed": PHASES.index("backward")}
"""Places of phases in a step."""


def families(forecasts: Mapping[str, Forecast], ghosts: Mapping[str, Forecast] | None = None) -> Plot:
    """Seconds of every family of kernels, one bar a forecast; those of `ghosts` are faint."""
    shown = {**(ghosts or {}), **forecasts}
    sums = {name: forecast.seconds_by("family") for name, forecast in shown.items()}
    parts = {
        family: [seconds.get(family, 0.0) / MS for seconds in sums.values()]
        for family in dict.fromkeys(family for seconds in sums.values() for family in seconds)
    }
    plot = stacked("Where the time goes", list(sums), parts, "ms")
    opacity = [FAINT if name in (ghosts or {}) else 1.0 for name in sums]
    markers = [{"color": colour_of(trace["name"]), "opacity": opacity} for trace in plot.traces]
    traces = [{**trace, "marker": marker} for trace, marker in zip(plot.traces, markers, strict=True)]
    return replace(plot, traces=traces)


def _line_colour(place: int, machines: int) -> str:
    """Colour of what is drawn of one of several machines; of a single one, whose families have the colours, ink."""
    return INK if machines == 1 else f"var(--c{place % 8})"


def colour_of(family: str) -> str:
    """Colour of a family of kernels, the same in all pictures."""
    return f"var(--c{list(FAMILIES).index(family) % 8})" if family in FAMILIES else INK


def shares(forecast: Forecast) -> Plot:
    """Where the time goes: phase, family, node, as nested areas."""
    columns, cost = forecast.columns, forecast.columns["seconds"] * forecast.columns["count"]
    total = float(cost.sum()) or 1.0
    sums: dict[tuple[str, ...], float] = {}
    for phase, family, node, seconds in zip(*(columns[key] for key in ("phase", "family", "node")), cost, strict=True):
        path = (str(phase), str(family), str(node))
        for depth in range(4):
            sums[path[:depth]] = sums.get(path[:depth], 0.0) + float(seconds)
    # Smaller areas could not be seen, and there are hundreds of them.
    paths = [path for path, seconds in sums.items() if seconds > 2e-3 * total]
    trace = {
        "type": "treemap",
        "branchvalues": "total",
        "ids": ["/".join(path) or "step" for path in paths],
        "labels": [path[-1] if path else "step" for path in paths],
        "parents": [("/".join(path[:-1]) or "step") if path else "" for path in paths],
        "values": [sums[path] for path in paths],
        "text": [f"{duration(sums[path])}<br>{sums[path] / total:.1%}" for path in paths],
        "hovertemplate": "%{label}<br>%{text}<extra></extra>",
        "textinfo": "label+text",
        "marker": {"colors": [colour_of(path[1]) if len(path) > 1 else "var(--line)" for path in paths]},
    }
    layout = {"margin": {"l": 4, "r": 4, "t": 30, "b": 4}, "uniformtext": {"minsize": 10, "mode": "hide"}}
    return Plot("Where the time goes", [trace], layout, "Area is time: phase, family, node of the model.")


def roofline(
    forecasts: Mapping[str, tuple[Forecast, GPU]], ghosts: Mapping[str, tuple[Forecast, GPU]] | None = None
) -> Plot:
    """Roofs of GPUs and the kernels of a model under them; area is the share of the time. Of `ghosts` roofs alone."""
    traces: list[dict[str, Any]] = []
    for place, (name, (forecast, gpu)) in enumerate(forecasts.items()):
        columns = forecast.columns
        cost = columns["seconds"] * columns["count"]
        real = np.flatnonzero(columns["flop"] > 0)
        real = real[np.argsort(-cost[real])][:_MOST_POINTS]
        intensity = columns["flop"][real] / columns["bytes"][real]
        rate = columns["flop"][real] / columns["seconds"][real] / TERA
        share = cost[real] / max(float(cost.sum()), 1e-30)
        families = columns["family"][real].astype(str)
        single = len(forecasts) == 1
        # Families have the colours of a single machine; of several each has one, or nobody could tell them apart.
        for family in dict.fromkeys(families) if single else (name,):
            mask = families == family if single else np.ones(len(real), bool)
            nodes = columns["node"][real][mask].astype(str)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": family,
                    "x": intensity[mask],
                    "y": rate[mask],
                    "marker": {
                        "size": 6 + 60 * np.sqrt(share[mask]),
                        "opacity": 0.65,
                        "line": {"width": 1},
                        "color": colour_of(family) if single else _line_colour(place, 2),
                    },
                    "text": [
                        f"{node}<br>{part:.1%} of the time" for node, part in zip(nodes, share[mask], strict=True)
                    ],
                    "hovertemplate": "%{text}<br>%{x:.3g} FLOP/byte<br>%{y:.3g} TFLOP/s<extra>%{fullData.name}</extra>",
                }
            )
        colour = _line_colour(place, len(forecasts))
        traces += _roofs(forecast, gpu, intensity, "" if single else f"{name}, ", colour)
        for ghost, (base, there) in (ghosts or {}).items():
            traces += _roofs(base, there, intensity, f"{ghost}, ", "var(--c7)")
    decades = {"type": "log", "dtick": 1, "exponentformat": "power"}
    layout = {
        "xaxis": {**decades, "title": {"text": "arithmetic intensity, FLOP/byte"}},
        "yaxis": {**decades, "title": {"text": "TFLOP/s"}},
    }
    caption = "Kernels with arithmetic; the larger the mark, the more time. Lines are what the machine allows."
    return Plot("Roofline", traces, layout, caption, height=480)


def _roofs(forecast: Forecast, gpu: GPU, intensity: np.ndarray, before: str, colour: str) -> list[dict[str, Any]]:
    low = min(0.05, 0.5 * float(intensity.min(initial=0.1)))
    span = np.geomspace(low, max(1e3, 2.0 * float(intensity.max(initial=1.0))), 80)
    peaks = {"fp32 vector": float(np.asarray(gpu.fp32_flop_per_s))}
    matrix = float(np.asarray(gpu.matrix_paths())[dtype_index(forecast.dtype)])
    if not np.isclose(matrix, peaks["fp32 vector"], rtol=1e-3):
        peaks[f"{forecast.dtype} matrix"] = matrix
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{before}roof, {name}",
            "x": span,
            "y": np.minimum(peak, span * float(np.asarray(gpu.mem_bytes_per_s))) / TERA,
            "line": {"color": colour, "width": 1.5, "dash": dash},
            "hoverinfo": "name",
        }
        for (name, peak), dash in zip(peaks.items(), ("solid", "dash"), strict=False)
    ]


def kernels(forecast: Forecast) -> Plot:
    """The most expensive kernels, with their intervals where there are any."""
    top = forecast.most_expensive(SHOWN)[::-1]
    error = {}
    if top and np.isfinite(top[0]["seconds_low"]):
        spans = [[row["count"] * (row["seconds_high"] - row["seconds"]) / MS for row in top]]
        spans.append([row["count"] * (row["seconds"] - row["seconds_low"]) / MS for row in top])
        error = _whiskers(*spans)
    names = [f"{row['node']} ({row['phase']}, {row['op']})" for row in top]
    texts = [f"{row['count']:g} x {duration(row['seconds'])}, {row['bound']} bound" for row in top]
    bars = _bars(names, [row["total_s"] / MS for row in top], text=texts, hover="%{y}<br>%{x:.4g} ms<br>%{text}")
    layout = {"xaxis": {"title": {"text": "ms in a step"}}}
    remark = f", with the {INTERVAL} of each" if error else ""
    return Plot(
        "Most expensive kernels", [{**bars, **error}], layout, f"All launches together{remark}.", 80 + 26 * len(top)
    )


def power(forecasts: Mapping[str, tuple[Forecast, GPU | None]]) -> Plot:
    """Watts of each GPU over its step, kernel after kernel in the order of phases, and the limit of its board."""
    traces: list[dict[str, Any]] = []
    for place, (name, (forecast, gpu)) in enumerate(forecasts.items()):
        columns, single = forecast.columns, len(forecasts) == 1
        # A row is a kernel with all its launches: within a phase its place in the step is not known.
        order = np.argsort([_PLACES[str(phase)] for phase in columns["phase"]], kind="stable")
        cost = np.asarray(columns["seconds"] * columns["count"], float)[order]
        order, cost = order[cost > 0.0], cost[cost > 0.0]
        ends, watts = np.concatenate([[0.0], np.cumsum(cost)]) / MS, np.asarray(columns["power_w"], float)[order]
        nodes = [f"{columns['node'][at]} ({columns['phase'][at]}, {columns['op'][at]})" for at in order]
        line = {"type": "scatter", "mode": "lines", "showlegend": True, "x": ends}
        colour = _line_colour(place, len(forecasts))
        traces.append(
            {
                **{**line, "name": "power" if single else name, "y": np.append(watts, watts[-1:])},
                "line": {"shape": "hv", "color": colour, "width": 1.5},
                "text": [*nodes, *nodes[-1:]],
                "hovertemplate": "%{text}<br>%{y:.4g} W<extra>%{fullData.name}</extra>",
            }
        )
        if gpu is not None:
            limit = float(np.asarray(gpu.tdp_w if gpu.power_limit_w is None else gpu.power_limit_w))
            limits = {"name": "limit of the board" if single else f"{name}, limit", "hoverinfo": "name"}
            dashed = {"color": colour, "width": 1.5, "dash": "dash"}
            traces.append({**line, **limits, "x": ends[[0, -1]], "y": np.full(2, limit), "line": dashed})
    layout = {
        "xaxis": {"title": {"text": "ms, kernel after kernel"}},
        "yaxis": {"title": {"text": "W of a GPU"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.01, "x": 0},
    }
    caption = (
        "All launches of a kernel stand together. A board holds the mean of a step within its limit, not each kernel."
    )
    return Plot("Power over the step", traces, layout, caption)


def elasticities(results: Mapping[str, Sensitivity]) -> Plot:
    """Elasticities of the total as bars, a colour for each machine; of a single one its exact secants as marks."""
    first, single = next(iter(results.values())), len(results) == 1
    exact = first.secants if single else {}
    totals = {machine: result.total for machine, result in results.items()}
    names = [
        name for name in first.total if max(abs(total.get(name, 0.0)) for total in (*totals.values(), exact)) > LEAST
    ]
    names.sort(key=lambda name: -first.total[name])
    titles = [title_of(name) for name in names]
    traces = []
    for place, (machine, total) in enumerate(totals.items()):
        values = [total[name] for name in names]
        bars = _bars(titles, values, hover="%{y}: %{x:+.3f}", name="elasticity" if single else machine)
        signs = [FASTER if value < 0 else SLOWER for value in values]
        colours = {"color": signs if single else _line_colour(place, len(results))}
        traces.append({**bars, "marker": colours, "showlegend": bool(exact) or not single})
    caption = "Elasticity of the step's time: bars to the left say that more of the figure makes it faster."
    if exact:
        marks = {"symbol": "line-ns-open", "size": 16, "color": INK, "line": {"width": 3}}
        hover = "%{y}: %{x:+.3f}<extra>secant</extra>"
        points = {"x": [exact[name] for name in names], "y": titles, "hovertemplate": hover}
        traces.append({"type": "scatter", "mode": "markers", "name": "secant", "marker": marks, **points})
        caption += " Short lines are the secant; where it disagrees with the bar, a note says which to trust."
    layout = {"xaxis": {"title": {"text": "% of time for 1 % more"}}}
    return Plot("What more of a figure buys", traces, layout, caption, 100 + 24 * len(names) * len(results))


Point: TypeAlias = tuple[float, float, str]
"""A point of `scatter`: figure across, figure up, and what the point is."""


def scatter(
    title: str,
    series: Mapping[str, Sequence[Point]],
    across: str,
    up: str,
    limits: Mapping[str, float] | None = None,
    better: tuple[int, int] | None = None,
) -> Plot:
    """Points that trade one figure for another, with lines through them and at limits.

    Args:
      series: name -> points.
      across, up: of the axes, with their units; `_axis` says when one is in logarithms.
      limits: name -> value across.
      better: of each figure 1 where more is better, -1 where less is: the line is then the Pareto front of a series.
        None = it leads through all points, in the order of the first figure.
    """
    traces: list[dict[str, Any]] = []
    for place, (name, points) in enumerate(series.items()):
        lines = {"type": "scatter", "line": {"color": f"var(--c{place % 8})"}}
        # Lines come first, so that marks lie above them, where the mouse finds them.
        for mode, shown in (
            ("lines", sorted(points) if better is None else _front(points, better)),
            ("markers", points),
        ):
            xs, ys, texts = zip(*shown, strict=True)
            text = {"text": texts, "hovertemplate": "%{text}<br>%{x:.4g}, %{y:.4g}<extra>%{fullData.name}</extra>"}
            marker = {"size": 9 if len(points) > 1 else 14, "color": f"var(--c{place % 8})"}
            legend = {"name": name, "showlegend": mode == "markers"}
            traces.append({**lines, "mode": mode, "x": xs, "y": ys, "marker": marker, **text, **legend})
    points = [point for points in series.values() for point in points]
    values = [point[0] for point in points], [point[1] for point in points]
    for name, value in (limits or {}).items():
        line = {"type": "scatter", "mode": "lines", "name": name, "showlegend": True, "hoverinfo": "name"}
        dash = {"color": INK, "dash": "dash"}
        traces.append({**line, "x": [value, value], "y": [min(values[1]), max(values[1])], "line": dash})
    return Plot(title, traces, {"xaxis": _axis(across, values[0]), "yaxis": _axis(up, values[1])})


def _front(points: Sequence[Point], better: tuple[int, int]) -> list[Point]:
    """Points that no other beats in both figures, the best of the first figure first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (-better[0] * point[0], -better[1] * point[1])):
        if not front or better[1] * point[1] > better[1] * front[-1][1]:
            front.append(point)
    return front


def _axis(label: str, values: Sequence[Any]) -> dict[str, Any]:
    """An axis; in logarithms where one value dwarfs the rest (`DWARFED`)."""
    sizes = sorted(float(value) for value in values if value is not None and np.isfinite(value))
    log = bool(sizes) and sizes[0] > 0.0 and sizes[-1] > DWARFED * sizes[len(sizes) // 2]
    return {"title": {"text": f"{label}, logarithmic" if log else label}, **({"type": "log"} if log else {})}


def stacked(
    title: str, rows: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str, caption: str = ""
) -> Plot:
    """Stacked bars: one bar a row, one colour a part.

    Args:
      rows: names of the bars, from the top.
      parts: by name, the length of the part in each row, in `unit`.
      unit: of the lengths, as the axis names it.
      caption: sentence below the picture.
    """
    traces = [_bars(rows, values, name=name, hover=f"%{{y}}: %{{x:.4g}} {unit}") for name, values in parts.items()]
    layout = {"barmode": "stack", "xaxis": {"title": {"text": unit}}, "yaxis": {"autorange": "reversed"}}
    layout |= {"legend": {"orientation": "h", "yanchor": "bottom", "y": 1.01, "x": 0, "traceorder": "normal"}}
    return Plot(title, traces, layout, caption, 120 + 36 * len(rows))


def _bars(
    names: Sequence[str], values: Sequence[Any], *, name: str = "", text: Sequence[str] | None = None, hover: str = ""
) -> dict[str, Any]:
    """Horizontal bars."""
    labels = {"text": text, "textposition": "none"} if text else {}
    shown = {"hovertemplate": f"{hover}<extra>{name}</extra>"} if hover else {}
    return (
        {"type": "bar", "orientation": "h", "y": names, "x": values, "name": name, "showlegend": bool(name)}
        | labels
        | shown
    )


def bars_with_interval(
    title: str, names: Sequence[str], values: Sequence[Any], bounds: Sequence[tuple[Any, Any]] | None, unit: str
) -> Plot:
    """Horizontal bars with an interval around each, best on top.

    Args:
      names: of the bars, best first; values: their lengths, in `unit`.
      bounds: low and high end of each bar's interval, in `unit`; an end that is None or not finite is not drawn. None =
        no intervals.
      unit: of the lengths, as the axis names it.
    """
    bars = _bars(names, values, hover=f"%{{y}}: %{{x:.4g}} {unit}")
    if bounds:
        up, down = (
            [_whisker(value, ends[side]) for value, ends in zip(values, bounds, strict=True)] for side in (1, 0)
        )
        bars |= _whiskers(up, down)
    layout = {"xaxis": _axis(unit, values), "yaxis": {"autorange": "reversed"}}
    return Plot(title, [bars], layout, f"Lines are the {INTERVAL}." if bounds else "", 110 + 30 * len(names))


def _whiskers(up: Sequence[Any], down: Sequence[Any]) -> dict[str, Any]:
    """Dark lines of intervals and light bars below them: half of a line lies on its bar, and has to be seen there."""
    lines = {"array": up, "arrayminus": down, "color": INK, "thickness": 2, "width": 5}
    return {"error_x": {"type": "data", **lines}, "marker": {"color": LIGHT_BAR}}


def _whisker(value: float, end: float | None) -> float | None:
    """Length of one side of an interval; None where it has no finite end."""
    return abs(end - value) if end is not None and np.isfinite(end) else None
