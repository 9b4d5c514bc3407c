"""Row-by-row validation of measurements: the schema's columns in, the normalised frame and a list of problems out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from neusight_jax.arithmetic import DTYPES, ELEMENT_BYTES
from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import NONE_OWN, find_device
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.gpu import GPU
from neusight_jax.kernels.families import FAMILIES, family_of
from neusight_jax.roofline import WARM_RAMP, peak_flop_per_s

LIGHT_TOLERANCE = 0.98
"""A row is faster than light below this share of the bound: clocks boost a little above the specification."""

CHUNK = 16384
"""Rows whose FLOP and bytes are computed at once; a fixed length, so that a family compiles once."""

MAY_BE_ZERO: frozenset[str] = frozenset({"padding", "window", "causal"})
"""Dims that may be 0."""

PROBLEMS: tuple[str, ...] = ("unknown device", "unknown op", "unknown dtype", "bad dims", "bad latency", "too fast")
"""Kinds of problems a row may have."""

FRAME_COLUMNS: tuple[str, ...] = (
    *("device", "family", "op", "dtype"),
    *schema.FRAME_DIMS,
    *("latency_s", "kernel_name", "tile", "blocks", "file", "row"),
)
"""Columns of the normalised frame. `op` is the family's operator; `row` counts from 0 in `file`."""

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Problems:
    """Collects what is wrong with rows of one file; `frame` has columns file, row, problem, detail."""

    file: str
    rows: Values
    bad: Mask
    parts: list[pd.DataFrame] = field(default_factory=list)

    def add(self, where: Mask, problem: str, detail: Callable[[Any], str]) -> None:
        """Note a problem of the rows in a mask; `detail` gets the positions and is called for each."""
        positions = np.flatnonzero(where)
        if positions.size:
            details = [detail(position) for position in positions]
            columns = {"file": self.file, "row": self.rows[positions], "problem": problem, "detail": details}
            self.parts.append(pd.DataFrame(columns))
            self.bad |= where

    def frame(self) -> pd.DataFrame:
        """All problems, in row order."""
        return join_problems(self.parts).sort_values("row", kind="stable", ignore_index=True)


@dataclass(frozen=True)
class CheckedRows:
    """Rows of one file after the checks.

    Attributes:
      frame: `FRAME_COLUMNS`, every row in file order, bad ones included; `family` is null for unknown operators.
      bad: which rows have a problem.
      problems: file, row, problem, detail.
    """

    frame: pd.DataFrame
    bad: Mask
    problems: pd.DataFrame


