"""Whole models of measurements, forecast by the systems that are scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from neusight_jax.datasets.row_checks import MODES
from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.traced.source_file import is_source
from neusight_jax.hardware.files import load_gpu
from neusight_jax.hardware.gpu import GPU
from neusight_jax.model.latency import latency, uncovered
from neusight_jax.model.predictor import Predictor
from neusight_jax.prediction import predict
from neusight_jax.progress import follow

OPTIONS: dict[str, bool] = {"": False, "fusion": True}
"""Options of whole-model labels that can be forecast, and whether they are fused; others need several GPUs."""

System = Callable[[str], Predictor]
"""System that is scored: device name -> the predictor used for it."""


def model_scores(
    labels: pd.DataFrame | None,
    systems: dict[str, System],
    gpu_of: Callable[[str], GPU] = load_gpu,
    console: Console | None = None,
) -> tuple[pd.DataFrame, list[str]]:
    """Whole-model labels forecast by every system, and notes on labels left out.

    Args:
      labels: rows of `end_to_end.csv`; systems: what to score; gpu_of: figures of a device, by name; console: for
        progress.
    Returns: system, device, model, mode, batch_size, sequence_length, option, measured_s, forecast_s, error (percent,
      signed), low_s, high_s (NaN of a system without intervals).
    """
    records: list[dict[str, Any]] = []
    graphs: dict[tuple[Any, ...], Graph] = {}
    several_gpus, unknown, sources = Counter[str](), Counter[str](), 0
    # A label that cannot be forecast is counted by its reason, so that the notes say what the scores leave out.
    for row in follow([] if labels is None else labels.to_dict("records"), "models", console):
        if row["option"] not in OPTIONS:
            several_gpus[row["option"]] += 1
            continue
        if is_source(str(row["model"])):
            sources += 1
            continue
        workload = (row["model"], int(row["batch_size"]), int(row["sequence_length"]), MODES[row["mode"]])
        key = (*workload, row["option"])
        if key not in graphs:
            graphs[key] = graph_from_config(*workload, fused=OPTIONS[row["option"]])
        gpu, predictors = gpu_of(row["device"]), {name: system(row["device"]) for name, system in systems.items()}
        missing = [
            f"{name or 'the predictor'} was not trained on {family}"
            for name, predictor in predictors.items()
            for family in uncovered(predictor, graphs[key].kernels)
        ]
        if missing:
            unknown[missing[0]] += 1
            continue
        head = {name: row[name] for name in ("device", "model", "mode", "batch_size", "sequence_length")}
        head |= {"option": row["option"] or "eager", "measured_s": row["e2e_s"]}
        for name, predictor in predictors.items():
            seconds, bounds = _model_seconds(predictor, gpu, graphs[key])
            error = 100.0 * (seconds / row["e2e_s"] - 1.0)
            records.append({"system": name, **head, "forecast_s": seconds, "error": error, **bounds})
    notes = [f"{count} labels of option {name!r} left out: several GPUs" for name, count in several_gpus.items()]
    notes += [f"{count} labels left out: {why}" for why, count in unknown.items()]
    if sources:
        notes.append(f"{sources} labels of functions in Python files left out: forecast them with `predict`")
    return pd.DataFrame(records), notes


def _model_seconds(predictor: Predictor, gpu: GPU, graph: Graph) -> tuple[float, dict[str, float]]:
    """Seconds of a model and the bounds of their 80 % interval as `predict` says it; NaN of a predictor without."""
    if getattr(predictor, "intervals", None) is None:
        return float(latency(predictor, gpu, graph.kernels)), {"low_s": np.nan, "high_s": np.nan}
    forecast = predict(predictor, gpu, graph)
    low_s, high_s = forecast.interval_s or (np.nan, np.nan)
    return forecast.total_s, {"low_s": low_s, "high_s": high_s}
