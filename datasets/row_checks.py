"""Row-by-row validation of measurements: the schema's columns in, the normalised frame and a list of problems out.

Rows are of kernel sweeps (`check_rows`), or of measured models (`check_models`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from neusight_jax.arithmetic import DTYPES, ELEMENT_BYTES
from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import NONE_OWN, find_device
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES, family_of
from neusight_jax.model.physics import STANDARD
from neusight_jax.model.roofline import peak_flop_per_s, warm_ramp

SHORTEST_S = 1e-15
"""Less than a femtosecond is no time of a kernel."""
LIGHT_TOLERANCE = 0.98
"""A row is faster than light below this share of the bound: clocks boost a little above the specification."""

CHUNK = 16384
"""Rows whose FLOP and bytes are computed at once; a fixed length, so that a family compiles once."""

FRAME_COLUMNS: tuple[str, ...] = (
    *("device", "family", "op", "dtype"),
    *schema.FRAME_DIMS,
    *("latency_s", "kernel_name", "tile", "blocks", *schema.POWER_COLUMNS, "file", "row"),
)
"""Columns of the normalised frame. `op` is the family's operator; `row` counts from 0 in `file`."""

OnInvalid = Literal["refuse", "drop", "list"]
"""Ways to treat bad rows: raise; leave them out, where some are good; or only list them."""
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Values = np.ndarray[Any, np.dtype[np.float64]]
Objects = np.ndarray[Any, np.dtype[np.object_]]


class Check(NamedTuple):
    """Values that a column may hold.

    Attributes:
      problem: what any other value is, in words.
      expected: what is fine, in words.
      fine: whether values are, NaN where a cell holds no number.
    """

    problem: str
    expected: str
    fine: Callable[[Values], Mask]


def _whole_from(least: int) -> Check:
    def fine(values: Values) -> Mask:
        return np.asarray(np.isfinite(values) & (values >= least) & (values == np.floor(values)))

    return Check("bad dims", f"a whole number of at least {least}", fine)


SECONDS = Check(
    "bad latency", f"seconds above {SHORTEST_S:g}", lambda values: np.isfinite(values) & (values > SHORTEST_S)
)
SECONDS_OR_ZERO = Check("bad latency", "seconds of at least 0", lambda values: np.isfinite(values) & (values >= 0.0))
SIZE = Check("bad size", "a whole number from 1", lambda values: np.isfinite(values) & (values >= 1.0))
SHARE = Check("bad dims", "a share above 0 and at most 1", lambda values: (values > 0.0) & (values <= 1.0))
DIMS: dict[str, Check] = {
    **dict.fromkeys(("padding", "window", "causal", "software", "scale_block"), _whole_from(0)),
    **dict.fromkeys(("crossing_share", "weight_share"), SHARE),
}
"""Checks of dims that may be other than whole numbers from 1."""


@dataclass
class Problems:
    """Problems of rows of one file; `frame` has columns file, row, problem, detail."""

    file: str
    raw: pd.DataFrame
    bad: Mask = field(init=False)
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bad = np.zeros(len(self.raw), bool)

    def add(self, where: Mask, problem: str, detail: Callable[[Any], str]) -> None:
        """Note a problem of the rows in a mask; `detail` gets the positions and is called for each."""
        for at in np.flatnonzero(where):
            row = {"file": self.file, "row": self.raw.index[int(at)], "problem": problem, "detail": detail(at)}
            self.records.append(row)
        self.bad |= where

    def check(self, name: str, check: Check, exempt: Mask | bool = False, of: str = "") -> Values:
        """A column as numbers; values that are not fine are noted.

        Args:
          name: of the column.
          check: what is fine.
          exempt: rows whose value does not count [row], such as blank ones.
          of: words after the column's name.
        """
        cells, values = self.raw[name], numbers(self.raw[name])
        wrong = ~(check.fine(values) | exempt)
        self.add(wrong, check.problem, lambda at: f"{name}{of} is {cells.iloc[at]}, expected {check.expected}")
        return values

    def frame(self) -> pd.DataFrame:
        """All problems, in row order."""
        frame = pd.DataFrame(self.records, columns=["file", "row", "problem", "detail"]).astype({"row": int})
        return frame.sort_values("row", kind="stable", ignore_index=True)


