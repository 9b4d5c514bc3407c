"""Tables in a text that command-line profilers wrote: where each begins, its columns with units, its rows."""

from __future__ import annotations

import csv
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import gpu_info
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.rowwise import BINARY_OPS
from neusight_jax.kernels.table import Kernel
from neusight_jax.scaling.trace import (
    LONGEST_S,
    Account,
    Launch,
    Measured,
    Trace,
    busy_seconds,
    content_kind,
    duration_text,
    kernel_of_name,
    launch_of,
    read_text,
)

UNITS: dict[str, float] = {
    **dict.fromkeys(("ns", "nsec", "nsecs", "nsecond", "nanosecond", "nanoseconds"), 1e-9),
    **dict.fromkeys(("us", "μs", "µs", "usec", "usecs", "usecond", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "msec", "msecs", "msecond", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
}
"""Unit in a column's name -> seconds."""
NAMES: tuple[str, ...] = ("name", "kernelname", "operation", "range", "nvtxrange", "apiname", "apifunction", "event")
"""Columns of which a header has one."""
_REPORT = re.compile(r"(?:Processing|Running)\s+\[([^\]]*)\](?:\s+with\s+\[([^\]]*)\])?|^\s*\*\*.*\((\w+)[^)]*\)")
_COLUMN = re.compile(r"^(.*?)\s*(?:[(\[]\s*([^)\]]*?)\s*[)\]])?$")
_GROUPS = {mark: re.compile(rf"(?<=\d)[{other}\s'\u00a0\u202f](?=\d{{3}}(?:\D|$))") for mark, other in (".,", ",.")}
"""By decimal mark, the marks between groups of three digits."""
_DECIMAL_COMMA = re.compile(r"[-\d.]*,(?:\d{1,2}|\d{4,})|0,\d+")
"""A number with a comma before its fraction: no group of three digits follows."""


@dataclass
class Table:
    """A table.

    Attributes:
      report: the script that wrote it, `cuda_gpu_kern_sum`; "" if the text does not say. source: the file it read.
      shown: the header as written; delimiter: between its cells.
      cells: lines of the table as text; broken: lines between them that have another number of cells.
    """

    report: str
    source: str
    shown: tuple[str, ...]
    delimiter: str
    cells: list[list[str]] = field(default_factory=list)
    broken: int = 0

    def __post_init__(self) -> None:
        folded = [fold_column(cell) for cell in self.shown]
        self.units = dict(reversed(folded))  # the first of columns that are named alike
        self.columns = {name: at for at, (name, _) in reversed(list(enumerate(folded)))}

    @functools.cached_property
    def _decimal(self) -> str:
        """Mark before a number's fraction; some have a comma where cells are cut at semicolons."""
        cells = (cell.strip() for row in self.cells for cell in row) if self.delimiter == ";" else ()
        return "," if any(_DECIMAL_COMMA.fullmatch(cell) for cell in cells) else "."

    def find(self, *names: str) -> str | None:
        """The first of these folded names that is a column."""
        return next((name for name in names if name in self.columns), None)

    def text(self, name: str | None) -> pd.Series:
        """A column's cells; "" without the column."""
        at = self.columns.get(name or "")
        return pd.Series(["" if at is None else row[at].strip() for row in self.cells], dtype=object)

    def number(self, name: str | None) -> pd.Series:
        """A column as finite numbers, marks between thousands taken out; NaN for what is none."""

        def read(text: str) -> float:
            plain = _GROUPS[self._decimal].sub("", text)
            try:
                value = float(plain.replace(",", ".") if self._decimal == "," else plain)
            except ValueError:
                return math.nan
            return value if math.isfinite(value) else math.nan

        return self.text(name).map(read).astype(float)

    def seconds(self, name: str | None) -> pd.Series:
        """A column as seconds, by its unit; without one, nanoseconds. NaN for what is no number."""
        return self.number(name) * UNITS.get(self.units.get(name or "") or "ns", 1e-9)


def fold_column(text: str) -> tuple[str, str]:
    """A column's name in lower case without marks, and its unit: `Total Time (ns)` is ("totaltime", "ns")."""
    match = _COLUMN.match(text.strip())
    name, unit = (match[1], match[2] or "") if match else (text, "")
    folded = re.sub(r"[\W_]+", "", name).lower()
    if folded.endswith("ns") and not unit and folded.startswith(("total", "duration", "average", "begin", "end")):
        return folded[:-2], "ns"  # rocprof: TotalDurationNs
    return folded, unit.lower()


def read_tables(text: str) -> list[Table]:
    """All tables of a text, in order; what stands between them is passed over."""
    tables: list[Table] = []
    report, source, inside = "", "", False
    # A profiler prints several reports into one file, with messages between them: a header may stand anywhere.
    for line in filter(str.strip, text.splitlines()):
        if match := _REPORT.search(line):
            script = match[2] or match[3] or match[1] or ""
            report = re.sub(r"\.py.*$", "", script.strip().replace("\\", "/").rsplit("/", 1)[-1].split()[0])
            source, inside = match[1] or source, False
        elif header := _header(line):
            tables.append(Table(report, source, *header))
            report, inside = "", True
        elif inside and len(cells := _cells(line, tables[-1].delimiter)) == len(tables[-1].shown):
            tables[-1].cells.append(cells)
        elif inside:
            tables[-1].broken += 1
    return tables


def _header(line: str) -> tuple[tuple[str, ...], str] | None:
    """Cells and delimiter of a line that names columns; None for any other."""
    for delimiter in filter(line.__contains__, ",\t;|"):
        cells = tuple(cell.strip() for cell in _cells(line, delimiter))
        numeric = any(re.fullmatch(r"[-+\d.,\s%]+", cell) for cell in cells if cell)
        if len(cells) > 1 and not numeric and any(fold_column(cell)[0] in NAMES for cell in cells):
            return cells, delimiter
    return None


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        return []


# Kernel tables as CSV: of Nsight Systems (`nsys stats --format csv`), of rocprof, and of Nsight Compute (`--csv`).
#
# A file may hold several reports. Kernels are those of one report a file: of a list of launches (`cuda_gpu_trace`,
# rocprof's kernel trace) before sums by name (`cuda_gpu_kern_sum`, rocprof's kernel statistics); all other reports are
# left out, and said to be. Times are nanoseconds unless the column says otherwise.

EXPECTED = "expected `nsys stats --format csv` of cuda_gpu_trace or cuda_gpu_kern_sum, or rocprof's kernel CSV"

KERNEL_REPORTS: tuple[tuple[str, ...], ...] = (
    ("cuda_gpu_trace", "gputrace"),
    ("cuda_kern_exec_trace", "kernexectrace"),
    ("cuda_gpu_kern_gb_sum", "gpukerngbsum"),
    ("cuda_gpu_kern_sum", "gpukernsum", "kernel_stats"),
    ("cuda_gpu_sum", "gpusum"),
    ("cuda_kern_exec_sum", "kernexecsum"),
    ("ncu_sum",),
)
"""Reports whose rows are kernels, names since and before 2023; the earlier in this list, the more they say."""
_REPORT_OF = {name: names[0] for names in KERNEL_REPORTS for name in names}
_OTHER_REPORT = re.compile(r"(?:cuda|gpu|osrt|nvtx|um|openmp|vulkan|dx|cudaapi|opengl|mpi|nccl|network|opencl)\w*")
_NAME = ("kernelname", "name", "operation")
_START = ("kernelstart", "start", "begin", "starttimestamp")
_DURATION = ("kerneldur", "duration")
_END = ("end", "endtimestamp")
_TOTAL = ("totaltime", "totalduration")
_METRIC = ("countername", "metricname")
_PER_METRIC = frozenset((*_METRIC, "countervalue", "metricvalue", "metricunit", "sectionname", "rulename"))
"""Columns of tables with a row for each counter of a launch that belong to the counter, not to the launch."""
_TIME_METRICS = frozenset(("duration", "gputimedurationsum"))
_HOST_CALL = re.compile(
    r"^(?:cuda[A-Z]\w*|cu[A-Z]\w*_v\d+|cu(?:Launch|Ctx|Mem|Stream|Event|Module)\w*|_*hip[A-Z]\w*|hsa_\w+)$"
)
"""Calls of the host, which are no kernels whatever table they stand in."""
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20}


def read_kernel_csv(path: Path) -> Trace:
    """Read the kernels of a file. Raises: `InputError` when it is not readable, or has no table of kernels."""
    if content_kind(path) in ("json", "sqlite", "parquet"):
        raise InputError(f"{path}: named as a CSV, but holds {content_kind(path)}; {EXPECTED}")
    tables = [(_report(table), table) for table in read_tables(read_text(path))]
    if not tables:
        raise InputError(f"{path}: no header with a column Name; {EXPECTED}")
    chosen, notes = _choose([(report, table) for report, table in tables if report])
    if not chosen:
        first = tables[0][1]
        if first.find("name", "kernelname") and not first.find("numcalls", "range", "style", "result"):
            _require_times(path, first)
        shown = ", ".join(table.report or "/".join(table.shown[:4]) for _, table in tables[:4])
        raise InputError(f"{path}: no kernels in it ({shown}); {EXPECTED}")
    notes += [f"{_described(table)}, left out: its rows are no kernels" for report, table in tables if not report]
    account, parts = Account(), list[pd.DataFrame]()
    for report, table in chosen:
        if report != "ncu_sum":
            _require_times(path, table)
        parts.append(_rows(report, table, account))
        notes += _missing_share(table)
    rows = pd.concat(parts, ignore_index=True)
    if rows.empty:
        why = f" ({'; '.join(account.notes())})" if account.notes() else ""
        raise InputError(f"{path}: no row has a name and a duration{why}; export the table again")
    if rows["start_s"].isna().any():
        busy_s = span_s = float(rows["seconds"].sum())
        notes.append("a table of sums: overlap and idle time are unknown")
    else:
        busy_s, span_s = busy_seconds(rows["start_s"].to_numpy(), rows["seconds"].to_numpy())
    sums = rows.groupby(["name", "launch"], sort=False, dropna=False)[["seconds", "count"]].sum()
    items = [
        kernel_of_name(name, float(seconds), float(count), launch if isinstance(launch, Launch) else None)
        for (name, launch), (seconds, count) in zip(sums.index, sums.to_numpy(), strict=True)
    ]
    gpus = dict.fromkeys(gpu for _, table in chosen for gpu in _gpus(table))
    return Trace(path.name, tuple(items), busy_s, span_s, (*account.notes(), *notes), tuple(gpus))


def _report(table: Table) -> str:
    """Report of kernels that a table is, by what is said before it or by its columns; "" for none."""
    if report := _REPORT_OF.get(table.report) or _REPORT_OF.get(table.report.split(":")[0]):
        return report
    columns = table.columns.keys()
    if (
        _OTHER_REPORT.fullmatch(table.report)
        or {"numcalls", "style", "range", "nvtxrange", "result", "threadname", "tpri"} & columns
        or not table.find(*_NAME)
    ):
        return ""
    if {"kernelname", "metricname", "metricvalue"} <= columns:
        return "ncu_sum"
    if {"kernelname", "kavg"} <= columns:
        return "cuda_kern_exec_sum"
    if {"kernelname", "kerneldur"} <= columns:
        return "cuda_kern_exec_trace"
    if "operation" in columns:
        return "cuda_gpu_sum" if {"category", "instances"} <= columns else ""
    if table.find(*_TOTAL) and table.find("instances", "calls"):
        return "cuda_gpu_kern_gb_sum" if "gridxyz" in columns else "cuda_gpu_kern_sum"
    return "cuda_gpu_trace" if table.find(*_START) and table.find(*_DURATION, *_END) else ""


def _choose(tables: Sequence[tuple[str, Table]]) -> tuple[list[tuple[str, Table]], list[str]]:
    """Tables of the report that says most, each once for a profile; notes on the others."""
    kept: list[tuple[str, Table]] = []
    notes: list[str] = []
    best = next((names[0] for names in KERNEL_REPORTS if names[0] in dict(tables)), "")
    # Two tables of one report are of two profiles, or one of them written twice: then source or totals agree.
    for report, table in tables:
        repeats = any(
            (table.source and other.source == table.source)
            or (len(other.cells) == len(table.cells) and _total(other) == _total(table))
            for _, other in kept
        )
        if report == best and not repeats:
            kept.append((report, table))
        else:
            notes.append(f"{_described(table, report)}, left out: it repeats kernels of {best}")
    if len(kept) > 1:
        notes.append(f"{len(kept)} tables of {best}: their kernels are added up")
    return kept, notes


def _total(table: Table) -> float:
    return math.fsum(table.seconds(table.find(*_TOTAL, *_DURATION, "kavg")).dropna())


def _described(table: Table, report: str = "") -> str:
    name, total = table.report or report or f"a table of {'/'.join(table.shown[:4])}", _total(table)
    return f"{name}, {len(table.cells)} rows{f' ({duration_text(total)})' if total > 0.0 else ''}"


def _missing_share(table: Table) -> list[str]:
    """A note when the shares that a table of sums gives its rows do not add up to the whole: rows were cut off.

    Shares are rounded to tenths, so that many small kernels may miss some per cent.
    """
    column = table.find("time", "percentage")
    shares = table.number(column).dropna()
    if shares.empty or (column == "time" and table.units[column] != "%") or 90.0 <= shares.sum() <= 110.0:
        return []
    return [f"the shares of its rows add up to {shares.sum():.1f} %, not 100: the rest of the run is not in this file"]


def _require_times(path: Path, table: Table) -> None:
    """`InputError` when a table has no column of times, or one in a unit that is none."""
    name, start = table.find(*_TOTAL, *_DURATION, "kavg"), table.find(*_START)
    if name is None and not (start and table.find(*_END)):
        shown = ", ".join(table.shown[:8])
        raise InputError(f"{path}: no column Duration or Total Time (ns); found {shown}; {EXPECTED}")
    for column in (name, start):
        if column is not None and table.units[column] and table.units[column] not in UNITS:
            shown = table.shown[table.columns[column]]
            raise InputError(f"{path}: the column {shown!r} is in an unknown unit; expected ns, us, ms or s")


def _rows(report: str, table: Table, account: Account) -> pd.DataFrame:
    """Rows of kernels: name, seconds, start_s (NaN in sums), count, launch. What is no kernel is accounted for."""
    if table.broken:
        account.add("lines that are no rows of their table, left out", count=table.broken)
    is_sum = report.endswith("_sum")
    start_s = table.seconds(None if is_sum else table.find(*_START))
    rows = pd.DataFrame(
        {"name": table.text(table.find(*_NAME)), "seconds": _seconds(report, table), "start_s": start_s}
    )
    count = table.number(table.find("instances", "calls", "count"))
    rows["count"] = count if is_sum else 1.0
    rows["launch"] = pd.Series(_launches(table), rows.index, dtype=object)

    if report == "ncu_sum":
        # Nsight Compute writes a row for each metric of a launch, and only some of them are times.
        times = table.text("metricname").map(lambda name: fold_column(name)[0] in _TIME_METRICS).astype(bool)
        rows = rows[times].assign(count=1.0)
    timed = rows["seconds"].between(0.0, LONGEST_S) & (rows["name"] != "")
    account.add("rows without a name or duration left out", count=int((~timed).sum()))
    rows = rows[timed]
    if not is_sum:
        unplaced = ~(rows["start_s"].abs() <= 1e3 * LONGEST_S)
        rows = _without(rows, unplaced, "rows without a start, left out: they cannot be placed", account)
    # Nothing says what the table is of, so that it may list calls of the host too.
    if not table.report:
        called = rows["name"].map(lambda name: _HOST_CALL.match(name) is not None).astype(bool)
        rows = _without(rows, called, "rows of host calls, left out: they are no kernels", account)
    rows = _one_row_a_launch(rows, table, account)
    if not is_sum:
        twice = pd.Series([tuple(row) for row in table.cells], dtype=object)[rows.index].duplicated()
        rows = _without(rows, twice & (rows["seconds"] > 0.0), "rows written twice, counted once", account)
    account.add("rows of no duration: kept, they add nothing", count=int((rows["seconds"] == 0.0).sum()))
    counted = (rows["count"] > 0.0) & (rows["count"] < 1e15)
    uncounted_s = float(rows["seconds"][~counted].sum())
    account.add("rows without a number of launches: taken as one launch", uncounted_s, int((~counted).sum()))
    return rows.assign(count=rows["count"].where(counted, 1.0))


def _one_row_a_launch(rows: pd.DataFrame, table: Table, account: Account) -> pd.DataFrame:
    """Rows without those that a profiler writes for each further counter of the same launch."""
    counter = table.find(*_METRIC)
    if counter is None:
        return rows
    launch = table.find("dispatchid", "correlationid", "id")
    # A launch that is replayed for more counters keeps its number, not its times.
    of_launch = {launch, "processid", "agentid", "kernelname", "name"}
    kept = of_launch if launch else set(table.columns) - _PER_METRIC
    places = [place for name, place in table.columns.items() if name in kept]
    keys = pd.Series([tuple(row[place] for place in places) for row in table.cells], dtype=object)
    reason = "rows repeated for each counter of a launch, counted once"
    return _without(rows, keys[rows.index].duplicated(), reason, account)


def _without(rows: pd.DataFrame, which: pd.Series, reason: str, account: Account) -> pd.DataFrame:
    account.add(reason, float(rows["seconds"][which].sum()), int(which.sum()))
    return rows[~which]


def _seconds(report: str, table: Table) -> pd.Series:
    """Seconds of every row: of all its launches for a sum."""
    if report == "cuda_kern_exec_sum":
        return table.seconds("kavg") * table.number("count")
    if report == "ncu_sum":
        scale = table.text("metricunit").map(lambda unit: UNITS.get(unit.lower(), math.nan))
        return table.number("metricvalue") * scale.astype(float)
    if report.endswith("_sum"):
        return table.seconds(table.find(*_TOTAL))
    if duration := table.find(*_DURATION):
        return table.seconds(duration)
    return table.seconds(table.find(*_END)) - table.seconds(table.find(*_START))


def _launches(table: Table) -> list[Launch | None]:
    grid, block = _sizes(table, "grd", "gridxyz"), _sizes(table, "blk", "blockxyz")
    if "workgroupsizex" in table.columns:  # rocprofv3: the grid in threads
        block = _sizes(table, "workgroupsize")
        with np.errstate(all="ignore"):
            grid = np.ceil(np.divide(_sizes(table, "gridsize"), block)).tolist()
    shared = sum(
        table.number(name).fillna(0.0) * _BYTES.get(table.units.get(name, ""), 1.0) for name in ("stcsmem", "dymsmem")
    )
    registers = table.number(table.find("regtrd", "registers"))
    return [launch_of(*figures) for figures in zip(grid, block, registers, pd.Series(shared), strict=True)]


def _sizes(table: Table, axis: str, together: str = "") -> list[list[float]]:
    """Sizes of every row's grid or block: of a column for each axis, or of one with all three."""
    if together in table.columns:
        return [[float(size[:15]) for size in re.findall(r"\d+", text)] for text in table.text(together)]
    sizes: list[list[float]] = np.stack([table.number(f"{axis}{letter}") for letter in "xyz"], axis=1).tolist()
    return sizes


def _gpus(table: Table) -> list[str]:
    """Names in the column Device, such as `NVIDIA H100 80GB HBM3 (0)`."""
    names = {re.sub(r"\s*\(\d+\)$", "", name) for name in table.text(table.find("device"))}
    return sorted(name for name in names if re.search(r"[A-Za-z]", name))


# Per-operator tables: one row per graph node of a model cut to one layer, timed on its own (`models/per_op.parquet`).
#
# Every time holds what passes between its first event and the start of a kernel; a view takes as long without a kernel,
# so the median time of the run's views is taken off. Nodes count as often as their layer repeats.

WORKLOAD: tuple[str, ...] = ("model", "mode", "sequence_length", "batch_size")
"""Columns that tell one run from another on the same device."""
PHASES: tuple[tuple[str, str], ...] = (("forward_s", "fw_ops"), ("backward_s", "bw_ops"), ("accumulate_s", "acc_ops"))
"""Column of seconds, and the column that lists what ran in them."""
VIEWS: tuple[str, ...] = ("expand", "permute", "transpose", "unsqueeze", "view")
"""Calls that the framework dispatches as it does every other, and that launch nothing."""


def read_per_op(path: Path, device: str | None, select: Mapping[str, str] | None = None) -> Trace:
    """Read one run of a table.

    Args:
      path: the file; device: whose rows; None when the file holds one device only.
      select: column -> value, to choose one workload where a device ran several.
    Raises: `InputError` for bad rows, an unknown column or value, or when more or less than one run is left.
    """
    table = read_measurements(path).per_op
    if table is None:
        raise InputError(f"{path}: no table of model nodes; expected the columns of models/per_op.parquet")
    if device is not None:
        table = table[table["device"] == gpu_info(device).name]
    for column, value in (select or {}).items():
        if column not in table:
            raise InputError(f"{path}: no column {column!r} to select by; expected one of {', '.join(WORKLOAD)}")
        table = table[table[column].astype(str) == value]
    runs = table.groupby(["device", *WORKLOAD], sort=False).size().index.tolist()
    if len(runs) != 1:
        shown = "; ".join(" ".join(map(str, run)) for run in runs[:4])
        remaining = f"{len(runs)} runs ({shown}{' ...' if len(runs) > 4 else ''})" if runs else "no run"
        raise InputError(f"{path}: {remaining} of this device and selection; choose one with --select COLUMN=VALUE")
    return trace_of_nodes(table, path.name)


def trace_of_nodes(nodes: pd.DataFrame, source: str) -> Trace:
    """The rows of one run as a trace."""
    overhead_s = event_overhead_s(nodes)
    items: list[Measured] = []
    nothing = 0
    # Models were cut to one layer before they were timed: a node counts as often as its layer repeats.
    for row in nodes.to_dict("records"):
        node: dict[str, Any] = {str(name): value for name, value in row.items()}
        repeat = float(node.get("layer_repeat", 1))
        for column, kernels_column in PHASES:
            measured_s = float(node[column])
            if not measured_s > 0.0:
                continue
            kernels = node_kernels(node.get(kernels_column), node)
            seconds = max(measured_s - overhead_s, 0.0)
            # A node that lists no kernels and takes little more than a view does is one.
            if not kernels and seconds < overhead_s:
                nothing += 1
                continue
            kind = "unknown" if not kernels else "gemm" if FAMILIES[kernels[0].family].matrix else "elementwise"
            phase = column.removesuffix("_s")
            items.append(Measured(f"{node['name']} {phase}", kind, seconds * repeat, repeat, kernels))
    total = sum(item.seconds for item in items)
    note = f"{overhead_s * 1e6:.1f} us of event overhead taken off every node; {nothing} nodes launch nothing"
    return Trace(source, tuple(items), total, total, (note,), tuple(nodes["device"].astype(str).unique()))


def event_overhead_s(nodes: pd.DataFrame) -> float:
    """Median forward time of a view: what a timed node takes before its kernel starts. 0 without a measured view.

    Views are known by the column `fx_target`, or in a table without it by the node's name (`view_3`).
    """
    stems = nodes["name"].astype(str).str.replace(r"_\d+$", "", regex=True)
    called = nodes.get("fx_target", stems)
    views = nodes["forward_s"][called.isin(VIEWS) & (nodes["forward_s"] > 0.0)]
    return float(views.median()) if len(views) else 0.0


def node_kernels(listing: Any, node: Mapping[str, Any]) -> tuple[Kernel, ...]:
    """Kernels of one phase of a node, from the table's own list (JSON: [kind, sizes] each); empty if it has none.

    Raises: `InputError` when the list, or the node's `input_shapes`, is something else.
    """
    if not isinstance(listing, str):
        return ()
    try:
        parsed = (_kernel(kind, sizes, node) for kind, sizes in json.loads(listing))
        kernels = tuple(kernel for kernel in parsed if kernel is not None)
        good = all(0.0 <= size < 1e18 for kernel in kernels for size in kernel.dims.values())
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        good = False
    if not good:
        raise InputError(
            f"node {node.get('name')!r} lists the kernels {listing[:60]!r}, expected JSON with [kind, sizes] of each, "
            'such as [["Linear", [512, 256, 1024]]]; make the table again'
        )
    return kernels


def _kernel(kind: str, sizes: Sequence[Any], node: Mapping[str, Any]) -> Kernel | None:
    if kind == "Linear":
        m, k, n = sizes  # the source's (M, N, K) has N as the contraction
        return Kernel("linear", "linear", {"batch": 1, "m": m, "n": n, "k": k})
    if kind == "BMM":
        batch, m, k, n = sizes
        return Kernel("bmm", "bmm", {"batch": batch, "m": m, "n": n, "k": k})
    if kind == "MEM":
        return _memory([shape for shape in sizes if shape])
    if not kind.startswith("VEC"):
        return None
    op, (rows, cols) = kind[3:], sizes
    if rows * cols <= 1:
        return None
    family, name = {"softmax": ("softmax", "softmax"), "ln": ("norm", "layernorm")}.get(op, ("elementwise", op))
    reads = 1.0
    if op in BINARY_OPS:  # a broadcast or one-element operand is read in part
        inputs = node.get("input_shapes")
        operands = [math.prod(shape) for shape in json.loads(inputs)] if isinstance(inputs, str) else []
        reads = min(max(sum(operands) / (rows * cols), 1.0), 2.0) if isinstance(inputs, str) else 2.0
        if len(operands) == 2 and min(operands) == 1:
            name, reads = f"{op}u", 1.0  # an operator of its own in graphs and sweeps
    if family == "elementwise" and name not in FAMILIES["elementwise"].ops:
        return None
    return Kernel(family, name, {"rows": rows, "cols": cols, "reads": reads, "writes": 1})


def _memory(shapes: Sequence[Sequence[int]]) -> Kernel | None:
    largest = max(shapes, key=math.prod, default=())
    if math.prod(largest) <= 1:
        return None
    passes = sum(math.prod(shape) for shape in shapes) / math.prod(largest)
    dims = {"rows": math.prod(largest[:-1]), "cols": largest[-1], "reads": passes - 1.0, "writes": 1}
    return Kernel("memory", "copy", dims)
