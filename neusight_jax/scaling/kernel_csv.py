"""Kernel tables as CSV: of Nsight Systems (`nsys stats --format csv`) and of rocprof.

A file may hold several reports. Kernels are those of one report a file: of a list of launches (`cuda_gpu_trace`,
rocprof's kernel trace) before sums by name (`cuda_gpu_kern_sum`, rocprof's kernel statistics); all other reports are
left out, and said to be. Times are nanoseconds unless the column says otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.scaling.csv_tables import UNITS, Table, read_tables
from neusight_jax.scaling.fields import launch_of
from neusight_jax.scaling.timeline import LONGEST_S, Account, duration_text
from neusight_jax.scaling.trace import Launch, Measured, Trace, busy_seconds, kernel_of_name
from neusight_jax.scaling.trace_file import content_kind, read_text

EXPECTED = "expected `nsys stats --format csv` of cuda_gpu_trace or cuda_gpu_kern_sum, or rocprof's kernel CSV"

KERNEL_REPORTS: tuple[tuple[str, ...], ...] = (
    ("cuda_gpu_trace", "gputrace"),
    ("cuda_kern_exec_trace", "kernexectrace"),
    ("cuda_gpu_kern_gb_sum", "gpukerngbsum"),
    ("cuda_gpu_kern_sum", "gpukernsum", "kernel_stats"),
    ("cuda_gpu_sum", "gpusum"),
    ("cuda_kern_exec_sum", "kernexecsum"),
)
"""Reports whose rows are kernels, names since and before 2023; the earlier in this list, the more they say."""
_REPORT_OF = {name: names[0] for names in KERNEL_REPORTS for name in names}
_RANK = {names[0]: rank for rank, names in enumerate(KERNEL_REPORTS)}
_NAME = ("kernelname", "name", "operation")
_START = ("kernelstart", "start", "begin", "starttimestamp")
_DURATION = ("kerneldur", "duration")
_END = ("end", "endtimestamp")
_TOTAL = ("totaltime", "totalduration")
_COUNT = ("instances", "calls", "count")
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
    notes += [_left_out(table) for report, table in tables if not report]
    account, rows = Account(), list[_Row]()
    for report, table in chosen:
        _require_times(path, table)
        rows += _rows(report, table, account)
        notes += _missing_share(table)
    if not rows:
        why = f" ({'; '.join(account.notes())})" if account.notes() else ""
        raise InputError(f"{path}: no row has a name and a duration{why}; export the table again")
    summed = any(row[2] is None for row in rows)
    seconds = np.array([row[1] for row in rows])
    if summed:
        busy_s = span_s = float(seconds.sum())
        notes.append("a table of sums: overlap and idle time are unknown")
    else:
        busy_s, span_s = busy_seconds(np.array([row[2] for row in rows], float), seconds)
    gpus = dict.fromkeys(gpu for _, table in chosen for gpu in _gpus(table))
    return Trace(path.name, _items(rows), busy_s, span_s, (*account.notes(), *notes), tuple(gpus))


_Row = tuple[str, float, float | None, float, Launch | None]
"""Name, seconds, start in seconds or None, count, launch."""


def _report(table: Table) -> str:
    """Which report of kernels a table is, by what is said before it or by its columns; "" for none."""
    if table.report in _REPORT_OF or table.report.split(":")[0] in _REPORT_OF:
        return _REPORT_OF[table.report.split(":")[0]]
    if re.fullmatch(
        r"(?:cuda|gpu|osrt|nvtx|um|openmp|vulkan|dx|cudaapi|opengl|mpi|nccl|network|opencl)\w*", table.report
    ):
        return ""
    columns = set(table.columns)
    if {"numcalls", "style", "range", "nvtxrange", "result", "threadname", "tpri"} & columns or not table.find(*_NAME):
        return ""
    if {"kernelname", "kavg"} <= columns:
        return "cuda_kern_exec_sum"
    if {"kernelname", "kerneldur"} <= columns:
        return "cuda_kern_exec_trace"
    if {"category", "operation", "instances"} <= columns:
        return "cuda_gpu_sum"
    if "operation" in columns:
        return ""
    if table.find(*_TOTAL) and table.find("instances", "calls"):
        return "cuda_gpu_kern_gb_sum" if "gridxyz" in columns else "cuda_gpu_kern_sum"
    return "cuda_gpu_trace" if table.find(*_START) and table.find(*_DURATION, *_END) else ""


def _choose(tables: Sequence[tuple[str, Table]]) -> tuple[list[tuple[str, Table]], list[str]]:
    """Tables of the report that says most, each once for a profile; notes on the others."""
    if not tables:
        return [], []
    best = min((report for report, _ in tables), key=_RANK.__getitem__)
    kept: list[tuple[str, Table]] = []
    notes: list[str] = []
    for report, table in tables:
        same = [other for _, other in kept if other.source == table.source and table.source]
        alike = [other for _, other in kept if _total(other) == _total(table) and len(other.rows) == len(table.rows)]
        if report == best and not same and not alike:
            kept.append((report, table))
        else:
            notes.append(f"{_described(table, report)}, left out: it repeats kernels of {best}")
    if len(kept) > 1:
        notes.append(f"{len(kept)} tables of {best}: their kernels are added up")
    return kept, notes


def _total(table: Table) -> float:
    values = [table.seconds(row, table.find(*_TOTAL, *_DURATION, "kavg")) for row in table.rows]
    return math.fsum(value for value in values if value is not None and math.isfinite(value))


def _described(table: Table, report: str = "") -> str:
    name = table.report or report or f"a table of {'/'.join(table.shown[:4])}"
    total = _total(table)
    return f"{name}, {len(table.rows)} rows{f' ({duration_text(total)})' if total > 0.0 else ''}"


def _left_out(table: Table) -> str:
    return f"{_described(table)}, left out: its rows are no kernels"


def _missing_share(table: Table) -> list[str]:
    """A note when the shares that a table of sums gives its rows do not add up to the whole: rows were cut off.

    Shares are rounded to tenths, so that many small kernels may miss some per cent.
    """
    column = table.find("time", "percentage")
    shares = [share for row in table.rows if (share := table.number(row, column)) is not None]
    if not shares or (column == "time" and table.units[column] != "%") or 90.0 <= sum(shares) <= 110.0:
        return []
    return [f"the shares of its rows add up to {sum(shares):.1f} %, not 100: the rest of the run is not in this file"]


def _require_times(path: Path, table: Table) -> None:
    """`InputError` when a table has no column of times, or one in a unit that is none."""
    name = table.find(*_TOTAL) or table.find(*_DURATION) or table.find("kavg")
    start = table.find(*_START)
    if name is None and not (start and table.find(*_END)):
        shown = ", ".join(table.shown[:8])
        raise InputError(f"{path}: no column Duration or Total Time (ns); found {shown}; {EXPECTED}")
    for column in (name, start):
        if column is not None and table.units[column] and table.units[column] not in UNITS:
            shown = table.shown[table.columns[column]]
            raise InputError(f"{path}: the column {shown!r} is in an unknown unit; expected ns, us, ms or s")


def _rows(report: str, table: Table, account: Account) -> list[_Row]:
    """Rows of kernels; what is no kernel, has no name or no time is accounted for."""
    if table.broken:
        account.add("lines that are no rows of their table, left out", count=table.broken)
    rows: list[_Row] = []
    seen: set[tuple[str, ...]] = set()
    name, start = table.find(*_NAME), table.find(*_START)
    for row in table.rows:
        text, seconds = table.text(row, name), _seconds(report, table, row)
        if seconds is None or not 0.0 <= seconds <= LONGEST_S or not text:
            account.add("rows without a name or duration left out")
            continue
        begin = None if _is_sum(report) else table.seconds(row, start)
        if not _is_sum(report) and (begin is None or abs(begin) > 1e3 * LONGEST_S):
            account.add("rows without a start, left out: they cannot be placed", seconds)
            continue
        if not table.report and _HOST_CALL.match(text):
            account.add("rows of host calls, left out: they are no kernels", seconds)
            continue
        if begin is not None and seconds > 0.0 and tuple(row) in seen:
            account.add("rows written twice, counted once", seconds)
            continue
        seen.add(tuple(row))
        if seconds == 0.0:
            account.add("rows of no duration: kept, they add nothing")
        count = table.number(row, table.find(*_COUNT)) if _is_sum(report) else 1.0
        if count is None or not 0.0 < count < 1e15:
            account.add("rows without a number of launches: taken as one launch", seconds)
            count = 1.0
        rows.append((text, seconds, begin, count, _launch(table, row)))
    return rows


def _is_sum(report: str) -> bool:
    return report.endswith("_sum")


def _seconds(report: str, table: Table, row: list[str]) -> float | None:
    """Seconds of a row: of all its launches for a sum."""
    if report == "cuda_kern_exec_sum":
        mean, count = table.seconds(row, "kavg"), table.number(row, "count")
        found = None if mean is None or count is None else mean * count
    elif _is_sum(report):
        found = table.seconds(row, table.find(*_TOTAL))
    elif (duration := table.find(*_DURATION)) is not None:
        found = table.seconds(row, duration)
    else:
        begin, end = table.seconds(row, table.find(*_START)), table.seconds(row, table.find(*_END))
        found = None if begin is None or end is None else end - begin
    return found if found is None or math.isfinite(found) else None


def _launch(table: Table, row: list[str]) -> Launch | None:
    grid, block = _sizes(table, row, "grd", "gridxyz"), _sizes(table, row, "blk", "blockxyz")
    if "workgroupsizex" in table.columns:  # rocprofv3: the grid in threads
        block = [table.number(row, f"workgroupsize{axis}") for axis in "xyz"]
        threads = [table.number(row, f"gridsize{axis}") for axis in "xyz"]
        grid = [one and each and math.ceil(one / each) for one, each in zip(threads, block, strict=True)]
    shared = sum((table.number(row, name) or 0.0) * _BYTES.get(table.units[name], 1.0) for name in _shared(table))
    registers = table.find("regtrd", "registers")
    return launch_of(grid, block, table.number(row, registers), shared)


def _shared(table: Table) -> list[str]:
    return [name for name in ("stcsmem", "dymsmem") if name in table.columns]


def _sizes(table: Table, row: list[str], axis: str, together: str) -> list[float | None]:
    """Sizes of a grid or block: a column for each axis, or one with all three."""
    if together in table.columns:
        return [float(size[:15]) for size in re.findall(r"\d+", table.text(row, together))]
    return [table.number(row, f"{axis}{letter}") for letter in "xyz"] if f"{axis}x" in table.columns else []


def _gpus(table: Table) -> list[str]:
    """Names in the column Device, such as `NVIDIA H100 80GB HBM3 (0)`."""
    column = table.find("device")
    names = {re.sub(r"\s*\(\d+\)$", "", table.text(row, column)) for row in table.rows} if column else set()
    return sorted(name for name in names if re.search(r"[A-Za-z]", name))


def _items(rows: Sequence[_Row]) -> tuple[Measured, ...]:
    together: dict[tuple[str, Launch | None], tuple[float, float]] = {}
    for name, seconds, _, count, launch in rows:
        total, number = together.get((name, launch), (0.0, 0.0))
        together[name, launch] = (total + seconds, number + count)
    return tuple(kernel_of_name(name, *sums, launch) for (name, launch), sums in together.items())
