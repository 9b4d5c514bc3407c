"""Designs as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from neusight_jax.designs.answers import Design
from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.plots import scatter
from neusight_jax.reports.text import INTERVAL, between, headed, interval_text, table
from neusight_jax.units import labelled, title_of, with_unit


def tables(design: Design) -> RenderableType:
    """The machine, what it does beside the base, what binds and what more of it would buy."""
    slopes = design.multipliers.slopes
    machine = [
        [
            name,
            with_unit(name, value),
            f"{slopes[name]:+.2f} %" if name in slopes else "",
            f"{design.at_bounds[name]} bound" if name in design.at_bounds else "",
        ]
        for name, value in design.free.items()
    ]
    state = "" if design.feasible else "  NO MACHINE IN THE BOUNDS KEEPS EVERY BUDGET; this one comes nearest"
    figures, base = {**design.seconds, **design.metrics}, {**design.base_seconds, **design.base_metrics}
    effects = []
    for name, value in figures.items():
        cells = [name, with_unit(name, value), with_unit(name, base[name]), f"{value / base[name] - 1.0:+.1%}"]
        effects.append([*cells, *_interval_cells(design, name)])
    columns = ["", "design", "base", "change", *([INTERVAL, f"{INTERVAL} of the change"] if design.intervals else [])]
    return headed(
        f"best of {design.evaluations} evaluations (seed {design.seed}){state}",
        *("", table("Machine", ["free field", "value", "1 % more changes the objective by", "ends on"], machine)),
        *("", table("What it does", columns, effects), "", _binding(design)),
        notes=design.notes,
    )


def _interval_cells(design: Design, name: str) -> list[str]:
    """The interval of a time, and of its change; empty cells of what has none."""
    if not design.intervals:
        return []
    if name not in design.intervals:
        return ["", ""]
    return [between(design.intervals[name]), _change_text(design, name)]


def _change_text(design: Design, name: str) -> str:
    """The interval of how much a time changes against the base."""
    return between(design.change_intervals[name], lambda ratio: f"{ratio - 1.0:+.1%}")


def _binding(design: Design) -> RenderableType:
    prices = design.multipliers
    rows = [
        [
            name,
            with_unit(name, limit),
            f"{round(prices.left[name], 3) + 0.0:.1%}",  # no minus zero
            "yes" if price > 0 else "no",
            f"{price:.2f} %",
        ]
        for (name, limit), price in zip(design.budgets.items(), prices.budgets.values(), strict=True)
    ]
    rows += [[f"bound of {name}", "", "", "yes", f"{price:.2f} %"] for name, price in prices.bounds.items()]
    title = f"Budgets (first-order residual {prices.residual:.2f})"
    return table(title, ["budget", "limit", "left", "binds", "1 % more buys"], rows)


def front_table(designs: Sequence[Design], metric: str, shown: Sequence[str] = ()) -> RenderableType:
    """A Pareto front, one design per row, and its notes but for those `shown` already."""
    fields, told = (list(designs[0].free), _told(designs[0])) if designs else ([], "latency_s")
    rows = [
        [with_unit(metric, design.metrics[metric]), with_unit(told, design.metrics[told])]
        + [with_unit(name, design.free[name]) for name in fields]
        for design in designs
    ]
    front = table("Pareto front", [metric, told, *fields], rows, text_columns=0)
    return Group(front, *(Text(f"note: {note}") for note in front_notes(designs) if note not in shown))


_TOLD = {"cost_per_mtok": "Cost", "latency_s": "Latency"}


def _told(design: Design) -> str:
    """The metric a design is told by: what tokens cost where they are served, else its latency."""
    return next(name for name in _TOLD if name in design.metrics)


def front_notes(designs: Sequence[Design]) -> list[str]:
    """Notes of the designs of a front, each sentence once."""
    return list(dict.fromkeys(note for design in designs for note in (*design.front_notes, *design.notes)))


def report(design: Design, base: str = "", front: Sequence[Design] = (), metric: str = "") -> Report:
    """Page of a design: how it was found, and the front it lies on if there is one.

    Args:
      base: name of the GPU it is a variant of; "" = not known.
      front: designs of a Pareto front; none = no picture of it.
      metric: the budgeted metric that the front trades against latency.
    """
    after, before = ({**seconds, **metrics} for seconds, metrics in _sides(design))
    changes = {name: 100.0 * (value / before[name] - 1.0) for name, value in after.items()}
    bars = {"type": "bar", "orientation": "h", "y": list(changes), "x": list(changes.values())}
    bars |= {"hovertemplate": "%{y}: %{x:+.1f} %<extra></extra>"}
    pictures = [Plot("Beside the base", [bars], {"xaxis": {"title": {"text": "change, %"}}}, "", 110 + 30 * len(after))]
    points = [(spent, float(np.exp(value - design.objective))) for spent, value in design.trace if np.isfinite(value)]
    if points:
        best = {"best so far": [(spent, value, f"{spent} evaluations") for spent, value in points]}
        pictures.append(scatter("Search", best, "evaluations", "objective, relative to the answer"))
    if front:
        pictures.insert(0, _front(front, metric, design))
    state = "" if design.feasible else "no machine keeps every budget; this one comes nearest"
    fronts = [front_table(front, metric, design.notes)] if front else []
    facts = {"Workload": ", ".join(design.seconds), "Machine": f"a variant of {base or 'the base'}"}
    facts |= {"State": state} if state else {}
    title = "A designed GPU" if design.shape is None else "A designed model"
    return Report(title, facts, _sentence(design), pictures, Group(tables(design), *fronts))


def _sentence(design: Design) -> str:
    """The machine, what it does, and how that compares with the base."""
    told = _told(design)
    value, base = ({**seconds, **metrics}[told] for seconds, metrics in _sides(design))
    machine = ", ".join(f"{title_of(name)} {with_unit(name, figure)}" for name, figure in design.free.items())
    span = f" ({interval_text(design.intervals[told])})" if told in design.intervals else ""
    change = f"{with_unit(told, value)}{span} in place of {with_unit(told, base)}, {value / base - 1.0:+.1%}"
    change += f" ({INTERVAL} {_change_text(design, told)})" if told in design.intervals else ""
    kept = "" if design.feasible else "; no machine keeps every budget, this one comes nearest"
    return f"A {'GPU' if design.shape is None else 'model'} with {machine}: {change}{kept}."


def _sides(design: Design) -> tuple[tuple[dict[str, float], dict[str, float]], ...]:
    """Times and metrics of the design, and of the base."""
    return (design.seconds, design.metrics), (design.base_seconds, design.base_metrics)


def _front(designs: Sequence[Design], metric: str, design: Design) -> Plot:
    (scale, label), told = labelled(metric), _told(design)

    def placed(metrics: Mapping[str, float], what: str) -> tuple[float, float, str]:
        return metrics[metric] / scale, metrics[told], what

    points = [
        placed(one.metrics, ", ".join(with_unit(name, figure) for name, figure in one.free.items())) for one in designs
    ]
    series = {"designs": points, "base": [placed(design.base_metrics, "base")]}
    return scatter("Pareto front", series, label, labelled(told)[1])
