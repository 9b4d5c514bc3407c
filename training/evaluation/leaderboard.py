"""The leaderboard: systems × families and whole models, one table for each split, from what `evaluate` wrote.

Anyone may enter predictions, scored on the rows that its systems are scored on. A template lists the rows without their
times; an entry is a CSV file with its column `row` and `predicted_s`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from neusight_jax.datasets import schema
from neusight_jax.datasets.measurements import KERNEL_FOLDERS, Measurements, measured_names, read_measurements
from neusight_jax.datasets.row_checks import numbers
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.training.data import NETWORKS, devices_with, measured_devices, sweep_rows, thin
from neusight_jax.training.evaluation.protocols import PROTOCOLS, ROWS_PER_DEVICE, split_rows
from neusight_jax.training.evaluation.scores import END_TO_END, Evaluation, View, family_means, markdown_table, scores

COLUMNS: tuple[str, ...] = ("split", "system", "family", "device", "rows", "mean", "median", "p90", "sd")
"""Columns of the CSV: one row per split, system, family (or whole models) and GPU; errors in percent."""
SPLITS: dict[str, str] = {
    "logo": "A GPU nobody has measured: trained without it",
    "logo-size": "A GPU nobody has measured, and larger kernels than in training",
    "checkpoint": "GPUs in training",
}
HOW: dict[str, str] = {
    "mixture": "this package's form, fitted to the same rows of the other GPUs",
    "fp32-heldout": "the shipped weights, with each GPU's own correction",
    "neusight": "the equations of the paper, fitted to the same rows",
    "gbt": "LightGBM on the inputs of `mixture`, its physical times included",
    "habitat-mlp": "Habitat's network for each family, on sizes and four figures of the GPU",
    "habitat-wave": "Habitat's wave scaling; told the measured time of the very kernel on another GPU",
    "habitat-wave-simplified": "the same in its form for many waves",
    "li": "a line in the work, fitted to relative errors; its slope on a new GPU from a line over the others",
    "li-published": "the same by least squares on seconds, as NeuSight's authors coded it",
    "roofline3": "a roofline with two efficiencies and a launch time, fitted for each family",
    "roofline": "peak FLOP/s or peak bandwidth, the longer time; nothing fitted",
}
"""Settings each system was run with."""
ENTER = resources.files(__package__).joinpath("enter.md").read_text(encoding="utf-8")
"""Instructions for an entry."""


@dataclass(frozen=True)
class Leaderboard:
    """Scores of all splits, see `COLUMNS`, what they were read from, and the seeds of each split that has some."""

    scores: pd.DataFrame
    sources: tuple[str, ...]
    seeds: Mapping[str, int] = field(default_factory=dict)

    def to_markdown(self, csv_name: str, note: str = "") -> str:
        """The page: one table for each split, best system first; the note says what no file knows, e.g. the commit."""
        about = (
            "Mean absolute percentage error; GPUs count equally. Every system forecasts the same rows of a split. Best "
            f"of a column in bold. [{csv_name}]({csv_name}) has every GPU apart, with medians and 90th percentiles."
        )
        lines = ["# Leaderboard", "", about, ""]
        for split in dict.fromkeys(self.scores["split"]):
            part = self.scores[self.scores["split"] == split]
            counts = f"GPUs: {part['device'].nunique()}."
            if split in self.seeds:
                counts += (
                    f" Seeds, where something is random: {self.seeds[split]}; ± is the standard deviation over them."
                )
            lines += [f"## {SPLITS.get(split, split)}", "", counts, "", *_table(part), ""]
        how = [f"- `{name}`: {HOW[name]}." for name in HOW if name in set(self.scores["system"])]
        lines += ["## How each was run", "", *how, ""] if how else []
        lines.append(ENTER)
        lines += ["Made by `neusight-jax leaderboard` from " + ", ".join(self.sources) + "." + (note and f" {note}")]
        return "\n".join(lines) + "\n"


def _best_first(scores: pd.DataFrame) -> pd.DataFrame:
    """`family_means` of whole families and of whole models, the best system first."""
    means = family_means(scores)
    means = means[[name for name in (*NETWORKS, END_TO_END) if name in means]]
    return means.loc[means.mean(axis=1).sort_values().index]


def _table(part: pd.DataFrame) -> list[str]:
    means, spread = _best_first(part), part.groupby(["system", "family"])["sd"].mean().unstack("family")
    best = means.min()

    def cell(system: Any, name: str) -> str:
        value, sd = means.loc[system, name], spread.loc[system, name]
        if pd.isna(value):
            return "-"
        text = f"{value:.1f}" + (f" ± {sd:.1f}" if sd and sd >= 0.05 else "")
        return f"**{text}**" if value == best[name] else text

    cells = [[str(system), *(cell(system, str(name)) for name in means)] for system in means.index]
    return markdown_table(["system", *means.columns], cells)


def read_csv(file: Path | str, columns: Sequence[str], what: str, **options: Any) -> pd.DataFrame:
    """Read a CSV file that has these columns.

    Args:
      columns: that it must have; others stay.
      what: file or table it should be, for messages.
      options: of `pandas.read_csv`.
    Raises: `InputError` for a file that is not readable as CSV, or without one of the columns.
    """
    try:
        frame: pd.DataFrame = pd.read_csv(file, **options)
    except (OSError, ValueError) as error:  # parser and decoding errors are ValueErrors
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"{file}: not readable as CSV ({reason}); expected {what}") from None
    for name in columns:
        if name not in frame:
            raise InputError(f"{file}: no column {name}; expected {', '.join(columns)}, as in {what}")
    return frame


def read_board(file: Path | str) -> pd.DataFrame:
    """The scores of a leaderboard's CSV (`COLUMNS`). Raises: `InputError` for anything else."""
    return read_csv(file, COLUMNS, "the CSV beside a leaderboard page")[list(COLUMNS)]


