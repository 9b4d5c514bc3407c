"""Entries: predictions of anyone, scored on the rows that the systems of the leaderboard are scored on.

A template lists the rows without their times; an entry is a CSV file with its column `row` and `predicted_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from neusight_jax.datasets import schema
from neusight_jax.datasets.measurements import KERNEL_FOLDERS, Measurements, measured_names, read_measurements
from neusight_jax.datasets.row_checks import numbers
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.training.data import NETWORKS, devices_with, measured_devices, sweep_rows, thin
from neusight_jax.training.evaluation.leaderboard import COLUMNS, END_TO_END, SPLITS, family_means, read_csv
from neusight_jax.training.evaluation.protocol import ROWS_PER_DEVICE, split_rows
from neusight_jax.training.evaluation.result import Evaluation, View, scores

KEY, PREDICTED, MEASURED = "row", "predicted_s", "measured_s"
IN_TRAINING = "checkpoint"
"""The split whose systems have seen the GPUs: every row of a sweep, and whole models."""
WORKLOAD: tuple[str, ...] = ("model", "mode", "batch_size", "sequence_length")
FACTS: tuple[str, ...] = tuple(dict.fromkeys(("device", "family", "op", "dtype", *schema.DIM_COLUMNS, *WORKLOAD)))
"""Columns that say what a row is, named as in the schema; those that an entry keeps have to agree."""
_DETAIL: dict[str, str] = {
    **{"family": "{family}", "GPU": "{device}", "rows": "{rows}"},
    **{name: f"{{{name}:.1f}}" for name in ("mean", "median", "p90")},
}


def public_rows(
    measurements: Sequence[Path | str],
    split: str = "logo",
    devices: Sequence[str] | None = None,
    *,
    board: pd.DataFrame | None = None,
    drop_invalid: bool = False,
) -> pd.DataFrame:
    """The rows of a split: row (file and place in it), what the kernel or model is (`FACTS`), measured_s.

    Args:
      measurements: files or folders of the schema; split: one of `leaderboard.SPLITS`.
      devices: only these GPUs; default: those of the board, where measured, or else all.
      board: rows of the leaderboard (`leaderboard.COLUMNS`); drop_invalid: leave bad rows out.
    Raises: `InputError` for an unknown split, unusable measurements, or two files of one name.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if devices is None and board is not None:
        devices = sorted(measured_names(measurements) & set(board.loc[board["split"] == split, "device"])) or None
    data = read_measurements(measurements, on_invalid="drop" if drop_invalid else "refuse", devices=devices)
    parts = [_sweep(data, family, split) for family in NETWORKS]
    if split == IN_TRAINING and data.end_to_end is not None:
        parts.append(_models(data.end_to_end))
    frame = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    if frame.empty:
        raise InputError(f"split {split} leaves out one GPU after the other; no family was measured on two: give more")
    twice = frame[KEY].duplicated()
    if twice.any():
        raise InputError(f"measurements: {frame.loc[twice, KEY].iloc[0]} is there twice; give one folder of each name")
    facts = [name for name in FACTS if name in frame and frame[name].notna().any()]
    return frame[[KEY, *facts, MEASURED]]


def _sweep(data: Measurements, family: str, split: str) -> pd.DataFrame:
    """Rows of one family: those a protocol scores, or all."""
    present = devices_with(data, family, measured_devices(data))
    frame = data.frame[(data.frame["family"] == family) & data.frame["device"].isin(present)]
    if len(present) < (1 if split == IN_TRAINING else 2):
        return pd.DataFrame()
    if split != IN_TRAINING:
        scored = split_rows(split, thin(sweep_rows(data, family, present), ROWS_PER_DEVICE))[1]
        frame = frame.iloc[np.asarray(scored.batch.row)]
    return pd.concat([_as_measured(rows, Path(str(file))) for file, rows in frame.groupby("file", sort=False)])


def _as_measured(rows: pd.DataFrame, file: Path) -> pd.DataFrame:
    """Rows of one file with the schema's own columns of their sizes."""
    raw = pd.read_csv(file) if file.suffix.lower() == ".csv" else pd.read_parquet(file)
    sizes = raw[[name for name in ("op", *schema.DIM_COLUMNS) if name in raw]].loc[rows["row"]]
    folder = f"{file.parent.name}/" if file.parent.name in KERNEL_FOLDERS else ""
    keys = [f"{folder}{file.name}:{row}" for row in rows["row"]]
    columns: dict[str, Any] = {name: rows[name].to_numpy() for name in ("device", "family", "dtype")}
    columns |= {KEY: keys, MEASURED: rows["latency_s"].to_numpy()}
    return sizes.assign(**columns)


def _models(labels: pd.DataFrame) -> pd.DataFrame:
    """Whole models run eagerly on one GPU."""
    labels = labels[labels["option"] == ""]
    keys = [f"models/end_to_end.csv:{at}" for at in labels.index]
    columns: dict[str, Any] = {KEY: keys, MEASURED: labels["e2e_s"]}
    frame = labels[["device", *WORKLOAD]].assign(family=END_TO_END, **columns)
    return frame.reset_index(drop=True)