@dataclass
class GoodRows:
    """Keeps count of the good and the bad rows of several files."""

    on_invalid: OnInvalid = "refuse"
    total: int = 0
    bad: int = 0
    _parts: list[pd.DataFrame] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.on_invalid not in get_args(OnInvalid):
            raise unknown_name("on_invalid", str(self.on_invalid), get_args(OnInvalid))

    def take(self, frame: pd.DataFrame, problems: Problems) -> pd.DataFrame:
        """The rows of a file without a problem, from what a check gives."""
        self.total, self.bad = self.total + len(frame), self.bad + int(problems.bad.sum())
        self._parts.append(problems.frame())
        return frame[~problems.bad]

    def problems(self) -> pd.DataFrame:
        """All problems of all files: file, row, problem, detail.

        Raises: `InputError` where there are some, and they are to be refused.
        """
        parts = [part for part in self._parts if len(part)] or [Problems("", pd.DataFrame()).frame()]
        problems = pd.concat(parts, ignore_index=True)
        if self.bad and self.on_invalid == "refuse":
            counts = ", ".join(f"{count} {kind}" for kind, count in problems["problem"].value_counts().items())
            first = problems.iloc[0]
            raise InputError(
                f"{self.bad} of {self.total} measurement rows are bad ({counts}); first: {first['file']} row "
                f"{first['row']} (from 0): {first['detail']}; mend them "
                "(`neusight-jax check` lists them), or leave them out with --drop-invalid"
            )
        return problems


def numbers(column: pd.Series) -> Values:
    """A column as float64, NaN where it holds no number."""
    return np.asarray(pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan))


def check_rows(
    raw: pd.DataFrame,
    file: str,
    *,
    to_predict: bool = False,
    measured_on: tuple[str, GPU] | None = None,
    extra_gpus: Mapping[str, GPU] = NONE_OWN,
) -> tuple[pd.DataFrame, Problems]:
    """Check and normalise rows of the schema.

    Args:
      raw: columns of the schema; the index is the row number in `file`.
      file: where the rows come from, for messages.
      to_predict: the rows are asked about, not learned from: the device may be unknown or absent, and so may
        `latency_s`; what is there is still checked.
      measured_on: the GPU of all rows, whatever their column `device` says.
      extra_gpus: devices that the catalog does not have, by name.
    Returns: `FRAME_COLUMNS` of every row in file order, bad ones included (`family` is null for unknown operators), and
      what is wrong with them.
    Raises: `InputError` for a missing column. Bad rows are reported, not raised.
    """
    columns = ("op",) if to_predict else ("op", "latency_s") if measured_on else ("device", "op", "latency_s")
    need_columns(raw, columns, file)
    problems = Problems(file, raw)
    if measured_on is None:
        devices, gpus = device_column(raw, problems, to_predict, extra_gpus)
    else:
        devices, gpus = np.full(len(raw), measured_on[0], object), dict([measured_on])
    dtypes = _dtypes(raw, problems)
    families, ops, dims = _kernels(raw, dtypes, problems)
    latency_s = np.full(len(raw), np.nan)
    if "latency_s" in raw.columns:
        latency_s = problems.check("latency_s", SECONDS)
    frame = pd.DataFrame({"device": devices, "family": families, "op": ops, "dtype": dtypes}, dtype=object)
    frame = frame.assign(**dims, latency_s=latency_s, **_launches(raw, ops), **_power(raw, problems))
    frame = frame.assign(file=file, row=raw.index.to_numpy())
    _check_light(frame, gpus, problems)
    return frame[list(FRAME_COLUMNS)], problems