def read_leaderboard(paths: Sequence[Path | str]) -> Leaderboard:
    """Scores from outputs of `evaluate`: folders of `--protocol ... --output`, or files of `--json`.

    Raises: `InputError` for anything else.
    """
    records: list[Any] = []
    seeds: dict[str, int] = {}
    # Outputs for protocols and for checkpoints are laid out differently; a board has one kind of row for both.
    for path in map(Path, paths):
        file = path / "scores.json" if path.is_dir() else path
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{file}: no such file; expected what `evaluate --output` or `--json` wrote") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: not readable as JSON ({error}); run `evaluate` again") from None
        present = set(content) if isinstance(content, dict) else set()
        if {"protocol", "scores"} <= present:
            records += [_of_split(row, content["protocol"]) for row in content["scores"]]
            seeds |= {content["protocol"]: int(content["seeds"])} if "seeds" in content else {}
        elif {"kernels", "models_by_device"} <= present:
            records += [_of_split(row, "checkpoint", sd=0.0) for row in content["kernels"]]
            eager = [row for row in content["models_by_device"] if row["option"] == "eager"]
            records += [_of_split(row, "checkpoint", family=END_TO_END, sd=0.0, rows=row["labels"]) for row in eager]
        else:
            raise InputError(f"{file}: no scores in it; expected what `evaluate --output` or `--json` wrote")
    for row in records:
        if not isinstance(row, Mapping) or not set(COLUMNS) <= set(row):
            raise InputError(
                "scores without system, family, device and errors; the leaderboard takes those of `evaluate` with "
                f"--protocol {', '.join(PROTOCOLS)}, or of a checkpoint"
            )
    if not records:
        raise InputError("no scores were found; run `neusight-jax evaluate` with --output or --json first")
    return Leaderboard(pd.DataFrame(records)[list(COLUMNS)], tuple(Path(path).name for path in paths), seeds)


def _of_split(row: Any, split: str, **more: Any) -> Any:
    return {"split": split, **more, **row} if isinstance(row, Mapping) else row


# Entries: predictions of anyone.

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
    means = _best_first(
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
