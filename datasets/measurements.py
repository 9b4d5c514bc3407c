"""Reading measurements: Parquet and CSV files of the schema into one checked, normalised frame, or a `KernelTable`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from neusight_jax.arithmetic import DTYPES
from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import NONE_OWN, find_device, is_gpu_file, measured_device, own_devices
from neusight_jax.datasets.row_checks import (
    FRAME_COLUMNS,
    MODEL_TABLES,
    GoodRows,
    OnInvalid,
    check_models,
    check_rows,
)
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.catalog import canonical_name, fold_name
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable, batch_from_columns
from neusight_jax.records import Record
from neusight_jax.tables import MOST_BYTES, check_regular

KERNEL_FOLDERS: tuple[str, ...] = ("", "kernels", "kernels_amd")
"""Folders of kernel sweeps in a measurement folder."""

READ_COLUMNS: tuple[str, ...] = (
    *("device", "op", "dtype"),
    *schema.DIM_COLUMNS,
    *("latency_s", "kernel_name"),
    *schema.GRID_COLUMNS,
    *schema.BLOCK_COLUMNS,
    *schema.POWER_COLUMNS,
)
"""Columns of kernel sweeps that are read; others may be there."""
_TEXT_COLUMNS: tuple[str, ...] = ("device", "op", "dtype", "kernel_name", "model", "mode", "option")
_EXPECTED = "a Parquet or CSV file of the measurement schema"


@dataclass(frozen=True)
class Measurements(Record):
    """Checked measurements.

    Attributes:
      frame: one row per kernel measurement: device (canonical), family, op, dtype, the family's dims (NaN elsewhere),
        latency_s, kernel_name, tile ("MxN"), blocks, power_w, power_limit_w, clock_hz, file, row (from 0).
      problems: file, row, problem, detail of rows that were dropped.
      end_to_end: measured whole models, or None.
      per_op: measured graph nodes, or None.
      notes: what was left out and why, for people.
      own: devices that the folders bring along and the catalog does not have, by name.
    """

    frame: pd.DataFrame
    problems: pd.DataFrame
    end_to_end: pd.DataFrame | None = None
    per_op: pd.DataFrame | None = None
    notes: tuple[str, ...] = ()
    own: Mapping[str, GPU] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Rows, devices, families and dtypes that were measured, with notes."""
        more = {name: getattr(self, name) for name in ("problems", "end_to_end", "per_op")}
        return {
            **{"rows": len(self.frame), "devices": tuple(self.frame["device"].unique())},
            **{"families": tuple(self.frame["family"].unique()), "dtypes": tuple(self.frame["dtype"].unique())},
            **{name: len(frame) for name, frame in more.items() if frame is not None},
            "notes": self.notes,
        }

    def summary(self) -> str:
        """Rows, devices and families."""
        figures = self.figures()
        return f"{figures['rows']:,} rows of {len(figures['devices'])} GPUs, {len(figures['families'])} families"

    def gpu(self, device: str) -> GPU:
        """Figures of a device of these measurements; `InputError` for an unknown one."""
        return find_device(device, self.own)[1]


