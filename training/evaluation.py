"""Errors of a predictor on measurements: every family on every GPU, and whole models, beside baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Console, Group, RenderableType

from neusight_jax.baselines import BASELINES as UNFITTED
from neusight_jax.checkpoint import load_card, load_predictor
from neusight_jax.datasets.measurements import Measurements, OnInvalid, read_measurements, table_from_frame
from neusight_jax.errors import InputError
from neusight_jax.forecast import predict
from neusight_jax.gpu import GPU
from neusight_jax.gpu_file import load_gpu
from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.graph.traced.source_file import is_source
from neusight_jax.intervals import predict_kernel_intervals
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.latency import latency, predict_kernels, uncovered
from neusight_jax.progress import follow
from neusight_jax.report import table
from neusight_jax.terms import Predictor
from neusight_jax.training.data import measured_devices
from neusight_jax.training.systems import chosen_baselines, fit_baseline
from neusight_jax.trust import has_intervals

if TYPE_CHECKING:
    from neusight_jax.graph.graph import Graph

MODES: dict[str, str] = {"inf": "inference", "train": "training", "inference": "inference", "training": "training"}
"""Spellings of the mode in measurement files."""
OPTIONS: dict[str, bool] = {"": False, "fusion": True}
"""Options of whole-model labels that can be forecast, and whether they are fused; others need several GPUs."""

System = Callable[[str], Predictor]
"""What is scored: device name -> the predictor used for it."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one or more systems on the same rows. Errors are absolute percentages.

    Of a system that carries intervals also `coverage`, the percentage of rows inside their 80 % interval, and `width`,
    the mean width of the intervals in percent of the forecast; NaN of others (null in JSON).

    Attributes:
      kernels: system, device, family, rows, mean, median, p90, coverage, width.
      models: system, device, model, mode, batch_size, sequence_length, option, measured_s, forecast_s, error (signed),
        low_s, high_s.
      notes: what was left out, and why.
    """

    kernels: pd.DataFrame
    models: pd.DataFrame
    notes: tuple[str, ...] = ()

    def models_by_device(self) -> pd.DataFrame:
        """Mean, median and p90 of the whole-model errors: system, device, option, labels, mean, median, p90, coverage,
        width."""
        return _summed(self.models, ["system", "option", "device"])

    def models_total(self) -> pd.DataFrame:
        """The same over all devices."""
        return _summed(self.models, ["system", "option"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        frames = {
            "kernels": self.kernels,
            "models": self.models,
            "models_by_device": self.models_by_device(),
            "models_total": self.models_total(),
        }
        return {**{name: _records(frame) for name, frame in frames.items()}, "notes": list(self.notes)}

    def tables(self) -> RenderableType:
        """Tables for people."""
        parts: list[RenderableType] = []
        if len(self.kernels):
            parts.append(_kernel_table(self.kernels))
        if len(self.models):
            parts += [_model_table(self.models), _summary_table(self.models_by_device(), self.models_total())]
        return Group(*parts, *(f"note: {note}" for note in self.notes))


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
    effects = load_card(checkpoint).get("device_effects", {})
    plain = load_predictor(checkpoint)
    tuned = {name: load_predictor(checkpoint, name) for name in effects}
    systems: dict[str, System] = {checkpoint: lambda device: tuned.get(device, plain)}
    on_invalid: OnInvalid = "drop" if drop_invalid else "refuse"
    data = read_measurements(measurements, on_invalid=on_invalid, devices=devices)
    names, notes = chosen_baselines(baselines)
    console = console or Console(quiet=True)
    if all(name in UNFITTED for name in names):
        everything, known = data, []
    else:
        everything = data if devices is None else read_measurements(measurements, on_invalid=on_invalid)
        measured = measured_devices(everything)
        known = [name for name in load_card(checkpoint).get("trained_on", {}).get("devices", ()) if name in measured]
    for name in names:
        if name not in UNFITTED:
            console.print(f"fitting {name}", highlight=False)
        systems[name] = _constant(fit_baseline(name, everything, known))
    found = score(data, systems, console)
    return replace(found, notes=(*found.notes, *notes))


def score(data: Measurements, systems: dict[str, System], console: Console | None = None) -> Evaluation:
    """Score systems on measurements already read."""
    kernels = _kernel_scores(data, systems, console)
    models, notes = model_scores(data.end_to_end, systems, data.gpu, console)
    return Evaluation(kernels, models, (*data.notes, *notes))


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain values, None for what is not there."""
    return [
        {str(name): None if value != value else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _held(measured_s: np.ndarray, forecast_s: np.ndarray, low_s: np.ndarray, high_s: np.ndarray) -> dict[str, float]:
    """`coverage` and `width` of intervals, see `Evaluation`; NaN for bounds that are."""
    inside = np.where(np.isnan(low_s), np.nan, (low_s <= measured_s) & (measured_s <= high_s))
    return {"coverage": float(100.0 * inside.mean()), "width": float(100.0 * ((high_s - low_s) / forecast_s).mean())}


def percentiles(errors: np.ndarray) -> dict[str, float]:
    """Mean, median and 90th percentile of absolute percentage errors."""
    return {
        "mean": float(np.mean(errors)),
        "median": float(np.median(errors)),
        "p90": float(np.percentile(errors, 90)),
    }


def percentile_line(errors: np.ndarray) -> str:
    """The same for people, e.g. "mean 3.4, median 2.0, p90 8.1 %"."""
    return ", ".join(f"{name} {value:.1f}" for name, value in percentiles(errors).items()) + " %"


def protocol_rows(folder: Path | str) -> pd.DataFrame:
    """What `evaluate --protocol ... --output` wrote into a folder's rows.csv.

    Raises: `InputError` for a folder without one that can be read.
    """
    file = Path(folder) / "rows.csv"
    try:
        return pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not what `evaluate --protocol ... --output` wrote ({error})") from None


def _constant(predictor: Predictor) -> System:
    return lambda device: predictor


def _kernel_scores(data: Measurements, systems: dict[str, System], console: Console | None = None) -> pd.DataFrame:
    records = []
    groups = list(data.frame.groupby(["device", "family"], sort=True))
    for (device, family), rows in follow(groups, "kernels", console):
        kernels, gpu = table_from_frame(rows.reset_index(drop=True)), data.gpu(str(device))
        measured = rows["latency_s"].to_numpy()
        for name, system in systems.items():
            predictor = system(str(device))
            forecast = predict_kernels(predictor, gpu, kernels, isolated=True)
            errors = 100.0 * np.abs(forecast / measured - 1.0)
            low = high = np.full(len(rows), np.nan)
            if all(has_intervals(predictor, FAMILIES[each]) for each in kernels.families):
                low, high = predict_kernel_intervals(predictor, gpu, kernels)
            head = {"system": name, "device": device, "family": family, "rows": len(rows)}
            records.append({**head, **percentiles(errors), **_held(measured, forecast, low, high)})
    return pd.DataFrame(records)


def model_scores(
    labels: pd.DataFrame | None,
    systems: dict[str, System],
    gpu_of: Callable[[str], GPU] = load_gpu,
    console: Console | None = None,
) -> tuple[pd.DataFrame, list[str]]:
    """Whole-model labels forecast by every system (`Evaluation.models`), and notes on labels left out.

    Args:
      labels: rows of `end_to_end.csv`; systems: what to score; gpu_of: figures of a device, by name; console: for
        progress.
    """
    records: list[dict[str, Any]] = []
    graphs: dict[tuple[Any, ...], Graph] = {}
    left_out: dict[str, int] = {}
    unknown: dict[str, int] = {}
    sources = 0
    for row in follow([] if labels is None else labels.to_dict("records"), "models", console):
        if row["option"] not in OPTIONS:
            left_out[row["option"]] = left_out.get(row["option"], 0) + 1
            continue
        if is_source(str(row["model"])):
            sources += 1
            continue
        workload = (row["model"], int(row["batch_size"]), int(row["sequence_length"]), MODES[row["mode"]])
        key = (*workload, row["option"])
        if key not in graphs:
            graphs[key] = graph_from_config(*workload, fused=OPTIONS[row["option"]])
        gpu, kernels = gpu_of(row["device"]), graphs[key].kernels
        predictors = {name: system(row["device"]) for name, system in systems.items()}
        missing = [
            f"{name or 'the predictor'} was not trained on {family}"
            for name, predictor in predictors.items()
            for family in uncovered(predictor, kernels)
        ]
        if missing:
            unknown[missing[0]] = unknown.get(missing[0], 0) + 1
            continue
        for name, predictor in predictors.items():
            seconds, (low_s, high_s) = _model_seconds(predictor, gpu, graphs[key])
            records.append(
                {
                    "system": name,
                    **{column: row[column] for column in ("device", "model", "mode", "batch_size", "sequence_length")},
                    "option": row["option"] or "eager",
                    "measured_s": row["e2e_s"],
                    "forecast_s": seconds,
                    "error": 100.0 * (seconds / row["e2e_s"] - 1.0),
                    "low_s": low_s,
                    "high_s": high_s,
                }
            )
    notes = [f"{count} labels of option {name!r} left out: several GPUs" for name, count in left_out.items()]
    notes += [f"{count} labels left out: {why}" for why, count in unknown.items()]
    if sources:
        notes.append(f"{sources} labels of functions in Python files left out: forecast them with `predict`")
    return pd.DataFrame(records), notes


def _model_seconds(predictor: Predictor, gpu: GPU, graph: Graph) -> tuple[float, tuple[float, float]]:
    """Seconds of a model and their 80 % interval as `predict` says it; NaN bounds of a predictor without."""
    if getattr(predictor, "trust", None) is None:
        return float(latency(predictor, gpu, graph.kernels)), (np.nan, np.nan)
    forecast = predict(predictor, gpu, graph)
    return forecast.total_s, forecast.interval_s or (np.nan, np.nan)


def _summed(models: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    if models.empty:
        return pd.DataFrame(columns=[*keys, "labels", "mean", "median", "p90", "coverage", "width"])
    records = []
    for values, part in models.groupby(keys, sort=False):
        errors = part["error"].abs().to_numpy()
        held = _held(*(part[name].to_numpy() for name in ("measured_s", "forecast_s", "low_s", "high_s")))
        head = {**dict(zip(keys, values, strict=True)), "labels": len(part)}
        records.append({**head, **percentiles(errors), **held})
    return pd.DataFrame(records)


SCORES: dict[str, str] = {"mean": "mean", "median": "median", "p90": "p90", "coverage": "in 80 %", "width": "width"}
"""Columns of tables: the key, and what it is called."""


def _numbers(row: Any) -> list[str]:
    return ["-" if np.isnan(row[name]) else f"{row[name]:.1f}" for name in SCORES]


def _kernel_table(kernels: pd.DataFrame) -> RenderableType:
    rows = [
        [row["system"], row["device"], row["family"], f"{row['rows']}", *_numbers(row)]
        for row in kernels.sort_values(["family", "device", "system"]).to_dict("records")
    ]
    header = ["system", "device", "family", "rows", *SCORES.values()]
    return table(f"Kernels measured alone: {_TITLE}", header, rows, text_columns=3)


_TITLE = "absolute percentage error; % in their 80 % interval, and its width in %"


def _model_table(models: pd.DataFrame) -> RenderableType:
    rows = [
        [
            *(str(row[name]) for name in ("system", "device", "model", "mode", "option")),
            *(f"{row[name]}" for name in ("batch_size", "sequence_length")),
            *(f"{row[name] * 1e3:.1f}" for name in ("measured_s", "forecast_s")),
            f"{row['error']:+.1f}",
        ]
        for row in models.to_dict("records")
    ]
    header = ["system", "device", "model", "mode", "option", "batch", "seq", "measured ms", "forecast ms", "error %"]
    return table("Whole models", header, rows, text_columns=5)


def _summary_table(by_device: pd.DataFrame, total: pd.DataFrame) -> RenderableType:
    rows = [
        [row["system"], row["option"], row.get("device", "all"), f"{row['labels']}", *_numbers(row)]
        for row in [*by_device.to_dict("records"), *total.to_dict("records")]
    ]
    header = ["system", "option", "device", "labels", *SCORES.values()]
    return table(f"Whole models: {_TITLE}", header, rows, text_columns=3)