def template(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows as they are handed out: no time measured, none predicted yet."""
    return rows.drop(columns=MEASURED).convert_dtypes().assign(**{PREDICTED: ""})


def read_entry(file: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that an entry predicts, with `forecast_s`; families it leaves blank altogether are not among them.

    Args:
      file: CSV with the columns `row` and `predicted_s`, seconds; other columns of a template are checked if there.
      rows: of `public_rows`.
    Raises: `InputError` for an unreadable file, or rows that are unknown, given twice, no time, another kernel's, or
      missing in a family that others are given of.
    """
    entry = read_csv(file, (KEY, PREDICTED), "a filled --template", dtype=str)
    entry = entry[entry[PREDICTED].fillna("").str.strip() != ""]
    if entry.empty:
        raise InputError(f"{file}: nothing is predicted; fill the column {PREDICTED}, seconds")
    public = rows.set_index(KEY)

    def refuse(bad: pd.Series, what: str, expected: str) -> None:
        if bad.any():
            at = entry.index[bad.to_numpy()][0]
            count = f"{bad.sum()} such rows" if bad.sum() > 1 else "the only such row"
            raise InputError(f"{file} line {at + 2}: row {entry.at[at, KEY]!s} {what} ({count}); expected {expected}")

    refuse(~entry[KEY].isin(public.index), "is unknown", "rows of a --template of the same measurements and split")
    refuse(entry[KEY].duplicated(), "is there twice", "each row once")
    seconds = pd.Series(numbers(entry[PREDICTED]), entry.index)
    fine = pd.Series(np.isfinite(seconds.to_numpy()) & (seconds.to_numpy() > 0.0), entry.index)
    shown = entry.loc[~fine, PREDICTED].head(1).to_list()
    refuse(~fine, f"has {PREDICTED} {shown[0] if shown else ''}", "seconds above 0")
    matches = public.loc[entry[KEY]]
    for name in [fact for fact in FACTS if fact in entry and fact in public]:
        refuse(_differs(entry[name], matches[name]), f"is of another {name}", "what their --template says")
    entered = public[public["family"].isin(matches["family"])]
    missing = entered.index.difference(matches.index, sort=False)
    if len(missing):
        raise InputError(
            f"{file}: {len(missing)} of {len(entered)} rows are missing, first {missing[0]}; expected every row of a "
            "family that is entered, or none"
        )
    return matches.assign(forecast_s=seconds.to_numpy())


def _differs(entered: pd.Series, measured: pd.Series) -> pd.Series:
    """Where a text of an entry is not the value of the measurements; blanks of either are passed over."""
    values = measured.set_axis(entered.index)
    if pd.api.types.is_numeric_dtype(values):
        other = ~np.isclose(numbers(entered), values.to_numpy(np.float64), rtol=1e-6)
    else:
        other = (entered != values).to_numpy()
    differing: pd.Series = entered.notna() & values.notna() & other
    return differing


def score_entry(
    file: Path, rows: pd.DataFrame, split: str, board: pd.DataFrame | None = None, name: str | None = None
) -> Evaluation:
    """Scores of an entry, beside the systems of the board on the same families and GPUs.

    Args:
      file, rows: as of `read_entry`; split: that of the rows; board: rows of the leaderboard; name: of the system,
        default: of the file.
    Returns: frames `scores`, in `leaderboard.COLUMNS`, and `board`, the systems it is compared with.
    Raises: as `read_entry`, and for the name of a system that the board has.
    """
    name = name or file.stem
    entry = read_entry(file, rows)
    errors = entry.assign(system=name, split=split, error=100.0 * (entry["forecast_s"] / entry[MEASURED] - 1.0))
    entry_scores = scores(errors, ("split", "system", "family", "device")).assign(sd=0.0)[list(COLUMNS)]
    others = pd.DataFrame({column: [] for column in COLUMNS}) if board is None else board[board["split"] == split]
    if name in set(others["system"]):
        raise InputError(f"system {name!r} is on the leaderboard; give the entry another --name")
    counts = entry_scores.set_index(["family", "device"])["rows"]
    notes = [
        f"{family}: the board has other rows or GPUs, so its numbers are not of the same rows"
        for family, part in others[others["family"].isin(entry_scores["family"])].groupby("family")
        if set(zip(part["device"], part["rows"], strict=True)) != set(counts[family].items())
    ]
    others = others[pd.MultiIndex.from_frame(others[["family", "device"]]).isin(counts.index)]
    means = family_means(
        pd.concat([entry_scores, others], ignore_index=True) if len(others) else entry_scores
    ).reset_index()
    columns = {"system": "{system}", **{column: f"{{{column}:.1f}}" for column in means.columns[1:]}}
    title = f"{SPLITS[split]}: mean absolute percentage error, GPUs count equally"
    return Evaluation(
        {"scores": entry_scores, "board": others},
        (View(means, columns, title), View(entry_scores, _DETAIL, f"{name} by GPU: absolute percentage error", 2)),
        about={"protocol": split, "system": name},
        notes=tuple(notes),
    )
