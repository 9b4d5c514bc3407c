"""Results of evaluations: rows that were scored, tables of their errors, and how people see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType

from neusight_jax.model.intervals import LEVEL
from neusight_jax.records import Printed
from neusight_jax.reports.text import table
from neusight_jax.training.data import NETWORKS

PERCENTILES: tuple[str, ...] = ("mean", "median", "p90")
"""Columns of every table of scores, of absolute percentage errors."""
LONG = "{} > 50 us"
"""Family of kernels that are scored apart where they are long."""
END_TO_END = "end to end"
"""Family of whole models."""
_HELD = ("coverage", "width", "interval_score")


@dataclass(frozen=True)
class View:
    """A table for people.

    Attributes:
      frame: its rows; columns: header -> format of a cell, filled in from a row, such as "{mean:.1f}"; NaN becomes "-".
      title: on a terminal; one without is for the page alone.
      text_columns: columns set to the left, the first of them.
    """

    frame: pd.DataFrame
    columns: Mapping[str, str]
    title: str = ""
    text_columns: int = 1

    def cells(self) -> list[list[str]]:
        """Texts of the cells, row by row."""
        rows = [{str(name): value for name, value in row.items()} for row in self.frame.to_dict("records")]
        texts = ([form.format_map(row) for form in self.columns.values()] for row in rows)
        return [["-" if text == "nan" else text for text in row] for row in texts]


@dataclass(frozen=True)
class Evaluation(Printed):
    """Errors of forecasts.

    Attributes:
      frames: name -> scores, the content of the JSON; columns `PERCENTILES`, and what they are of.
      views: the tables that people see.
      rows: one row for each scored forecast, or kernel with the forecasts of all systems: `rows.csv`.
      about: what was run, the first keys of the JSON; headline: the first line of the page.
      notes: what was left out, and why.
    """

    frames: Mapping[str, pd.DataFrame]
    views: Sequence[View]
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    about: Mapping[str, Any] = field(default_factory=dict)
    headline: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, None for what is not there; the rows are left to `rows`."""
        return {**self.about, **{name: _records(frame) for name, frame in self.frames.items()}, "notes": [*self.notes]}

    def to_markdown(self) -> str:
        """The page: every view as a table, and the notes."""
        lines = [self.headline]
        for view in self.views:
            lines += ["", *markdown_table([*view.columns], view.cells())]
        return "\n".join([*lines, *(f"\nNote: {note}." for note in self.notes)]) + "\n"

    def __rich__(self) -> RenderableType:
        return self.tables()

    def tables(self) -> RenderableType:
        """The views with a title that have rows, and the notes."""
        titled = [view for view in self.views if view.title and len(view.frame)]
        tables = (table(view.title, [*view.columns], view.cells(), view.text_columns) for view in titled)
        return Group(*tables, *(f"note: {note}" for note in self.notes))


def family_means(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean error of systems (rows) in families and whole models (columns), GPUs counted equally."""
    means = scores.groupby(["system", "family"])["mean"].mean().unstack("family")
    labels = (label for name in NETWORKS for label in (name, LONG.format(name)))
    return means[[label for label in (*labels, END_TO_END) if label in means]]


def markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(header)} |", "|---" * len(header) + "|", *(f"| {' | '.join(row)} |" for row in cells)]


def percentiles(errors: np.ndarray) -> dict[str, float]:
    """Mean, median and 90th percentile of absolute percentage errors."""
    return dict(zip(PERCENTILES, map(float, (np.mean(errors), *np.percentile(errors, (50, 90)))), strict=True))


def percentile_line(errors: np.ndarray) -> str:
    """The same for people, e.g. "mean 3.4, median 2.0, p90 8.1 %"."""
    return ", ".join(f"{name} {value:.1f}" for name, value in percentiles(errors).items()) + " %"


def scores(rows: pd.DataFrame, keys: Sequence[str], count: str = "rows", repeat: str = "") -> pd.DataFrame:
    """Percentiles of the absolute `error` of rows with equal keys, in order of appearance.

    Args:
      rows: one row for each forecast: the keys, `error` in percent, signed or not.
      count: column for the number of rows; repeat: column that counts repetitions of the same rows, if any.
    Returns: keys, count, `PERCENTILES`; with bounds `low_s` and `high_s` of an 80 % interval also `coverage`, the
      percentage of rows inside, `width`, the mean width in percent of the forecast (NaN where a bound is), and
      `interval_score`, the same plus ten times what lies outside, lower is better (Gneiting and Raftery, JASA 2007);
      with repetitions their number ("draws" of "draw"), and `sd` of the mean over them.
    """
    if rows.empty:
        return pd.DataFrame(columns=[*keys, count, *PERCENTILES, *_HELD])
    records = []
    for values, part in rows.groupby([*keys], sort=False):
        errors = part["error"].abs()
        means = errors.groupby(part[repeat]).mean() if repeat else errors[:1]
        counts = {count: len(part) // len(means), **({f"{repeat}s": len(means)} if repeat else {})}
        record: dict[str, Any] = {**dict(zip(keys, values, strict=True)), **counts, **percentiles(errors.to_numpy())}
        if repeat:
            record["sd"] = float(means.std(ddof=0))
        elif "low_s" in part:
            record |= _held(*(part[name].to_numpy() for name in ("measured_s", "forecast_s", "low_s", "high_s")))
        records.append(record)
    return pd.DataFrame(records)


def averaged(runs: pd.DataFrame, keys: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Columns of scores averaged over seeds, with `sd` of the mean error over them."""
    groups = runs.groupby([*keys], sort=False)
    return groups[[*columns]].mean().assign(sd=groups["mean"].std(ddof=0)).reset_index()


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain values, None for what is not there."""
    return [
        {str(name): None if value != value else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _held(measured_s: np.ndarray, forecast_s: np.ndarray, low_s: np.ndarray, high_s: np.ndarray) -> dict[str, float]:
    """`_HELD` of intervals, see `scores`."""
    outside_s = np.maximum(low_s - measured_s, 0.0) + np.maximum(measured_s - high_s, 0.0)
    inside = np.where(np.isnan(low_s), np.nan, outside_s == 0.0)
    width_s = high_s - low_s
    figures = inside, width_s / forecast_s, (width_s + 2.0 / (1.0 - LEVEL) * outside_s) / forecast_s
    return {name: float(100.0 * column.mean()) for name, column in zip(_HELD, figures, strict=True)}
