"""Folders of measurements as they are written, and what people are told of an import of other projects' ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from neusight_jax.files import atomic_folder


@dataclass(frozen=True)
class ImportReport:
    """Outcome of an import.

    Attributes:
      output: the folder written; source: what its rows are of, in words.
      rows: rows written, by what they are counted by.
      left_out: (part, reason) -> rows left out; the part is one of `rows`, or "" for all together.
      remarks: what else there is to say.
    """

    output: Path
    source: str
    rows: Mapping[str, int]
    left_out: Mapping[tuple[str, str], int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        counts = ", ".join(f"{name} {count}" for name, count in self.rows.items())
        out = [f"{self.output}: {sum(self.rows.values())} rows {self.source} ({counts})"]
        for part in ("", *self.rows):
            reasons = [f"{count} {why}" for (of, why), count in self.left_out.items() if of == part and count]
            if part and reasons:
                reasons = ["; ".join(reasons)]
            out += [f"{part}: left out {why}" if part else f"left out: {why}" for why in reasons]
        return [*out, *self.remarks]


def write_measurements(output: Path, tables: Mapping[str, pd.DataFrame], texts: Mapping[str, str]) -> None:
    """Write a folder of measurements, all or nothing.

    Args:
      output: folder of the measurement schema, new or empty.
      tables: path in it, .csv or .parquet, and rows; those without rows are left out.
      texts: name and content of other files.
    """
    with atomic_folder(output) as folder:
        for path, table in tables.items():
            file = folder / path
            if len(table):
                file.parent.mkdir(exist_ok=True)
                write: Any = table.to_csv if file.suffix == ".csv" else partial(table.to_parquet, compression="zstd")
                write(file, index=False)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