def read_measurements(
    paths: Sequence[Path | str] | Path | str,
    *,
    on_invalid: OnInvalid = "refuse",
    devices: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
    measured_on: tuple[str, GPU] | None = None,
) -> Measurements:
    """Read and check measurements.

    Args:
      paths: Parquet or CSV files of the schema, or folders that hold some, or that hold `kernels/`, `kernels_amd/`,
        `models/`; GPU files among them describe devices that the catalog lacks (`devices.own_devices`).
      on_invalid: what to do with bad rows: "refuse" raises, "drop" leaves them out and lists them in `problems`, "list"
        too, also where no row is left.
      devices: only rows of these GPUs (see `find_measured`); rows of others are not even checked.
      ops: only these operators (schema names such as `ln`, or families).
      measured_on: name and figures of the one GPU, of the catalog or not, whose kernels are read, and no whole models;
        rows whose column `device` names another are left out, rows without one (a filled plan) are taken to be its.
    Raises: `InputError` when a path holds nothing of the schema, a file is unreadable, a column is missing, rows are
      bad (and not dropped), or nothing is left.
    """
    rows = GoodRows(on_invalid)
    chosen = None if ops is None else _schema_ops(ops)
    roots = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    if not roots:
        raise InputError("no measurements were given; expected Parquet or CSV files or folders of the schema")
    kernels, *model_files = _find(roots)
    extra_gpus, notes = own_devices(roots)
    wanted = None if devices is None else set(find_measured(devices, roots))
    frames = []
    spelled: set[str] = set()
    for file in kernels:
        # Rows of other GPUs go before the checks: what nobody asks for need not be right.
        raw = _only(_read(file, READ_COLUMNS), wanted, chosen, extra_gpus)
        if measured_on is not None:
            spelled |= {str(device) for device in raw["device"].dropna().unique()} if "device" in raw else set()
            raw = raw[_measured_on(raw, measured_on[0])]
        frames.append(rows.take(*check_rows(raw, str(file), measured_on=measured_on, extra_gpus=extra_gpus)))
    tables: list[pd.DataFrame | None] = []
    for table, files in zip(MODEL_TABLES, model_files, strict=True):
        parts = []
        for file in files if measured_on is None else ():
            raw = _only(_read(file), wanted, None, extra_gpus)
            parts.append(rows.take(*check_models(table, raw, str(file), extra_gpus)))
        tables.append(_concat(parts) if parts else None)
    problems = rows.problems()
    if rows.bad == rows.total and not (rows.bad and on_invalid == "list"):
        if measured_on is not None:
            wanted = {measured_on[0]}
        raise _nothing_left(roots, rows.bad, wanted, chosen, spelled)
    frame = _concat(frames) if frames else pd.DataFrame({name: [] for name in FRAME_COLUMNS})
    end_to_end, per_op = tables
    return Measurements(frame, problems, end_to_end, per_op, notes, extra_gpus)


def find_measured(names: Iterable[str], paths: Sequence[Path | str]) -> list[str]:
    """Canonical names of the measured devices that names or aliases mean (`devices.measured_device`).

    Args:
      names: as a user spells them; paths: as `read_measurements`.
    Raises: `InputError` for a device without rows, listing those that have some.
    """
    names = list(names)
    measured = measured_names(paths) if names else set()
    return [measured_device(name, measured) for name in names]


def measured_names(paths: Sequence[Path | str]) -> set[str]:
    """Canonical names of the devices that have rows in measurements; nothing else is read, or checked."""
    roots = [Path(path) for path in paths]
    extra_gpus, _ = own_devices(roots)
    names: set[str] = set()
    for file in (file for files in _find(roots) for file in files):
        names |= {*_known_devices(_read(file, ("device",)), extra_gpus).values()}
    return names


def _known_devices(raw: pd.DataFrame, extra_gpus: Mapping[str, GPU]) -> dict[str, str]:
    """Known devices of a table: as they are spelled, and their canonical names."""
    names: dict[str, str] = {}
    for name in raw["device"].dropna().unique() if "device" in raw else ():
        with suppress(InputError):
            names[name] = find_device(str(name), extra_gpus)[0]
    return names


def read_kernels(path: Path | str) -> KernelTable:
    """Kernels of one Parquet or CSV file of the schema as a `KernelTable`, in file order, to be forecast on any GPU.

    Args:
      path: the file. `latency_s` may be absent and the device unknown or absent; what is there is checked.
    Raises: `InputError` when the file is unreadable, lacks a column, or holds bad rows.
    """
    file = Path(path)
    if file.is_dir():
        raise InputError(
            f"{file} is a folder, expected one file of the measurement schema, such as {file}/linear.parquet"
        )
    raw, rows = _read(file, READ_COLUMNS), GoodRows()
    frame = rows.take(*check_rows(raw, str(file), to_predict=True))
    rows.problems()
    return table_from_frame(frame)


