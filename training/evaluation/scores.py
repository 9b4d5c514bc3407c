"""Errors of forecasts: of a predictor on measurements, every family on every GPU, and whole models, beside baselines.

An evaluation holds the rows that were scored, tables of their errors, and how people see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from rich.console import Console

from neusight_jax.datasets.measurements import Measurements, read_measurements, table_from_frame
from neusight_jax.datasets.row_checks import OnInvalid
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.model.checkpoint import card_notes, load_card, load_predictor
from neusight_jax.model.intervals import LEVEL, has_intervals
from neusight_jax.model.kernel_intervals import predict_kernel_intervals
from neusight_jax.model.latency import predict_kernels
from neusight_jax.model.predictor import BASELINES as UNFITTED
from neusight_jax.model.predictor import Predictor
from neusight_jax.progress import follow
from neusight_jax.records import Printed
from neusight_jax.training.data import NETWORKS, measured_devices
from neusight_jax.training.evaluation.systems import chosen_baselines, fit_baseline
from neusight_jax.training.whole_models import System, model_scores

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

    kind: ClassVar[str] = "evaluation"
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
        # Repetitions forecast the same rows: what spreads are their means, not the rows.
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


_TITLE = "absolute percentage error; % in their 80 % interval, and its width and score in %"
_NUMBERS: dict[str, str] = {
    **{name: f"{{{name}:.1f}}" for name in ("mean", "median", "p90")},
    **{"in 80 %": "{coverage:.1f}", "width": "{width:.1f}", "interval score": "{interval_score:.1f}"},
}
_MODEL_COLUMNS: dict[str, str] = {
    **{name: f"{{{name}}}" for name in ("system", "device", "model", "mode", "option")},
    **{"batch": "{batch_size}", "seq": "{sequence_length}"},
    **{"measured ms": "{measured_ms:.1f}", "forecast ms": "{forecast_ms:.1f}", "error %": "{error:+.1f}"},
}


def evaluate(
    measurements: Sequence[Path | str],
    checkpoint: str,
    devices: Sequence[str] | None = None,
    baselines: Sequence[str] = (),
    *,
    drop_invalid: bool = False,
    console: Console | None = None,
) -> Evaluation:
    """Score a checkpoint on measurements.

    A GPU the checkpoint was trained on is forecast with its measured effect, any other without. Baselines that need
    fitting are fitted to the measurements of the checkpoint's own GPUs, and scored on the same rows.

    Args:
      measurements: files or folders of the schema; checkpoint: name or path; devices: only these GPUs.
      baselines: names of `systems.BASELINES`, or `all` that can be fitted here; drop_invalid: leave bad rows out.
      console: for progress.
    Raises: `InputError` for anything unreadable or unknown.
    """
    card = load_card(checkpoint)
    plain = load_predictor(checkpoint)
    tuned = {name: load_predictor(checkpoint, name) for name in card.get("device_effects", {})}
    systems: dict[str, System] = {checkpoint: lambda device: tuned.get(device, plain)}
    on_invalid: OnInvalid = "drop" if drop_invalid else "refuse"
    data = read_measurements(measurements, on_invalid=on_invalid, devices=devices)
    names, notes = chosen_baselines(baselines)
    everything, trained_on = data, []
    if not set(names) <= set(UNFITTED):
        everything = data if devices is None else read_measurements(measurements, on_invalid=on_invalid)
        measured = measured_devices(everything)
        trained_on = [name for name in card.get("trained_on", {}).get("devices", ()) if name in measured]
    for name in names:
        if name not in UNFITTED and console is not None:
            console.print(f"fitting {name}", highlight=False)
        systems[name] = _constant(fit_baseline(name, everything, trained_on))
    result = score(data, systems, console)
    return replace(result, notes=(*card_notes(card, checkpoint), *result.notes, *notes))


def score(data: Measurements, systems: dict[str, System], console: Console | None = None) -> Evaluation:
    """Score systems on measurements already read.

    Returns: frames `kernels` (system, device, family, and `scores`), `models` (`model_scores`),
      `models_by_device` (system, option, device, labels ...) and `models_total` (over all devices).
    """
    kernels = scores(_kernel_rows(data, systems, console), ("system", "device", "family"))
    models, notes = model_scores(data.end_to_end, systems, data.gpu, console)
    by_device, total = (
        scores(models, keys, "labels") for keys in (["system", "option", "device"], ["system", "option"])
    )
    frames = {"kernels": kernels, "models": models, "models_by_device": by_device, "models_total": total}
    ordered = kernels.sort_values(["family", "device", "system"])
    summary = pd.concat([frame for frame in (by_device, total.assign(device="all")) if len(models)] or [models])
    in_ms = {f"{name}_ms": 1e3 * models[f"{name}_s"] for name in ("measured", "forecast") if len(models)}
    views = [
        _view("Kernels measured alone", ordered, ("system", "device", "family", "rows")),
        View(models.assign(**in_ms), _MODEL_COLUMNS, "Whole models", 5),
        _view("Whole models", summary, ("system", "option", "device", "labels")),
    ]
    return Evaluation(frames, views, notes=(*data.notes, *notes))


def _view(what: str, frame: pd.DataFrame, keys: Sequence[str]) -> View:
    return View(frame, {**{key: f"{{{key}}}" for key in keys}, **_NUMBERS}, f"{what}: {_TITLE}", 3)


def _constant(predictor: Predictor) -> System:
    return lambda device: predictor


def _kernel_rows(data: Measurements, systems: dict[str, System], console: Console | None = None) -> pd.DataFrame:
    """One row for each measured kernel and system."""
    parts = []
    for (device, family), rows in follow([*data.frame.groupby(["device", "family"])], "kernels", console):
        kernels, gpu = table_from_frame(rows.reset_index(drop=True)), data.gpu(str(device))
        measured_s = rows["latency_s"].to_numpy()
        # A GPU that was measured has a predictor of its own, with its effect.
        for name, system in systems.items():
            predictor = system(str(device))
            forecast_s = predict_kernels(predictor, gpu, kernels, isolated=True)
            low_s = high_s = np.full(len(rows), np.nan)
            if all(has_intervals(predictor, FAMILIES[family_name]) for family_name in kernels.families):
                low_s, high_s = predict_kernel_intervals(predictor, gpu, kernels)
            head = {"system": name, "device": device, "family": family, "measured_s": measured_s}
            part = pd.DataFrame({**head, "forecast_s": forecast_s, "low_s": low_s, "high_s": high_s})
            parts.append(part.assign(error=100.0 * (forecast_s / measured_s - 1.0)))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