def _power(raw: pd.DataFrame, problems: Problems) -> dict[str, Values]:
    """Watts and clocks, NaN where they were not read."""
    columns = dict.fromkeys(schema.POWER_COLUMNS, np.full(len(raw), np.nan))
    for name in schema.POWER_COLUMNS:
        if name in raw.columns:
            above = Check(
                f"bad {name}", "a number above 0, or nothing", lambda watts: np.isfinite(watts) & (watts > 0.0)
            )
            columns[name] = problems.check(name, above, raw[name].isna().to_numpy())
    return columns


def need_columns(raw: pd.DataFrame, columns: Iterable[str], file: str) -> None:
    """`InputError` when a table lacks columns it must have."""
    missing = [name for name in columns if name not in raw.columns]
    if missing:
        present = ", ".join(str(name) for name in raw.columns)
        raise InputError(
            f"{file}: column {missing[0]!r} is missing; it has {present}; expected the measurement schema, of which "
            "`neusight-jax check --template linear` prints an example"
        )


def _text(column: pd.Series) -> Objects:
    """A column as strings, None where it is null."""
    values = column.astype(object)
    return np.asarray(values.where(values.notna(), None), object)


def device_column(
    raw: pd.DataFrame, problems: Problems, to_predict: bool = False, extra_gpus: Mapping[str, GPU] = NONE_OWN
) -> tuple[Any, dict[str, GPU]]:
    """Canonical device names, and the known GPUs by them.

    Args:
      raw: rows as they were read.
      problems: takes what is wrong with them.
      to_predict: whether devices may be unknown or absent.
      extra_gpus: known GPUs by name, the caller's beside the catalog's.
    """
    if "device" not in raw.columns:
        return np.full(len(raw), None, object), {}
    texts = _text(raw["device"])
    names: dict[Any, Any] = {}
    gpus: dict[str, GPU] = {}
    reasons: dict[Any, str] = {}
    # Thousands of rows name a few devices: each is looked up once.
    for name in pd.unique(texts):
        names[name] = name
        try:
            if name is None:
                raise InputError("no device is given; expected the driver's name of a GPU")
            names[name], gpu = find_device(str(name), extra_gpus)
            gpus[names[name]] = gpu
        except InputError as error:
            reasons[name] = str(error)
    if not to_predict and reasons:
        unknown = np.array([name in reasons for name in texts], bool)
        problems.add(unknown, "unknown device", lambda at: reasons[texts[at]])
    return pd.Series(texts, dtype=object).map(names).to_numpy(), gpus


def _dtypes(raw: pd.DataFrame, problems: Problems) -> Objects:
    if "dtype" not in raw.columns:
        return np.full(len(raw), "fp32", object)
    texts = _text(raw["dtype"])
    unknown = ~np.isin(texts.astype(str), DTYPES)
    problems.add(unknown, "unknown dtype", lambda at: str(unknown_name("dtype", str(texts[at]), DTYPES)))
    return texts


def _kernels(raw: pd.DataFrame, dtypes: Objects, problems: Problems) -> tuple[Objects, Objects, dict[str, Values]]:
    """Families, operators in them, and dims, operator by operator; a family is null where the operator is unknown."""
    texts = _text(raw["op"])
    families, ops = np.full(len(raw), None, object), np.full(len(raw), None, object)
    dims = {name: np.full(len(raw), np.nan) for name in schema.FRAME_DIMS}
    # Operators need other columns, so those of one are checked together, apart from all others.
    for op in pd.unique(texts):
        where = np.array([value is None for value in texts], bool) if op is None else texts == op
        if op not in schema.OPS:
            reason = str(unknown_name("op", str(op), schema.OPS))
            problems.add(where, "unknown op", lambda _, reason=reason: reason)  # type: ignore[misc]
            continue
        need_columns(raw, schema.op_columns(op), problems.file)
        usual = schema.OPTIONAL_COLUMNS.get(op, {})
        columns = {}
        for name in (*schema.op_columns(op), *(name for name in usual if name in raw.columns)):
            blank = raw[name].isna().to_numpy() if name in usual else np.zeros(len(raw), bool)
            values = problems.check(name, DIMS.get(name, _whole_from(1)), blank | ~where, f" of {op}")
            columns[name] = np.where(blank, usual.get(name, np.nan), values)
        families[where], family_dims = schema.row_dims(op, {name: values[where] for name, values in columns.items()})
        _, ops[where] = schema.family_op(op)
        for name, values in family_dims.items():
            dims[name][where] = values
    for product in (*schema.GEMM_OPS, *schema.CONV_OPS):
        for other in set(dtypes[families == product]) - {"fp32"}:
            families[(families == product) & (dtypes == other)] = family_of(product, other)
    return families, ops, dims


