"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from neusight_jax.units import GB, GIB, GIGA, MIB, MS, TERA, US
from neusight_jax.workload import workload_text

if TYPE_CHECKING:
    from neusight_jax.forecast import Forecast
    from neusight_jax.graph.graph import Footprint


def duration(seconds: float) -> str:
    """A time with a unit people read, four digits: 1.234 s, 45.67 ms, 7.891 us."""
    for unit, name in ((1.0, "s"), (MS, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds / US:.4g} us"


UNITS: dict[str, tuple[float, str]] = {
    "clock_hz": (GIGA, "GHz"),
    "mem_bytes_per_s": (GB, "GB/s"),
    "link_bytes_per_s": (GB, "GB/s"),
    "l2_bytes": (MIB, "MiB"),
    "mem_bytes": (GB, "GB"),
    "tdp_w": (1.0, "W"),
    "process_nm": (1.0, "nm"),
    "num_sms": (1.0, "SMs"),
    "area_mm2": (1.0, "mm2"),
    "power_w": (1.0, "W"),
    "dollars": (1.0, "$"),
    "pin_bit_per_s": (GIGA, "Gbit/s"),
    "tokens_per_s": (1.0, "tokens/s"),
}


def shown(name: str, value: float) -> str:
    """A figure with the unit people use."""
    if name.endswith("_flop_per_s"):
        return f"{value / TERA:.4g} TFLOP/s"
    if name in UNITS:
        scale, unit = UNITS[name]
        return f"{value / scale:.5g} {unit}"
    return duration(value)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> Table:
    """A plain table: the first `text_columns` to the left, the rest to the right."""
    out = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for position, name in enumerate(header):
        out.add_column(name, justify="left" if position < text_columns else "right", no_wrap=True)
    for row in rows:
        out.add_row(*(Text(cell) for cell in row))
    return out


def _gib(size: float) -> str:
    """Bytes as a number of GiB; what is too small for that as MiB, with the unit."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.{1 if size >= GIB else 2}f}"
    return f"{size / MIB:.3g} MiB"


def memory_line(memory: Footprint, mem_bytes: float) -> str:
    """What a workload needs, by what holds it, and the verdict."""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "inputs": memory.inputs,
        "buffers": memory.buffers,
        "activations": memory.activations,
        "KV cache": memory.kv_cache,
    }
    listed = ", ".join(f"{name} {_gib(value)}" for name, value in parts.items() if value)
    verdict = "fits in" if memory.total <= mem_bytes else "DOES NOT FIT in"
    return f"memory {memory.total / GIB:.1f} GiB ({listed}): {verdict} {mem_bytes / GIB:.1f} GiB"


def forecast_tables(forecast: Forecast) -> RenderableType:
    """Totals, phases, families and the ten most expensive kernels."""
    total = max(forecast.total_s, 1e-30)  # a program that launches nothing takes no time
    head = workload_text(forecast.workload, forecast.gpu or "the given GPU")
    tokens = forecast.tokens
    flop = float((forecast.columns["flop"] * forecast.columns["count"]).sum())
    launches = int(forecast.columns["count"].sum())
    speed = f"{flop / total / TERA:.2f} TFLOP/s over {launches} kernel launches"
    rate = f"{tokens / total:,.0f} tokens/s, " if tokens else ""
    interval = ""
    if forecast.interval_s is not None:
        low, high = forecast.interval_s
        interval = f", 80% interval {duration(low)} to {duration(high)}"
    per_token = f"{duration(forecast.total_s)} an output token, " if forecast.mode == "decode" else ""
    summary = [f"total {duration(forecast.total_s)}{interval}  ({per_token}{rate}{speed})"]
    if forecast.memory is not None:
        summary.append(memory_line(forecast.memory, forecast.mem_bytes))

    def shares(title: str, column: str) -> Table:
        rows = [[key, duration(value), f"{value / total:.1%}"] for key, value in forecast.seconds_by(column).items()]
        return table(title, [column, "time", "share"], rows)

    top = [
        [
            row["node"],
            row["op"],
            row["phase"],
            f"{row['count']:g}",
            duration(row["seconds"]),
            f"{row['total_s'] / total:.1%}",
            row["tile"],
            f"{row['waves']:.0f}",
            f"{row['utilization']:.2f}",
            row["bound"],
        ]
        for row in forecast.most_expensive()
    ]
    columns = ["node", "op", "phase", "count", "each", "share", "tile", "waves", "utilization", "bound"]
    parts: list[RenderableType] = [Text(head, style="bold"), *map(Text, summary), Text("")]
    parts += [shares("Phases", "phase"), Text(""), shares("Families", "family"), Text("")]
    parts += [table("Ten most expensive kernels", columns, top, text_columns=3)]
    parts += [Text(f"note: {note}") for note in forecast.notes]
    return Group(*parts)


def forecast_text(forecast: Forecast, width: int = 140) -> str:
    """`forecast_tables` as plain text."""
    return as_text(forecast_tables(forecast), width)


def as_text(renderable: RenderableType, width: int = 140) -> str:
    """Anything rich renders, as plain text without colours."""
    console = Console(width=width, color_system=None, force_terminal=False, markup=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()
