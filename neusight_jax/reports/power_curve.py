"""Power curves as tables for people."""

from __future__ import annotations

from rich.console import RenderableType

from neusight_jax.power_curves import HeldBoard, PowerCurve
from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.plots import scatter
from neusight_jax.reports.text import headed, short_number, table
from neusight_jax.units import GIGA, counted, duration
from neusight_jax.workloads import workload_text

COLUMNS = ("limit", "step", "speed", "tokens/s", "power", "clock", "J a token", "speed a 10 W", "")


def tables(curve: PowerCurve) -> RenderableType:
    """One row per cap and per clock; the knee and the best are marked."""
    rows = [_cells(point, curve) for point in curve.points]
    parts: list[RenderableType] = [table("", list(COLUMNS), rows, text_columns=1)]
    parts.append("knee: the cap with the least joules a token; below it a percent of watts costs more speed than that")
    if curve.fleet is not None:
        fleet = curve.fleet
        parts.append(
            f"fleet of {fleet.fleet_w / 1e3:,.4g} kW: {counted(fleet.machines, 'machine')} at {limit_text(fleet.held)} "
            f"make {fleet.tokens_per_s:,.0f} tokens/s with {fleet.power_w / 1e3:,.4g} kW"
        )
    if curve.best is None and curve.target is not None:
        parts.append(f"no cap or clock keeps {curve.target[0]} within {duration(curve.target[1])}")
    head = f"{workload_text(curve.workload)} on {curve.gpu} under caps and locked clocks"
    return headed(head, *parts, notes=curve.notes)


def limit_text(point: HeldBoard) -> str:
    """The cap or the clock of a point in words."""
    if point.power_limit_w is not None:
        return f"{point.power_limit_w:,.4g} W"
    return f"{(point.clock_limit_hz or 0.0) / GIGA:.3g} GHz"


def _cells(point: HeldBoard, curve: PowerCurve) -> list[str]:
    marks = [name for name, marked in (("knee", curve.knee), ("best", curve.best)) if point is marked]
    marks += [] if point.meets else ["misses the target"]
    return [
        limit_text(point),
        duration(point.latency_s),
        f"{point.speed:.1%}",
        short_number(point.tokens_per_s),
        f"{point.power_w:,.4g} W",
        f"{point.clock_hz / GIGA:.2f} GHz",
        f"{point.joules_per_token:.3g}",
        "-" if point.speed_per_w is None else f"{10.0 * point.speed_per_w:+.2%}",
        ", ".join(marks),
    ]


def report(curve: PowerCurve) -> Report:
    """The page of a curve: speed and joules a token over the watts of a board."""
    capped = [point for point in curve.points if point.power_limit_w is not None]
    knee = curve.knee
    watts = {"caps": [(point.power_limit_w or 0.0, 100.0 * point.speed, limit_text(point)) for point in capped]}
    plots = [_front(curve), scatter("Speed", watts, "cap of a board, W", _SPEED)]
    facts = {"Workload": workload_text(curve.workload), "Machine": curve.gpu}
    before = curve.points[0].joules_per_token
    sentence = (
        f"{curve.workload['model']} on {curve.gpu}: at {limit_text(knee)} it keeps {knee.speed:.0%} of its speed "
        f"and takes {knee.joules_per_token:.3g} J a token in place of {before:.3g}"
    )
    if curve.target is not None:
        best = "nothing" if curve.best is None else limit_text(curve.best)
        sentence += f"; {best} keeps {curve.target[0]} within {duration(curve.target[1])} for the least joules"
    return Report(f"{curve.workload['model']} under caps", facts, f"{sentence}.", plots, tables(curve))


_SPEED = "percent of the free speed"


def _front(curve: PowerCurve) -> Plot:
    """Caps and clocks by speed and joules a token, with the knee; the target's least speed where there is one."""

    def placed(point: HeldBoard) -> tuple[float, float, str]:
        return 100.0 * point.speed, point.joules_per_token, limit_text(point)

    series = {
        "caps": [placed(point) for point in curve.points if point.power_limit_w is not None],
        "locked clocks": [placed(point) for point in curve.points if point.clock_limit_hz is not None],
        "knee": [placed(curve.knee)],
    }
    first = curve.points[0]
    limits = {}
    if curve.target is not None:
        limits[f"{curve.target[0]} within {duration(curve.target[1])}"] = 100.0 * first.latency_s / curve.target[1]
    shown = {name: points for name, points in series.items() if points}
    return scatter("Energy against speed", shown, _SPEED, "J a token", limits, better=(1, -1))