def _check_light(frame: pd.DataFrame, gpus: dict[str, GPU], problems: Problems) -> None:
    """Rows faster than their GPU allows: below FLOP / peak, or below bytes / bandwidth with a working set beyond L2."""
    fine = frame[~problems.bad & frame["latency_s"].notna().to_numpy() & frame["family"].notna().to_numpy()]
    bound_s = pd.Series(np.nan, index=range(len(frame)))
    # Work and bytes are of the kernel alone and counted once; only the peaks differ from GPU to GPU.
    for name, rows in fine.groupby("family", sort=False):
        family = FAMILIES[str(name)]
        dtype = np.array([DTYPES.index(value) for value in rows["dtype"]], np.int32)
        dims = {dim: rows[dim].to_numpy() for dim in family.columns if dim in rows}
        flop, bytes_moved = flop_and_bytes(str(name), dims, dtype)
        for device, gpu in gpus.items():
            here = (rows["device"] == device).to_numpy()
            if not here.any():
                continue
            peak = np.asarray(peak_flop_per_s(gpu, family, jnp.arange(len(DTYPES))), np.float64)[dtype[here]]
            compute_s = np.divide(flop[here], peak, out=np.zeros_like(peak), where=peak > 0.0)
            # What fits into L2 may be warm there and beat memory: only larger kernels are held to its bandwidth.
            beyond_l2 = bytes_moved[here] > sum(warm_ramp(STANDARD)) * float(np.asarray(gpu.l2_bytes))
            memory_s = np.where(beyond_l2, bytes_moved[here] / float(np.asarray(gpu.mem_bytes_per_s)), 0.0)
            bound_s[rows.index[here]] = np.maximum(compute_s, memory_s)
    latency_s, devices = frame["latency_s"].to_numpy(), frame["device"].to_numpy()

    def detail(at: Any) -> str:
        bound = f"{bound_s[at]:.3g}"
        return f"latency_s is {latency_s[at]:.3g} on {devices[at]}, expected at least its speed of light, {bound}"

    problems.add(latency_s < LIGHT_TOLERANCE * bound_s.to_numpy(), "too fast", detail)


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
    # Another length would compile the family again, so that the last chunk is padded.
    for start in range(0, size, CHUNK):
        part = slice(start, min(start + CHUNK, size))
        short = CHUNK - (part.stop - part.start)
        with np.errstate(over="ignore"):  # a size beyond float32 is infinite work, which no time is long enough for
            padded = {
                name: np.pad(column[part].astype(np.float32), (0, short), constant_values=1.0)
                for name, column in dims.items()
            }
        out = _program(family)(padded, np.pad(element_bytes[part], (0, short), constant_values=4.0))
        flop[part], bytes_moved[part] = (np.asarray(values, np.float64)[: CHUNK - short] for values in out)
    return flop, bytes_moved


