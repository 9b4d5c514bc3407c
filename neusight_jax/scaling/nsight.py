"""Kernel tables of Nsight Systems as CSV: `nsys stats --format csv --report cuda_gpu_trace` (a row per launch) or
`cuda_gpu_kern_sum` (a row per kernel name). Times are nanoseconds unless the column says otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from neusight_jax.errors import InputError
from neusight_jax.scaling.names import dtype_of, kind_of
from neusight_jax.scaling.trace import Launch, Measured, Trace, busy_seconds

_UNITS = {"ns": 1e-9, "us": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20}


def read_nsight(path: Path) -> Trace:
    """Read a table. Raises: `InputError` when it is not readable, or has no name or duration column."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text ({type(error).__name__})") from None
    header = next((at for at, line in enumerate(lines) if "Name" in line and "," in line), None)
    if header is None:
        raise InputError(
            f"{path}: no header with a column Name; expected `nsys stats --format csv` of cuda_gpu_trace or "
            "cuda_gpu_kern_sum"
        )
    try:
        frame = pd.read_csv(path, skiprows=header, encoding="utf-8-sig", skip_blank_lines=False, thousands=",")
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InputError(f"{path}: not a CSV table ({error}); export it again") from None
    duration, scale = _timed(path, frame, ("Duration", "Total Time"))
    seconds = pd.to_numeric(frame[duration], errors="coerce").to_numpy(np.float64) * scale
    names = frame["Name"].astype(object)
    good = np.isfinite(seconds) & (seconds >= 0.0) & names.notna().to_numpy()
    notes = [f"{int((~good).sum())} rows without a name or duration left out"] if (~good).any() else []
    if not good.any():
        raise InputError(f"{path}: no row has a name and a duration; export the table again")
    frame, seconds = frame[good], seconds[good]
    if (seconds == 0).any():
        notes.append(f"{int((seconds == 0).sum())} rows of no duration: kept, they add nothing")
    counts = pd.to_numeric(frame.get("Instances", pd.Series(1.0, frame.index)), errors="coerce").fillna(1.0)
    if "Instances" in frame:
        busy_s = span_s = float(seconds.sum())
        notes.append("a table of sums: overlap and idle time are unknown")
    else:
        start, start_scale = _timed(path, frame, ("Start",))
        busy_s, span_s = busy_seconds(pd.to_numeric(frame[start]).to_numpy(np.float64) * start_scale, seconds)
    grid, block = _product(frame, ("GrdX", "GrdY", "GrdZ")), _product(frame, ("BlkX", "BlkY", "BlkZ"))
    registers = pd.to_numeric(frame.get("Reg/Trd", pd.Series(0.0, frame.index)), errors="coerce").fillna(0.0)
    shared = _shared_bytes(frame)
    rows = pd.DataFrame({"name": frame["Name"], "grid": grid, "block": block, "registers": registers, "shared": shared})
    rows["seconds"], rows["count"] = seconds, counts.to_numpy()
    items = []
    for key, part in rows.groupby(["name", "grid", "block", "registers", "shared"], sort=False):
        name, blocks, threads, regs, smem = cast(tuple[str, float, float, float, float], key)
        launch = Launch(blocks, threads, regs, smem) if blocks > 0 and threads > 0 else None
        total, count = float(part["seconds"].sum()), float(part["count"].sum())
        items.append(Measured(name, kind_of(name), total, count, (), dtype_of(name), launch))
    return Trace(path.name, tuple(items), busy_s, span_s, tuple(notes))


def _timed(path: Path, frame: pd.DataFrame, names: tuple[str, ...]) -> tuple[str, float]:
    """The column of one of these names and its unit in seconds; without a unit, nanoseconds."""
    for column in frame.columns:
        found = re.fullmatch(r"(.+?)\s*(?:\(([^)]+)\))?", str(column).strip())
        if found and found[1] in names and (found[2] or "ns") in _UNITS:
            return str(column), _UNITS[found[2] or "ns"]
    raise InputError(f"{path}: no column {' or '.join(names)} (ns); found {', '.join(map(str, frame.columns[:8]))}")


def _product(frame: pd.DataFrame, names: tuple[str, ...]) -> np.ndarray:
    if not all(name in frame for name in names):
        return np.zeros(len(frame))
    columns = [pd.to_numeric(frame[name], errors="coerce").fillna(0.0).to_numpy(np.float64) for name in names]
    product: np.ndarray = np.prod(columns, axis=0)
    return product


def _shared_bytes(frame: pd.DataFrame) -> np.ndarray:
    total = np.zeros(len(frame))
    for column in frame.columns:
        found = re.fullmatch(r"(?:StcSMem|DymSMem)\s*\((\w+)\)", str(column).strip())
        if found:
            total += pd.to_numeric(frame[column], errors="coerce").fillna(0.0) * _BYTES.get(found[1].lower(), 1.0)
    return total
