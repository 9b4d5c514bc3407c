"""Tables in a text that command-line profilers wrote: where each begins, its columns with units, its rows."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

UNITS: dict[str, float] = {
    **dict.fromkeys(("ns", "nsec", "nsecs", "nanosecond", "nanoseconds"), 1e-9),
    **dict.fromkeys(("us", "μs", "µs", "usec", "usecs", "microsecond", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "msec", "msecs", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
}
"""Unit in a column's name -> seconds."""
NAMES: tuple[str, ...] = ("name", "kernelname", "operation", "range", "nvtxrange", "apiname", "apifunction", "event")
"""Columns of which a header has one."""
_DELIMITERS = (",", "\t", ";", "|")
_REPORT = re.compile(r"(?:Processing|Running)\s+\[([^\]]*)\](?:\s+with\s+\[([^\]]*)\])?|^\s*\*\*.*\((\w+)[^)]*\)")
_COLUMN = re.compile(r"^(.*?)\s*(?:[(\[]\s*([^)\]]*?)\s*[)\]])?$")
_GROUPS = {
    ".": re.compile(r"(?<=\d)[,\s'\u00a0\u202f](?=\d{3}(?:\D|$))"),
    ",": re.compile(r"(?<=\d)[.\s'\u00a0\u202f](?=\d{3}(?:\D|$))"),
}
"""By decimal mark, the marks between groups of three digits."""


@dataclass
class Table:
    """A table.

    Attributes:
      report: the script that wrote it, `cuda_gpu_kern_sum`; "" if the text does not say. source: the file it read.
      columns: folded name -> position; units: folded name -> the unit in the header, "" without one.
      shown: the header as written. rows: cells as text.
      broken: lines between its rows that have another number of cells.
    """

    report: str
    source: str
    columns: dict[str, int]
    units: dict[str, str]
    shown: tuple[str, ...]
    rows: list[list[str]] = field(default_factory=list)
    broken: int = 0
    decimal: str = "."

    def find(self, *names: str) -> str | None:
        """The first of these folded names that is a column."""
        return next((name for name in names if name in self.columns), None)

    def text(self, row: list[str], name: str | None) -> str:
        """A cell; "" without the column."""
        return row[self.columns[name]].strip() if name in self.columns else ""

    def number(self, row: list[str], name: str | None) -> float | None:
        """A cell as a finite number, marks between thousands taken out; None if it is none."""
        plain = _GROUPS[self.decimal].sub("", self.text(row, name))
        try:
            value = float(plain.replace(",", ".") if self.decimal == "," else plain)
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    def seconds(self, row: list[str], name: str | None) -> float | None:
        """A cell as seconds, by the unit of its column; without one, nanoseconds. None if it is no number."""
        value = self.number(row, name)
        return None if value is None or name is None else value * UNITS.get(self.units[name] or "ns", 1e-9)


def fold_column(text: str) -> tuple[str, str]:
    """A column's name in lower case without marks, and its unit: `Total Time (ns)` is ("totaltime", "ns")."""
    found = _COLUMN.match(text.strip())
    name, unit = (found[1], found[2] or "") if found else (text, "")
    folded = re.sub(r"[\W_]+", "", name).lower()
    if folded.endswith("ns") and not unit and folded.startswith(("total", "duration", "average", "begin", "end")):
        return folded[:-2], "ns"  # rocprof: TotalDurationNs
    return folded, unit.lower()


def read_tables(text: str) -> list[Table]:
    """All tables of a text, in order; what stands between them is passed over."""
    tables: list[Table] = []
    report, source, delimiter = "", "", ","
    current: Table | None = None
    for line in text.splitlines():
        if not line.strip():
            continue
        named = _REPORT.search(line)
        if named is not None:
            current = None
            script = named[2] or named[3] or named[1] or ""
            report = re.sub(r"\.py.*$", "", script.strip().replace("\\", "/").rsplit("/", 1)[-1].split()[0])
            source = named[1] or source
            continue
        header = _header(line)
        if header is not None:
            delimiter, cells = header
            current = _table(report, source, cells, delimiter)
            tables.append(current)
            report = ""
        elif current is not None:
            cells = _cells(line, delimiter)
            if len(cells) == len(current.shown):
                current.rows.append(cells)
            else:
                current.broken += 1
    for table in tables:
        if delimiter == ";" and _decimal_comma(table.rows):
            table.decimal = ","
    return tables


def _table(report: str, source: str, cells: list[str], delimiter: str) -> Table:
    folded = [fold_column(cell) for cell in cells]
    columns: dict[str, int] = {}
    for at, (name, _) in enumerate(folded):
        columns.setdefault(name, at)
    return Table(report, source, columns, {name: folded[at][1] for name, at in columns.items()}, tuple(cells))


def _header(line: str) -> tuple[str, list[str]] | None:
    """Delimiter and cells of a line that names columns; None for any other."""
    for delimiter in _DELIMITERS:
        if delimiter not in line:
            continue
        cells = [cell.strip() for cell in _cells(line, delimiter)]
        numeric = any(re.fullmatch(r"[-+\d.,\s%]+", cell) for cell in cells if cell)
        if len(cells) > 1 and not numeric and any(fold_column(cell)[0] in NAMES for cell in cells):
            return delimiter, cells
    return None


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        return []


def _decimal_comma(rows: Iterable[list[str]]) -> bool:
    """Whether numbers have a comma before their fraction: some has one that no group of three digits follows."""
    return any(re.fullmatch(r"[-\d.]*,(?:\d{1,2}|\d{4,})|0,\d+", cell.strip()) for row in rows for cell in row)
