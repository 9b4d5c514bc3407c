"""Tables in a text that command-line profilers wrote: where each begins, its columns with units, its rows."""

from __future__ import annotations

import csv
import functools
import math
import re
from dataclasses import dataclass, field

import pandas as pd

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
        """What stands before a number's fraction; some have a comma where cells are cut at semicolons."""
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
    found = _COLUMN.match(text.strip())
    name, unit = (found[1], found[2] or "") if found else (text, "")
    folded = re.sub(r"[\W_]+", "", name).lower()
    if folded.endswith("ns") and not unit and folded.startswith(("total", "duration", "average", "begin", "end")):
        return folded[:-2], "ns"  # rocprof: TotalDurationNs
    return folded, unit.lower()


def read_tables(text: str) -> list[Table]:
    """All tables of a text, in order; what stands between them is passed over."""
    tables: list[Table] = []
    report, source, inside = "", "", False
    for line in filter(str.strip, text.splitlines()):
        if named := _REPORT.search(line):
            script = named[2] or named[3] or named[1] or ""
            report = re.sub(r"\.py.*$", "", script.strip().replace("\\", "/").rsplit("/", 1)[-1].split()[0])
            source, inside = named[1] or source, False
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
