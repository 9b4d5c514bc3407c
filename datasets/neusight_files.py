"""Recognising the files of a NeuSight checkout by content: sweeps in CSV, device sheets in JSON."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from neusight_jax import units
from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import find_device
from neusight_jax.datasets.reference_gpu import gpu_from_sheet, is_reference_sheet
from neusight_jax.errors import InputError
from neusight_jax.hardware.gpu import FIELDS

DEVICE_HEADERS: tuple[str, ...] = ("device", "device_name", "gpu", "gpu_name")
OP_HEADERS: tuple[str, ...] = ("op", "opname", "op_name", "operator")
LATENCY_HEADERS: dict[str, float] = {
    "latency_s": 1.0,
    "latency": units.MS,
    "latency_ms": units.MS,
    "duration": units.MS,
    "duration_ms": units.MS,
}
"""Latency columns in order of preference, and seconds per unit; the source stores milliseconds."""
TEXT_HEADERS: tuple[str, ...] = ("kernel_name", "launched_kernels", "torch_version", "cudnn_version", "cuda_version")
NUMBER_HEADERS: tuple[str, ...] = (*schema.GRID_COLUMNS, *schema.BLOCK_COLUMNS, "blocks_per_sm", "warps_per_sm")
HEADER_ALIASES: dict[str, str] = {
    "kernel": "kernel_name",
    "kernelname": "kernel_name",
    "launchedkernels": "launched_kernels",
    "in_channels": "input_channels",
    "out_channels": "output_channels",
}
OP_ALIASES: dict[str, str] = {"layernorm": "ln", "conv2d": "conv"}
MAX_DEVICE_BYTES = 65536
"""A larger JSON is no device sheet; operator graphs and traces are."""


class NotASweep(Exception):
    """A CSV file is no kernel sweep; the message is the reason."""


@dataclass(frozen=True)
class Sweep:
    """Rows of one CSV in the measurement schema.

    Attributes:
      file: relative name.
      rows: columns of the schema, latency in seconds; the index counts rows of the file from 0.
      merged: whether it holds several devices.
    """

    file: str
    rows: pd.DataFrame
    merged: bool


def read_sweep(path: Path, name: str) -> Sweep:
    """One CSV as a sweep.

    Args:
      path: the file.
      name: its name relative to the tree; may say device and operator.
    Raises: `NotASweep`, with the reason, when device, operator, dims or latency cannot be told.
    """
    table = _read_csv(path)
    latency = next((header for header in LATENCY_HEADERS if header in table.columns), None)
    if latency is None:
        raise NotASweep("no latency column")
    rows = pd.DataFrame({"device": _device(table, name), "op": _op(table, name)}, index=table.index)
    needed = {column for op in rows["op"].unique() if op in schema.OPS for column in schema.op_columns(op)}
    missing = sorted(needed - set(table.columns))
    if missing:
        raise NotASweep(f"no column {missing[0]!r} for its dims")
    present = set(table.columns)
    rows = rows.assign(**{column: table[column] for column in schema.DIM_COLUMNS if column in present})
    rows["latency_s"] = pd.to_numeric(table[latency], errors="coerce") * LATENCY_HEADERS[latency]
    texts = {column: _strings(table[column]) for column in TEXT_HEADERS if column in present}
    return Sweep(name, rows.assign(**texts, **_launch(table)), merged=rows["device"].nunique() > 1)


def read_device(path: Path) -> tuple[str, dict[str, float]] | None:
    """Name and figures (fields of `GPU`, base units) in a device JSON of the reference; None when it is another JSON.

    Raises: `InputError` when it looks like a device sheet and is not understood.
    """
    try:
        content = None if path.stat().st_size > MAX_DEVICE_BYTES else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or not is_reference_sheet(content):
        return None
    name, gpu = gpu_from_sheet(content, path)
    figures = {field: float(np.asarray(getattr(gpu, field))) for field in FIELDS}
    return name, {field: value for field, value in figures.items() if value}


def _header(name: object) -> str:
    plain = re.sub(r"[^a-z0-9]+", "_", str(name).lower()).strip("_")
    return HEADER_ALIASES.get(plain, plain)


def _read_csv(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(path, low_memory=False)
    except (OSError, ValueError) as error:  # parser and decoding errors are ValueErrors
        raise NotASweep(f"not a readable CSV ({str(error).splitlines()[0][:120]})") from error
    table.columns = pd.Index([_header(column) for column in table.columns])
    table = table.loc[:, ~table.columns.duplicated()]
    if table.empty:
        raise NotASweep("no rows")
    return table.reset_index(drop=True)


def _strings(column: pd.Series) -> pd.Series:
    return column.map(str, na_action="ignore").astype(object)


def _parts(name: str) -> tuple[str, ...]:
    """What may name a device or an operator: the stem of a file, then the folders above it, the nearest first."""
    path = Path(name)
    return (path.stem, *reversed(path.parent.parts))


def _device(table: pd.DataFrame, name: str) -> pd.Series | str:
    """Device of each row: from a column, else from the name of the file or a folder above it."""
    for header in DEVICE_HEADERS:
        if header in table.columns and table[header].notna().any():
            return _strings(table[header])
    for part in _parts(name):
        without_op = "_".join(word for word in part.split("_") if _known_op(word) is None)
        for kept in filter(None, dict.fromkeys((part, without_op))):
            for candidate in dict.fromkeys((kept, kept.replace("_", " "), kept.replace("_", "-"))):
                with suppress(InputError):
                    return find_device(candidate)[0]
    raise NotASweep("no device, neither as a column nor in its path")


def _known_op(value: object) -> str | None:
    """Schema operator of a name such as `VECadd`, `BMM` or `layer_norm`; None when it is none."""
    plain = re.sub(r"[^a-z0-9]+", "", str(value).lower())
    plain = plain.removeprefix("vec") or plain
    plain = OP_ALIASES.get(plain, plain)
    return plain if plain in schema.OPS else None


def _op(table: pd.DataFrame, name: str) -> pd.Series | str:
    """Operator of each row: from a column, else from the file name, else from the folder."""
    for header in OP_HEADERS:
        if header in table.columns and any(_known_op(value) for value in table[header].unique()):
            return table[header].map(lambda value: _known_op(value) or str(value)).astype(object)
    if "kernel_name" in table.columns:
        known = {value: _known_op(value) for value in table["kernel_name"].unique()}
        if all(known.values()):
            return table["kernel_name"].map(known).astype(object)
    for part in _parts(name):
        ops = {op for word in (part, *re.split(r"[^a-zA-Z0-9]+", part)) if (op := _known_op(word)) is not None}
        if len(ops) == 1:
            return ops.pop()
    raise NotASweep("no operator of the schema, neither as a column nor in its path")


def _launch(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Grid, block and occupancy columns; a `grid` of "[x, y, z]" is taken apart."""
    out = {
        column: pd.to_numeric(table[column], errors="coerce") for column in NUMBER_HEADERS if column in table.columns
    }
    for whole, columns in (("grid", schema.GRID_COLUMNS), ("block", schema.BLOCK_COLUMNS)):
        if whole in table.columns and columns[0] not in out:
            parts = table[whole].astype(str).str.extract(r"(\d+)\D+(\d+)\D+(\d+)")
            out |= {column: pd.to_numeric(parts[index]) for index, column in enumerate(columns)}
    return out
