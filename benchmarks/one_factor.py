"""Whole-model labels of two GPUs: how far they are from being one factor apart.

    python benchmarks/one_factor.py DIR MI100 MI210 [MODELS]

`DIR` is a folder of the measurement schema with `models/end_to_end.csv`. Prints the ratio of every label that both GPUs
have, and what forecasting each GPU as the other one's label times one factor misses, with the factor that misses least,
chosen in hindsight. `MODELS`, a folder that `evaluate --protocol logo-models` wrote, adds what the forecasts of the
protocol miss on the same labels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError, run_script
from neusight_jax.gpu_catalog import gpu_info
from neusight_jax.scaling.per_op import WORKLOAD
from neusight_jax.training.evaluation.scores import percentile_line, protocol_rows

FACTORS = np.geomspace(0.25, 4.0, 4001)


def errors(forecast: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Absolute percentage errors."""
    return 100.0 * np.abs(forecast / measured - 1.0)


def main(folder: str, first: str, second: str, models: str | None = None) -> None:
    """The ratios, the errors of the best factor, and those of a protocol's forecasts."""
    names = [gpu_info(name).name for name in (first, second)]
    labels = read_measurements([Path(folder)], devices=names).end_to_end
    if labels is None:
        raise InputError(f"{folder} has no models/end_to_end.csv; one factor needs labels of whole models")
    eager = labels[labels["option"] == ""]
    both = eager.pivot_table(index=list(WORKLOAD), columns="device", values="e2e_s").dropna()
    if both.shape[1] < 2 or not len(both):
        raise InputError(f"{first} and {second} have no label of the same run; expected at least one")
    one, other = (both[name].to_numpy() for name in names)
    print((both[names[1]] / both[names[0]]).rename(f"{second} over {first}").round(3).to_string())
    missed = [np.concatenate([errors(one * factor, other), errors(other / factor, one)]) for factor in FACTORS]
    best = int(np.argmin([each.mean() for each in missed]))
    print(f"one factor, {FACTORS[best]:.3f}, {2 * len(both)} labels: {percentile_line(missed[best])}")
    if models is not None:
        rows = protocol_rows(models)
        if "option" not in rows:
            raise InputError(f"{models} holds no whole models; expected what `evaluate --protocol logo-models` wrote")
        wanted = (rows["system"] == "mixture") & (rows["option"] == "eager") & rows["device"].isin(names)
        rows = rows[wanted].set_index(list(WORKLOAD))
        forecasts = rows["error"].abs()[rows.index.isin(both.index)].to_numpy()
        print(f"forecasts, {len(forecasts)} labels: {percentile_line(forecasts)}")


if __name__ == "__main__":
    run_script(lambda: main(*sys.argv[1:]))
