"""Natural experiments: two real GPUs that differ in few figures. Is the forecast ratio the measured one?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from neusight_jax.datasets import schema
from neusight_jax.datasets.measurements import table_from_frame
from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import canonical_name, catalog_gpu
from neusight_jax.model.latency import predict_kernels
from neusight_jax.model.predictor import Predictor

NOISE = 0.05
"""Measured changes smaller than this have no direction."""
CLEARLY_FASTER = 0.95
"""Measured ratios below this are a clear gain."""


def shared_shapes(frame: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """Rows of kernels measured on both GPUs, one per kernel: those of `first`, with `first_s` and `second_s`.

    Args:
      frame: `Measurements.frame`.
      first, second: devices, by any catalog name; repeated measurements of a kernel count by their median.
    Raises: `InputError` when no kernel was measured on both.
    """
    dims = [dim for dim in schema.FRAME_DIMS if dim in frame.columns]
    keys = ["family", "op", "dtype", *dims]
    sides = [
        frame[frame["device"] == canonical_name(name)].fillna(dict.fromkeys(dims, -1.0)) for name in (first, second)
    ]
    seconds = [side.groupby(keys, observed=True)["latency_s"].median() for side in sides]
    both = sides[0].drop_duplicates(keys).set_index(keys, drop=False)
    both = both.assign(first_s=seconds[0], second_s=seconds[1].reindex(both.index)).reset_index(drop=True)
    both = both[both["second_s"].notna()].reset_index(drop=True)
    if both.empty:
        raise InputError(f"no kernel was measured on both {first} and {second}")
    return both


def natural_experiment(
    predictor: Predictor, frame: pd.DataFrame, first: str, second: str, least_s: float = 0.0
) -> pd.DataFrame:
    """Measured and forecast ratio second / first, by family and in all, on the shapes both GPUs have.

    Both forecasts are from figures alone: give a predictor without a device effect.

    Args:
      predictor, frame, first, second: see `shared_shapes`.
      least_s: kernels that took less on either GPU are left out: what a host takes says nothing of its GPU.
    Returns: one row per family and "all": kernels; measured, forecast: median ratio; error, mean_error: median and mean
      |forecast ratio / measured ratio − 1|; no_change: the median of a forecast of 1; clear: kernels whose measured
      change exceeds `NOISE`; direction: share of those whose forecast change has the same sign; faster, faster_right:
      the same for measured ratios below `CLEARLY_FASTER`.
    """
    both = shared_shapes(frame, first, second)
    both = both[both[["first_s", "second_s"]].min(axis=1) >= least_s].reset_index(drop=True)
    if both.empty:
        raise InputError(f"no kernel took {least_s:g} s or more on both {first} and {second}; give a smaller least_s")
    table = table_from_frame(both)
    forecast = [predict_kernels(predictor, catalog_gpu(name), table) for name in (first, second)]
    ratios = pd.DataFrame({"family": both["family"], "measured": both["second_s"] / both["first_s"]})
    ratios["forecast"] = forecast[1].astype(np.float64) / forecast[0]
    rows = [_row(str(family), part) for family, part in ratios.groupby("family", observed=True)]
    return pd.DataFrame([*rows, _row("all", ratios)])


def _row(family: str, ratios: pd.DataFrame) -> dict[str, object]:
    measured, forecast = ratios["measured"].to_numpy(), ratios["forecast"].to_numpy()
    clear = np.abs(np.log(measured)) > NOISE
    same = np.sign(np.log(forecast[clear])) == np.sign(np.log(measured[clear]))
    error = np.abs(forecast / measured - 1.0)
    faster = measured < CLEARLY_FASTER
    return {
        "family": family,
        "kernels": len(ratios),
        "measured": float(np.median(measured)),
        "forecast": float(np.median(forecast)),
        "error": float(np.median(error)),
        "mean_error": float(np.mean(error)),
        "no_change": float(np.median(np.abs(1.0 / measured - 1.0))),
        "clear": int(clear.sum()),
        "direction": float(same.mean()) if clear.any() else float("nan"),
        "faster": int(faster.sum()),
        "faster_right": float(np.mean(forecast[faster] < 1.0)) if faster.any() else float("nan"),
    }
