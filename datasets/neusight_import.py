"""Import of a NeuSight checkout (sitar-lab/NeuSight, MIT): CSV sweeps and device JSONs become the measurement schema.

The layout of that repository changed over time, so files are recognised by content (`neusight_files`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import is_amd
from neusight_jax.datasets.neusight_files import NotASweep, Sweep, read_device, read_sweep
from neusight_jax.datasets.row_checks import GoodRows, OnInvalid, check_rows
from neusight_jax.errors import InputError
from neusight_jax.files import atomic_folder, refuse_existing
from neusight_jax.progress import follow

GPUS_FILE = "gpus.json"
"""Where the device figures found in the tree go, in the output folder: name -> fields of `GPU`, base units."""


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
      output: the folder written.
      files: CSV files rows were taken from.
      rows: rows written, by operator.
      duplicates: exact duplicate rows left out.
      superseded: rows of files of several devices left out because the device's own file has the operator.
      problems: file, row, problem, detail of rows that were dropped.
      unrecognised: CSV and device files that were not understood, each with the reason.
      gpus: devices whose figures were found.
    """

    output: Path
    files: tuple[str, ...]
    rows: dict[str, int]
    duplicates: int
    superseded: int
    problems: pd.DataFrame
    unrecognised: tuple[tuple[str, str], ...]
    gpus: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        dropped = len(self.problems[["file", "row"]].drop_duplicates())
        counts = ", ".join(f"{op} {count}" for op, count in sorted(self.rows.items()))
        out = [f"{self.output}: {sum(self.rows.values())} rows from {len(self.files)} files ({counts})"]
        if self.gpus:
            out.append(f"{GPUS_FILE}: {len(self.gpus)} devices ({', '.join(self.gpus)})")
        if self.duplicates:
            out.append(f"left out: {self.duplicates} exact duplicate rows")
        if self.superseded:
            out.append(f"left out: {self.superseded} rows of merged files whose device has a file of its own")
        if dropped:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.problems["problem"].value_counts().items())
            out.append(f"dropped: {dropped} bad rows ({kinds})")
        out += [f"not recognised: {name}: {reason}" for name, reason in self.unrecognised]
        return out


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
    rows, superseded = _prefer_own_files(sweeps)
    good = _good(rows, checks)
    same = ("device", "op", *schema.DIM_COLUMNS, "latency_s")
    kept = {
        op: frame.drop_duplicates([name for name in same if name in frame], ignore_index=True)
        for op, frame in good.items()
    }
    gpus, bad_devices = _devices(source)
    with atomic_folder(output) as folder:
        for op, frame in kept.items():
            amd = frame["device"].map(is_amd).astype(bool)
            _write(frame[~amd], folder / "kernels" / f"{op}.parquet")
            _write(frame[amd], folder / "kernels_amd" / f"{op}.parquet")
        if gpus:
            (folder / GPUS_FILE).write_text(json.dumps(gpus, indent=2, sort_keys=True) + "\n")
    return ImportReport(
        output=output,
        files=tuple(sweep.file for sweep in sweeps),
        rows={op: len(frame) for op, frame in kept.items()},
        duplicates=sum(len(frame) - len(kept[op]) for op, frame in good.items()),
        superseded=superseded,
        problems=checks.problems(),
        unrecognised=(*unrecognised, *bad_devices),
        gpus=tuple(sorted(gpus)),
    )


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
        for file, group in frame.groupby(level=0, sort=False):
            plain = group.droplevel(0)  # and without columns of other files: blank where they may be absent
            plain = plain[[name for name in plain if name in needed or plain[name].notna().any()]]
            checked = check_rows(plain, str(file))
            checks.take(plain, checked)
            fine.append(group[~checked.bad])
        left = pd.concat(fine)
        if len(left):
            good[str(op)] = _typed(left.reset_index(drop=True).dropna(axis="columns", how="all"), str(op))
    problems = checks.problems()
    if not good:
        raise InputError(f"all {checks.bad} measurement rows are bad; first: {problems.iloc[0]['detail']}")
    return good


def _typed(frame: pd.DataFrame, op: str) -> pd.DataFrame:
    """Dims as whole numbers, latency as float seconds."""
    if op == "linear" and "b" not in frame.columns:
        frame = frame.assign(b=1)
    kinds: dict[str, Any] = dict.fromkeys(("b", *schema.op_columns(op)), "int64")
    kinds |= {name: "Int64" for name in (*schema.GRID_COLUMNS, *schema.BLOCK_COLUMNS) if name in frame.columns}
    return frame.astype({**kinds, "latency_s": "float64"})


def _write(frame: pd.DataFrame, path: Path) -> None:
    if len(frame):
        path.parent.mkdir(exist_ok=True)
        frame.reset_index(drop=True).to_parquet(path, compression="zstd", index=False)


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
