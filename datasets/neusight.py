"""Import of a NeuSight checkout (sitar-lab/NeuSight, MIT): CSV sweeps and device JSONs become the measurement schema.

The layout of that repository changed over time, so files are recognised by content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from neusight_jax import units
from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import find_device
from neusight_jax.datasets.imported import ImportReport, write_measurements
from neusight_jax.datasets.row_checks import GoodRows, OnInvalid, check_rows
from neusight_jax.errors import InputError
from neusight_jax.files import refuse_existing
from neusight_jax.hardware.catalog import gpu_info
from neusight_jax.hardware.gpu import FIELDS
from neusight_jax.hardware.reference_sheet import device_of, gpu_from_sheet, is_reference_sheet
from neusight_jax.progress import follow

# Recognising the files of a NeuSight checkout by content: sweeps in CSV, device sheets in JSON.

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
    content = device_of(content, path.name) if isinstance(content, dict) else {}
    if not is_reference_sheet(content):
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
    """Parts of a path that may name a device or an operator: the file's stem, then its folders, the nearest first."""
    path = Path(name)
    return (path.stem, *reversed(path.parent.parts))


def _device(table: pd.DataFrame, name: str) -> pd.Series | str:
    """Device of each row: from a column, else from the name of the file or a folder above it."""
    for header in DEVICE_HEADERS:
        if header in table.columns and table[header].notna().any():
            return _strings(table[header])
    # Names of files join GPU and operator, and write the spaces of a name as _ or -.
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
        op_of = {value: _known_op(value) for value in table["kernel_name"].unique()}
        if all(op_of.values()):
            return table["kernel_name"].map(op_of).astype(object)
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


GPUS_FILE = "gpus.json"
"""Where the device figures found in the tree go, in the output folder: name -> fields of `GPU`, base units."""


def import_neusight(
    source: Path | str, output: Path | str, *, on_invalid: OnInvalid = "refuse", console: Console | None = None
) -> ImportReport:
    """Turn a NeuSight checkout into a folder of the measurement schema, whole or not at all.

    Args:
      source: the checkout, or any folder of its CSV sweeps (latency in milliseconds).
      output: the folder to write; may exist only if empty.
      on_invalid: what to do with bad rows: "refuse" raises, "drop" leaves them out and lists them in the report.
      console: for progress.
    Raises: `InputError` when the source is missing or holds no sweep, rows are bad (and not dropped), or the output is
      not empty or cannot be written.
    """
    source, output = Path(source), Path(output)
    checks = GoodRows(on_invalid)
    if not source.is_dir():
        raise InputError(f"{source} is not a folder; expected a checkout of github.com/sitar-lab/NeuSight")
    refuse_existing(output)
    sweeps, unrecognised = _sweeps(source, console)
    if not sweeps:
        detail = f"; {unrecognised[0][0]}: {unrecognised[0][1]}" if unrecognised else ""
        raise InputError(
            f"{source} holds no NeuSight measurements (CSV files with device, op, dims and latency){detail}; "
            "expected a checkout of github.com/sitar-lab/NeuSight with its data"
        )
    merged, superseded = _prefer_own_files(sweeps)
    good = _good(merged, checks)
    same = ("device", "op", *schema.DIM_COLUMNS, "latency_s")
    kept = {
        op: frame.drop_duplicates([name for name in same if name in frame], ignore_index=True)
        for op, frame in good.items()
    }
    gpus, bad_devices = _devices(source)
    tables: dict[str, pd.DataFrame] = {}
    for op, frame in kept.items():
        amd = frame["device"].map(lambda device: gpu_info(device).vendor == "AMD").astype(bool)
        tables |= {f"kernels/{op}.parquet": frame[~amd], f"kernels_amd/{op}.parquet": frame[amd]}
    write_measurements(output, tables, {GPUS_FILE: json.dumps(gpus, indent=2, sort_keys=True) + "\n"} if gpus else {})
    left_out = {
        ("", "exact duplicate rows"): sum(len(frame) - len(kept[op]) for op, frame in good.items()),
        ("", "rows of merged files whose device has a file of its own"): superseded,
    }
    remarks = [f"{GPUS_FILE}: {len(gpus)} devices ({', '.join(sorted(gpus))})"] if gpus else []
    dropped = checks.problems()
    if len(dropped):
        kinds = ", ".join(f"{count} {kind}" for kind, count in dropped["problem"].value_counts().items())
        remarks.append(f"dropped: {len(dropped[['file', 'row']].drop_duplicates())} bad rows ({kinds})")
    remarks += [f"not recognised: {name}: {reason}" for name, reason in (*unrecognised, *bad_devices)]
    rows = {op: len(kept[op]) for op in sorted(kept)}
    return ImportReport(output, f"from {len(sweeps)} files", rows, left_out, tuple(remarks))


