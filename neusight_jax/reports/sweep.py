"""Sweeps as tables for people."""

from __future__ import annotations

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType

from neusight_jax.hardware.cluster import TRACED_FIELDS
from neusight_jax.hardware.gpu import FIELDS
from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.text import headed, table
from neusight_jax.sweeps.run import Sweep
from neusight_jax.units import MS, duration, labelled, with_unit
from neusight_jax.workloads import workload_text


def tables(done: Sweep) -> RenderableType:
    """Summary of what was forecast, and where it is."""
    models = dict.fromkeys(load["model"] for load in done.asked.get("workloads", ()))
    resumed = f", {done.resumed_rows} of them from before" if done.resumed_rows else ""
    return headed(f"{done.output}: {done.rows} forecasts of {', '.join(models)}{resumed}", notes=done.notes)


MOST_LINES = 2000
"""Forecasts drawn as lines; of more, evenly chosen ones."""


def report(done: Sweep) -> Report:
    """The page of a sweep: time over one field, as a map of two, or lines through many; the fastest machines."""
    frame = done.to_frame()
    fields = [name for name in frame.columns if name in (*FIELDS, *TRACED_FIELDS)]
    picture = {1: _curve, 2: _map}.get(len(fields), _lines)(frame, fields)
    low, high = frame["seconds"].min(), frame["seconds"].max()
    best = frame.nsmallest(20, "seconds")
    rows = [
        [str(row["gpu"]), str(row["model"]), *(with_unit(name, row[name]) for name in fields), duration(row["seconds"])]
        for row in best.to_dict("records")
    ]
    loads = "; ".join(dict.fromkeys(workload_text(load) for load in done.asked.get("workloads", ())))
    fastest = table("Fastest machines", ["GPU", "model", *fields, "forecast"], rows, text_columns=2)
    return Report(
        title=f"{done.rows:,} machines",
        facts={"Workload": loads, "Machine": ", ".join(map(str, frame["gpu"].unique())), "File": str(done.output)},
        sentence=f"Of {done.rows:,} forecasts the fastest takes {duration(low)}, the slowest {duration(high)}.",
        plots=[picture],
        tables=Group(tables(done), "", fastest),
    )


def _groups(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows by base GPU and workload."""
    return [(" ".join(map(str, key)), group) for key, group in frame.groupby(["gpu", "model", "workload"], sort=False)]


def _curve(frame: pd.DataFrame, fields: list[str]) -> Plot:
    scale, label = labelled(fields[0])
    traces = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "showlegend": True}
        | {"x": rows[fields[0]].to_numpy() / scale, "y": rows["seconds"].to_numpy() / MS}
        for name, group in _groups(frame)
        for rows in (group.sort_values(fields[0]),)
    ]
    layout = {"xaxis": {"type": "log", "title": {"text": label}}, "yaxis": {"type": "log", "title": {"text": "ms"}}}
    return Plot("Time over the field", traces, layout)


def _map(frame: pd.DataFrame, fields: list[str]) -> Plot:
    across, up = fields
    # The mean of logarithms: the longest of several workloads would say it all otherwise.
    logs = frame.assign(_log=np.log(frame["seconds"])).pivot_table(index=up, columns=across, values="_log")
    (scale_x, label_x), (scale_y, label_y) = labelled(across), labelled(up)
    seconds = np.exp(logs.to_numpy())
    ticks = np.linspace(np.nanmin(np.log10(seconds)), np.nanmax(np.log10(seconds)), 6)
    trace = {
        "type": "heatmap",
        "x": [f"{value / scale_x:.4g}" for value in logs.columns.to_numpy(float)],
        "y": [f"{value / scale_y:.4g}" for value in logs.index.to_numpy(float)],
        "z": [[None if np.isnan(value) else value for value in row] for row in np.log10(seconds)],
        "text": [["" if np.isnan(value) else duration(value) for value in row] for row in seconds],
        "colorscale": "Viridis",
        "reversescale": True,
        "hovertemplate": f"{label_x} %{{x}}<br>{label_y} %{{y}}<br>%{{text}}<extra></extra>",
        "colorbar": {"tickvals": ticks, "ticktext": [duration(10**value) for value in ticks]},
    }
    layout = {
        "xaxis": {"type": "category", "title": {"text": label_x}},
        "yaxis": {"type": "category", "title": {"text": label_y}},
    }
    several = int(frame.groupby(fields).size().max())
    return Plot(
        "Time over two fields", [trace], layout, f"Geometric mean of {several} forecasts." if several > 1 else ""
    )


def _lines(frame: pd.DataFrame, fields: list[str]) -> Plot:
    chosen = frame.iloc[np.unique(np.linspace(0, len(frame) - 1, MOST_LINES).round().astype(int))]
    dimensions = [{"label": name, "values": chosen[name].to_numpy(float) / labelled(name)[0]} for name in fields] + [
        {"label": "ms", "values": chosen["seconds"].to_numpy(float) / MS}
    ]
    line = {"color": np.log10(chosen["seconds"].to_numpy()), "colorscale": "Viridis", "reversescale": True}
    layout = {"margin": {"l": 80, "r": 60, "t": 60, "b": 30}}
    return Plot(
        "All fields", [{"type": "parcoords", "line": line, "dimensions": dimensions}], layout, "A line is a machine."
    )