def join_problems(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """One problem frame from several."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame({"file": [], "row": [], "problem": [], "detail": []}).astype({"row": int})
    return pd.concat(filled, ignore_index=True)


def numbers(column: pd.Series) -> Values:
    """A column as float64, NaN where it holds no number."""
    return np.asarray(pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan))


def check_rows(
    raw: pd.DataFrame,
    file: str,
    *,
    to_predict: bool = False,
    measured_on: tuple[str, GPU] | None = None,
    own: Mapping[str, GPU] = NONE_OWN,
) -> CheckedRows:
    """Check and normalise rows of the schema.

    Args:
      raw: columns of the schema; the index is the row number in `file`.
      file: where the rows come from, for messages.
      to_predict: the rows are asked about, not learned from: the device may be unknown or absent, and so may
        `latency_s`; what is there is still checked.
      measured_on: the GPU of all rows, whatever their column `device` says.
      own: devices that the catalog does not have, by name.
    Raises: `InputError` for a missing column. Bad rows are reported, not raised.
    """
    columns = ("op",) if to_predict else ("op", "latency_s") if measured_on else ("device", "op", "latency_s")
    need_columns(raw, columns, file)
    size = len(raw)
    problems = Problems(file, raw.index.to_numpy(), np.zeros(size, bool))
    if measured_on is None:
        devices, gpus = device_column(raw, problems, to_predict, own)
    else:
        devices, gpus = np.full(size, measured_on[0], object), dict([measured_on])
    dtype = _dtypes(raw, problems)
    frame = pd.DataFrame({"device": devices, "family": None, "op": None, "dtype": dtype}, dtype=object)
    for name in schema.FRAME_DIMS:
        frame[name] = np.nan
    _fill_ops(raw, frame, problems, file)
    frame["latency_s"] = _latency(raw, problems)
    _check_light(frame, gpus, problems)
    _fill_launch(raw, frame)
    frame["file"] = file
    frame["row"] = problems.rows
    return CheckedRows(frame[list(FRAME_COLUMNS)], problems.bad, problems.frame())


def refusal(bad: int, total: int, problems: pd.DataFrame) -> InputError:
    """The one line that refuses measurements with bad rows."""
    kinds = problems["problem"].value_counts()
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    first = problems.iloc[0]
    return InputError(
        f"{bad} of {total} measurement rows are bad ({counts}); first: {first['file']} row {first['row']} (from 0): "
        f"{first['detail']}; mend them, or leave them out with --drop-invalid"
    )


def need_columns(raw: pd.DataFrame, columns: Iterable[str], file: str) -> None:
    """`InputError` when a table lacks columns it must have."""
    missing = [name for name in columns if name not in raw.columns]
    if missing:
        present = ", ".join(str(name) for name in raw.columns)
        raise InputError(f"{file}: column {missing[0]!r} is missing; it has {present}; expected the measurement schema")


def _text(column: pd.Series) -> np.ndarray[Any, np.dtype[np.object_]]:
    """A column as strings, None where it is null."""
    values = column.astype(object)
    return np.asarray(values.where(values.notna(), None), object)


def device_column(
    raw: pd.DataFrame, problems: Problems, to_predict: bool, own: Mapping[str, GPU] = NONE_OWN
) -> tuple[Any, dict[str, GPU]]:
    """Canonical device names, and the known GPUs by them."""
    if "device" not in raw.columns:
        return np.full(len(raw), None, object), {}
    given = _text(raw["device"])
    names: dict[Any, Any] = {}
    gpus: dict[str, GPU] = {}
    reasons: dict[Any, str] = {}
    for name in pd.unique(given):
        names[name] = name
        if name is None:
            reasons[name] = "no device is given; expected the driver's name of a GPU"
            continue
        try:
            names[name], gpu = find_device(str(name), own)
            gpus[names[name]] = gpu
        except InputError as error:
            reasons[name] = str(error)
    if not to_predict and reasons:
        unknown = np.array([name in reasons for name in given], bool)
        problems.add(unknown, "unknown device", lambda position: reasons[given[position]])
    return pd.Series(given, dtype=object).map(names).to_numpy(), gpus


def _dtypes(raw: pd.DataFrame, problems: Problems) -> Any:
    if "dtype" not in raw.columns:
        return np.full(len(raw), "fp32", object)
    given = _text(raw["dtype"])
    unknown = ~np.isin(given.astype(str), DTYPES)
    problems.add(unknown, "unknown dtype", lambda position: str(unknown_name("dtype", str(given[position]), DTYPES)))
    return given


def _fill_ops(raw: pd.DataFrame, frame: pd.DataFrame, problems: Problems, file: str) -> None:
    """Families, operators and dims, operator by operator."""
    ops = _text(raw["op"])
    families, family_ops = np.full(len(raw), None, object), np.full(len(raw), None, object)
    dims = {name: np.full(len(raw), np.nan) for name in schema.FRAME_DIMS}
    for op in pd.unique(ops):
        where = ops == op if op is not None else np.array([value is None for value in ops], bool)
        if op not in schema.OPS:
            reason = str(unknown_name("op", str(op), schema.OPS))
            problems.add(where, "unknown op", lambda _, reason=reason: reason)  # type: ignore[misc]
            continue
        need_columns(raw, schema.op_columns(op), file)
        optional = schema.OPTIONAL_COLUMNS.get(op, {})
        present = (*schema.op_columns(op), *(name for name in optional if name in raw.columns))
        columns = {name: numbers(raw[name])[where] for name in present}
        _check_dims(raw, op, columns, where, problems)
        family_ops[where] = op
        families[where], converted = schema.row_dims(op, columns)
        _, family_ops[where] = schema.family_op(op)
        for name, values in converted.items():
            dims[name][where] = values
    dtypes = frame["dtype"].to_numpy()
    for product in schema.GEMM_OPS:
        for other in set(dtypes[families == product]) - {"fp32"}:
            families[(families == product) & (dtypes == other)] = family_of(product, other)
    frame["family"], frame["op"] = families, family_ops
    for name, values in dims.items():
        frame[name] = values


def _check_dims(raw: pd.DataFrame, op: str, columns: dict[str, Values], where: Mask, problems: Problems) -> None:
    positions = np.flatnonzero(where)
    for name, values in columns.items():
        least = 0.0 if name in MAY_BE_ZERO else 1.0
        wrong = np.zeros(len(raw), bool)
        wrong[positions] = ~(np.isfinite(values) & (values >= least) & (values == np.floor(values)))
        given = raw[name]

        def detail(position: Any, name: str = name, given: pd.Series = given, least: float = least) -> str:
            return f"{name} of {op} is {given.iloc[position]}, expected a whole number of at least {least:.0f}"

        problems.add(wrong, "bad dims", detail)


def _latency(raw: pd.DataFrame, problems: Problems) -> Values:
    if "latency_s" not in raw.columns:
        return np.full(len(raw), np.nan)
    latency_s = numbers(raw["latency_s"])
    given = raw["latency_s"]
    wrong = ~(np.isfinite(latency_s) & (latency_s > 0.0))
    problems.add(wrong, "bad latency", lambda at: f"latency_s is {given.iloc[at]}, expected seconds above 0")
    return latency_s


def _check_light(frame: pd.DataFrame, gpus: dict[str, GPU], problems: Problems) -> None:
    """Rows faster than their GPU allows: below FLOP / peak, or below bytes / bandwidth with a working set beyond L2."""
    fine = ~problems.bad & frame["latency_s"].notna().to_numpy() & frame["family"].notna().to_numpy()
    latency_s, devices, families = frame["latency_s"].to_numpy(), frame["device"].to_numpy(), frame["family"].to_numpy()
    bound_s = np.zeros(len(frame))
    for name in pd.unique(families[fine]):
        positions = np.flatnonzero(fine & (families == name))
        family = FAMILIES[name]
        dims = {dim: frame[dim].to_numpy()[positions] for dim in family.dims}
        dtype = np.array([DTYPES.index(value) for value in frame["dtype"].to_numpy()[positions]], np.int32)
        flop, bytes_moved = flop_and_bytes(name, dims, dtype)
        for device, gpu in gpus.items():
            here = devices[positions] == device
            if not here.any():
                continue
            paths = np.asarray(peak_flop_per_s(gpu, family, jnp.arange(len(DTYPES))), np.float64)
            peak = paths[dtype[here]]
            compute_s = np.divide(flop[here], peak, out=np.zeros_like(peak), where=peak > 0.0)
            beyond_l2 = bytes_moved[here] > WARM_RAMP[1] * float(np.asarray(gpu.l2_bytes))
            memory_s = np.where(beyond_l2, bytes_moved[here] / float(np.asarray(gpu.mem_bytes_per_s)), 0.0)
            bound_s[positions[here]] = np.maximum(compute_s, memory_s)
    too_fast = fine & (latency_s < LIGHT_TOLERANCE * bound_s)

    def detail(at: Any) -> str:
        bound = f"{bound_s[at]:.3g}"
        return f"latency_s is {latency_s[at]:.3g} on {devices[at]}, expected at least its speed of light, {bound}"

    problems.add(too_fast, "too fast", detail)


@functools.cache
def _program(family: str) -> Callable[..., Any]:
    def measure(dims: dict[str, jax.Array], element_bytes: jax.Array) -> tuple[jax.Array, jax.Array]:
        work = FAMILIES[family].work(dims, element_bytes)
        return work.bound_flop, work.bytes_moved

    return jax.jit(measure)


def flop_and_bytes(
    family: str, dims: dict[str, Values], dtype: np.ndarray[Any, np.dtype[Any]]
) -> tuple[Values, Values]:
    """Least FLOP and compulsory bytes of rows of one family, from the family itself.

    Args:
      family: key of `FAMILIES`.
      dims: its dims, each [row].
      dtype: indices into `DTYPES` [row].
    """
    size = len(dtype)
    flop, bytes_moved = np.zeros(size), np.zeros(size)
    element_bytes = np.array(ELEMENT_BYTES, np.float32)[dtype]
    for start in range(0, size, CHUNK):
        part = slice(start, min(start + CHUNK, size))
        short = CHUNK - (part.stop - part.start)
        padded = {
            name: np.pad(column[part].astype(np.float32), (0, short), constant_values=1.0)
            for name, column in dims.items()
        }
        out = _program(family)(padded, np.pad(element_bytes[part], (0, short), constant_values=4.0))
        flop[part], bytes_moved[part] = (np.asarray(values, np.float64)[: CHUNK - short] for values in out)
    return flop, bytes_moved


def _fill_launch(raw: pd.DataFrame, frame: pd.DataFrame) -> None:
    """Kernel name, tile and thread blocks, where the profiler gave them."""
    size = len(raw)
    names = _text(raw["kernel_name"]) if "kernel_name" in raw.columns else np.full(size, None, object)
    codes, unique = pd.factorize(pd.Series(names, dtype=object))
    tiles = np.array([*(schema.parse_tile(str(name)) for name in unique), None], object)
    in_threads = np.array([*(schema.grid_in_threads(str(name)) for name in unique), False], bool)
    conv_tiles = np.array([*(schema.parse_conv_tile(str(name)) for name in unique), None], object)
    ops = frame["op"].to_numpy().astype(str)
    frame["kernel_name"] = names
    tile = np.where(np.isin(ops, schema.GEMM_OPS), tiles[codes], np.array(None, object))
    frame["tile"] = np.where(np.isin(ops, schema.CONV_OPS), conv_tiles[codes], tile)
    blocks = np.full(size, np.nan)
    if all(name in raw.columns for name in schema.GRID_COLUMNS):
        blocks = np.prod([numbers(raw[name]) for name in schema.GRID_COLUMNS], axis=0)
        if all(name in raw.columns for name in schema.BLOCK_COLUMNS):
            threads = np.prod([numbers(raw[name]) for name in schema.BLOCK_COLUMNS], axis=0)
            blocks = np.where(in_threads[codes], blocks / np.maximum(threads, 1.0), blocks)
    frame["blocks"] = blocks