def _launches(raw: pd.DataFrame, ops: Objects) -> dict[str, Any]:
    """Kernel name, tile and thread blocks, where the profiler gave them."""
    names = _text(raw["kernel_name"]) if "kernel_name" in raw.columns else np.full(len(raw), None, object)
    codes, unique = pd.factorize(pd.Series(names, dtype=object))

    def of_name(read: Callable[[str], Any], missing: Any) -> Objects:
        return np.array([*(read(str(name)) for name in unique), missing], object)[codes]

    tile = np.where(np.isin(ops.astype(str), schema.GEMM_OPS), of_name(schema.parse_tile, None), np.array(None, object))
    tile = np.where(np.isin(ops.astype(str), schema.CONV_OPS), of_name(schema.parse_conv_tile, None), tile)
    blocks = _product(raw, schema.GRID_COLUMNS)
    threads = _product(raw, schema.BLOCK_COLUMNS)
    if threads is not None and blocks is not None:
        in_threads = of_name(schema.grid_in_threads, False).astype(bool)
        blocks = np.where(in_threads, blocks / np.maximum(threads, 1.0), blocks)
    return {"kernel_name": names, "tile": tile, "blocks": np.nan if blocks is None else blocks}


def _product(raw: pd.DataFrame, columns: Sequence[str]) -> Values | None:
    if not set(columns) <= set(raw.columns):
        return None
    return np.asarray(np.prod([numbers(raw[name]) for name in columns], axis=0))


# Measured models: the columns and checks of `models/end_to_end.csv` and `models/per_op.parquet`.

WORKLOAD: tuple[str, ...] = ("device", "model", "mode", "sequence_length", "batch_size", "option")
"""Columns both tables share."""


@dataclass(frozen=True)
class ModelTable:
    """A kind of model table: its file name, columns it must have, checks of some, and those that may be blank."""

    file: str
    columns: tuple[str, ...]
    checks: Mapping[str, Check]
    blank: tuple[str, ...] = ()


END_TO_END = ModelTable(
    "end_to_end.csv",
    (*WORKLOAD, "num_layers", "e2e_s", "forward_s", "backward_s"),
    {**dict.fromkeys(("e2e_s", "forward_s", "backward_s"), SECONDS), "batch_size": SIZE, "sequence_length": SIZE},
    blank=("forward_s", "backward_s"),
)
"""One row is one measured whole-model latency."""

PER_OP = ModelTable(
    "per_op.parquet",
    (*WORKLOAD, "node_index", "name", "forward_s", "backward_s", "accumulate_s", "total_s", "layer_repeat"),
    dict.fromkeys(("forward_s", "backward_s", "accumulate_s", "total_s"), SECONDS_OR_ZERO),
)
"""One row is one graph node of one measured model."""

MODES: dict[str, str] = {"inf": "inference", "train": "training", "inference": "inference", "training": "training"}
"""Mode of a measured model -> mode of its graph."""
MODEL_TABLES: tuple[ModelTable, ...] = (END_TO_END, PER_OP)


def check_models(
    table: ModelTable, raw: pd.DataFrame, file: str, extra_gpus: Mapping[str, GPU] = NONE_OWN
) -> tuple[pd.DataFrame, Problems]:
    """Check a table: all its rows (device canonical, blank option ""), and what is wrong with them.

    Args:
      table: kind of table, which says what is checked.
      raw: as it was read.
      file: its name, for messages.
      extra_gpus: devices that the folders describe themselves, by name, beside those of the catalog.
    Raises: `InputError` for a missing column.
    """
    need_columns(raw, table.columns, file)
    problems = Problems(file, raw)
    devices, _ = device_column(raw, problems, extra_gpus=extra_gpus)
    for name, check in table.checks.items():
        problems.check(name, check, raw[name].isna().to_numpy() if name in table.blank else False)
    if table is END_TO_END:
        unknown = ~raw["mode"].isin(list(MODES)).to_numpy()
        expected = ", ".join(MODES)
        problems.add(unknown, "unknown mode", lambda at: f"mode is {raw['mode'].iloc[at]}, expected one of {expected}")
    return raw.assign(device=devices, option=raw["option"].astype(object).where(raw["option"].notna(), "")), problems
