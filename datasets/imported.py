"""Imports of other projects' measurements: what is written of one, and what people are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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


def write_imported(output: Path, tables: Mapping[str, pd.DataFrame], texts: Mapping[str, str]) -> None:
    """Write an import, all or nothing.

    Args:
      output: folder of the measurement schema, new or empty.
      tables: path in it without the suffix, such as `kernels/linear`, and rows; those without rows are left out.
      texts: name and content of other files.
    """
    with atomic_folder(output) as folder:
        for path, table in tables.items():
            if len(table):
                (folder / path).parent.mkdir(exist_ok=True)
                table.reset_index(drop=True).to_parquet(folder / f"{path}.parquet", compression="zstd", index=False)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