def _measured_on(raw: pd.DataFrame, name: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Rows of a GPU, and rows that name none."""
    if "device" not in raw.columns:
        return np.ones(len(raw), bool)
    spelled = raw["device"].dropna().unique()
    spellings = [
        spelling
        for spelling in spelled
        if fold_name(str(spelling)) == fold_name(name) or canonical_name(str(spelling)) == name
    ]
    return np.asarray(raw["device"].isna() | raw["device"].isin(spellings), bool)


def table_from_frame(frame: pd.DataFrame) -> KernelTable:
    """A `KernelTable` from rows of the normalised frame, in frame order."""
    families = frame["family"].to_numpy().astype(str)
    ops, dtypes = frame["op"].to_numpy(), frame["dtype"].to_numpy()
    dtype_index = pd.Series(dtypes, dtype=object).map({name: index for index, name in enumerate(DTYPES)}).to_numpy()
    batches = {}
    # Families have other columns of dims, so each is a batch of its own that remembers its places in the frame.
    for name, family in FAMILIES.items():
        where = np.flatnonzero(families == name)
        if not len(where):
            continue
        batches[name] = batch_from_columns(
            family,
            ops[where],
            {dim: frame[dim].to_numpy(np.float64)[where] for dim in family.columns if dim in frame},
            dtype=dtype_index[where],
            count=np.ones(len(where)),
            phase=np.zeros(len(where), np.int32),
            node=where,
            row=where,
        )
    return KernelTable(batches)


def _schema_ops(names: Iterable[str]) -> set[str]:
    """Schema operators from names of operators and families."""
    chosen: set[str] = set()
    for name in names:
        members = {op for op in schema.OPS if name in schema.family_op(op)}
        members |= {name} & set(schema.OPS)
        if not members:
            raise unknown_name("op", name, (*schema.OPS, *FAMILIES))
        chosen |= members
    return chosen


def _find(roots: Iterable[Path]) -> list[list[Path]]:
    """Kernel files below the given paths, and files of each of `MODEL_TABLES`; each once, in order."""
    names = [table.file for table in MODEL_TABLES]
    files_of: list[dict[Path, None]] = [{} for _ in ("kernels", *names)]
    # A file that is named is read whatever it is called; in a folder only the places of the schema are looked into.
    for root in roots:
        if is_gpu_file(root):
            continue
        if root.is_file():
            files_of[names.index(root.name) + 1 if root.name in names else 0][root] = None
            continue
        if not root.exists():
            raise InputError(f"{root} does not exist; expected a file or folder of the measurement schema")
        sweeps = [file for folder in KERNEL_FOLDERS for file in sorted((root / folder).glob("*.*"))]
        below = [[file for file in sweeps if file.name not in names and _is_sweep(file)]]
        below += [[root / folder / name for folder in ("", "models")] for name in names]
        below = [[file for file in files if file.is_file()] for files in below]
        if not any(below):
            raise InputError(
                f"{root} holds no measurements; expected *.parquet or *.csv of the measurement schema, or kernels/, "
                "kernels_amd/ or models/; make such a folder with `neusight-jax import` or `neusight-jax profile`"
            )
        for files, more in zip(files_of, below, strict=True):
            files.update(dict.fromkeys(more))
    return [list(files) for files in files_of]


def _is_sweep(file: Path) -> bool:
    """Whether a file in a folder is to be read: every Parquet file, and a CSV file with the columns of the schema."""
    if file.suffix.lower() != ".csv" or not file.is_file():
        return file.suffix.lower() == ".parquet"
    with suppress(OSError, ValueError):
        return {"op", "latency_s"} <= set(column_names(file))
    return False


def column_names(file: Path) -> list[str]:
    """Columns of a Parquet or CSV file that was read."""
    if file.suffix.lower() == ".csv":
        return [str(name) for name in pd.read_csv(file, nrows=0, skipinitialspace=True)]
    return [str(name) for name in pq.read_schema(file).names]


def _read(file: Path, columns: Iterable[str] | None = None) -> pd.DataFrame:
    """Columns that are there of a table, all when None. Raises: `InputError` as `_read_parquet`."""
    if file.suffix.lower() != ".csv":
        return _read_parquet(file, columns)
    check_regular(file, "a CSV file of the measurement schema", MOST_BYTES)
    try:
        frame = pd.read_csv(file, dtype=dict.fromkeys(_TEXT_COLUMNS, str), skipinitialspace=True)  # "inf" is no number
    except (OSError, ValueError) as error:  # parser and decoding errors are ValueErrors
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"{file} is not a readable CSV file ({reason}); expected the measurement schema") from error
    return _not_empty(frame, file)


def _read_parquet(file: Path, columns: Iterable[str] | None = None) -> pd.DataFrame:
    """Columns of a Parquet file that are there (all when None); one-line errors for all that can be wrong with it."""
    if not file.exists():
        raise InputError(f"{file} does not exist; expected {_EXPECTED}")
    check_regular(file, _EXPECTED)
    try:
        with pq.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if columns is not None:
                wanted = set(columns)
                # A file with none of the columns is read whole, so that the checks can say what it lacks.
                names = [name for name in names if name in wanted] or names
            table = opened.read(columns=names)
        if columns is not None and any(pa.types.is_nested(column.type) for column in table.schema):
            raise TypeError("a column holds lists")
        table.validate(full=True)  # text that is not UTF-8 would else show up later, when it is looked at
        # Without what pandas wrote of its index and types: not needed, and JSON that may be damaged.
        frame: pd.DataFrame = table.replace_schema_metadata(None).to_pandas()
    except Exception as error:  # a damaged file breaks in many ways, in Arrow, in Python's decoders and in pandas
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"{file} is not a readable Parquet file ({reason}); expected the measurement schema, copy or make it again"
        ) from error
    return _not_empty(frame, file)


def _not_empty(frame: pd.DataFrame, file: Path) -> pd.DataFrame:
    if frame.empty:
        raise InputError(f"{file} holds no rows; remove it or measure again")
    return frame.reset_index(drop=True)


def _only(
    raw: pd.DataFrame, devices: set[str] | None, ops: set[str] | None, extra_gpus: Mapping[str, GPU] = NONE_OWN
) -> pd.DataFrame:
    """Rows of the wanted devices and operators."""
    if ops is not None and "op" in raw.columns:
        raw = raw[raw["op"].isin(ops)]
    if devices is not None and "device" in raw.columns:
        wanted = [spelled for spelled, name in _known_devices(raw, extra_gpus).items() if name in devices]
        raw = raw[raw["device"].isin(wanted)]
    return raw


def _concat(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    filled = [frame for frame in frames if len(frame)] or list(frames[:1])
    return pd.concat(filled, ignore_index=True)


def _nothing_left(
    roots: Iterable[Path],
    bad: int,
    devices: set[str] | None,
    ops: set[str] | None,
    measured: Iterable[str] = (),
) -> InputError:
    where = ", ".join(str(root) for root in roots)
    if bad:
        return InputError(f"all {bad} measurement rows of {where} are bad; none is left once they are dropped")
    if not devices and not ops:
        return InputError(f"{where}: no measurements of an operator that a family models; measure others")
    request = [f"device {name!r}" for name in sorted(devices or ())] + [f"op {name!r}" for name in sorted(ops or ())]
    choices = "".join(f"; measured here: {', '.join(names)}" for names in [sorted(measured)] if names)
    return InputError(f"{where}: no measurements of {', '.join(request)}{choices}; ask for others or give more folders")