def _walk(source: Path, suffix: str) -> Iterator[tuple[Path, str]]:
    """Files of a suffix below a folder, hidden folders left out, each with its relative name."""
    for path in sorted(source.rglob(f"*{suffix}")):
        relative = path.relative_to(source)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            yield path, relative.as_posix()


def _sweeps(source: Path, console: Console | None) -> tuple[list[Sweep], list[tuple[str, str]]]:
    sweeps, unrecognised = [], []
    for path, name in follow(list(_walk(source, ".csv")), "reading", console):
        try:
            sweeps.append(read_sweep(path, name))
        except NotASweep as error:
            unrecognised.append((name, str(error)))
    return sweeps, unrecognised


def _prefer_own_files(sweeps: Sequence[Sweep]) -> tuple[pd.DataFrame, int]:
    """Rows of all sweeps; those of merged files give way to the files of one device. Index: (file, row)."""
    rows = pd.concat({(sweep.file, sweep.merged): sweep.rows for sweep in sweeps}, names=["file", "merged", "row"])
    merged = rows.index.get_level_values("merged").to_numpy(bool)
    pairs = pd.MultiIndex.from_frame(rows[["op", "device"]])
    doubled = merged & pairs.isin(pairs[~merged])
    return rows[~doubled].droplevel("merged"), int(doubled.sum())


def _good(rows: pd.DataFrame, checks: GoodRows) -> dict[str, pd.DataFrame]:
    """Good rows by operator."""
    good: dict[str, pd.DataFrame] = {}
    for op, frame in rows.groupby("op", sort=False, dropna=False):
        fine = []
        needed = {"device", "op", "latency_s", *(schema.op_columns(str(op)) if op in schema.OPS else ())}
        # File by file, so that problems name the file and its own row numbers.
        for file, group in frame.groupby(level=0, sort=False):
            plain = group.droplevel(0)  # and without columns of other files: blank where they may be absent
            plain = plain[[name for name in plain if name in needed or plain[name].notna().any()]]
            checked, problems = check_rows(plain, str(file))
            checks.take(checked, problems)
            fine.append(group[~problems.bad])
        left = pd.concat(fine)
        if len(left):
            good[str(op)] = _typed(left.reset_index(drop=True).dropna(axis="columns", how="all"), str(op))
    bad_rows = checks.problems()
    if not good:
        raise InputError(f"all {checks.bad} measurement rows are bad; first: {bad_rows.iloc[0]['detail']}")
    return good


def _typed(frame: pd.DataFrame, op: str) -> pd.DataFrame:
    """Dims as whole numbers, latency as float seconds."""
    if op == "linear" and "b" not in frame.columns:
        frame = frame.assign(b=1)
    kinds: dict[str, Any] = dict.fromkeys(("b", *schema.op_columns(op)), "int64")
    kinds |= {name: "Int64" for name in (*schema.GRID_COLUMNS, *schema.BLOCK_COLUMNS) if name in frame.columns}
    return frame.astype({**kinds, "latency_s": "float64"})


def _devices(source: Path) -> tuple[dict[str, dict[str, float]], list[tuple[str, str]]]:
    """Figures of device JSONs in the tree, and the files that look like one but are not understood."""
    gpus: dict[str, dict[str, float]] = {}
    unrecognised = []
    for path, name in _walk(source, ".json"):
        try:
            sheet = read_device(path)
        except InputError as error:
            unrecognised.append((name, str(error)))
            continue
        if sheet is not None:
            gpus[sheet[0]] = sheet[1]
    return gpus, unrecognised
