"""Visible GPUs, each with a predictor that never saw it: what `identify` and `suggest` are scored on.

P4, P100, V100, T4 and A100 by fits that leave one out at a time (one seed; in-model rows left out too), the H100 by
`fp32-heldout`. Widths of intervals are conformal over the other GPUs' left-out errors, whose fits had this GPU's rows.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import neusight_jax as nj
from neusight_jax.datasets.measurements import Measurements, read_measurements
from neusight_jax.model.checkpoint import load_predictor
from neusight_jax.model.intervals import empty_intervals, gpu_ratios, range_of
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.training.data import Rows, join_rows, model_rows, sweep_rows, thin
from neusight_jax.training.evaluation.protocols import ROWS_PER_DEVICE
from neusight_jax.training.evaluation.systems import fit_tile
from neusight_jax.training.fit import Job, Settings, row_features
from neusight_jax.training.intervals import conformal_interval, left_out_widenings, narrowed
from neusight_jax.training.left_out import fit_left_out, left_out_predictor
from neusight_jax.training.objectives import MixtureObjective, effect_penalties

HELD_OUT = "NVIDIA H100 80GB HBM3"
GPUS = ("Tesla P4", "Tesla P100-PCIE-16GB", "Tesla V100-PCIE-32GB", "Tesla T4", "NVIDIA A100-PCIE-40GB")
FAMILIES = ("linear", "bmm", "elementwise", "softmax", "norm")
SEEDS, POOL = 1, 2000


@dataclass(frozen=True)
class Unseen:
    """A GPU with what it measured and a predictor that did not see it."""

    name: str
    gpu: nj.GPU
    predictor: MixturePredictor
    rows: dict[str, Rows]


def unseen_gpus(folder: Path, kept: Path | None = None) -> tuple[Measurements, list[Unseen]]:
    """The measurements of five GPUs, and all six, at most `POOL` measured kernels of each family.

    Args:
      folder: `fp32` of the measurement schema, with `kernels_models` below it.
      kept: file to keep the fits in, read where it is there; None = nowhere.
    """
    data = read_measurements([folder], devices=GPUS)
    if kept is not None and kept.exists():
        predictors = pickle.loads(kept.read_bytes())
    else:
        predictors = _fitted(data)
        if kept is not None:
            kept.write_bytes(pickle.dumps(predictors))
    gpus = [Unseen(name, data.gpu(name), predictors[name], _pools(data, name, FAMILIES)) for name in GPUS]
    of_models = read_measurements([folder / "kernels_models"], devices=[HELD_OUT])
    rows = _pools(of_models, HELD_OUT, ("linear", "bmm"))
    return data, [*gpus, Unseen(HELD_OUT, of_models.gpu(HELD_OUT), load_predictor("fp32-heldout"), rows)]


def _fitted(data: Measurements) -> dict[str, MixturePredictor]:
    """By GPU, the predictor that did not see it, with intervals."""
    fits, tiles = {}, {}
    for name in FAMILIES:
        rows = join_rows([thin(sweep_rows(data, name, GPUS), ROWS_PER_DEVICE), model_rows(data, name, GPUS)])
        tiles[name] = fit_tile(rows, Job(0))
        kind = MixtureObjective(tiles[name], penalties=effect_penalties(rows))
        fits[name] = fit_left_out(kind, rows, SEEDS, Settings())
    errors = {name: narrowed(part.residuals(), left_out_widenings(part)) for name, part in fits.items()}
    predictors = {}
    for device in GPUS:
        others = {
            name: {other: error for other, error in of_family.items() if other != device}
            for name, of_family in errors.items()
        }
        widths = {name: conformal_interval(of_family).width for name, of_family in others.items()}
        of_fits = {name: part.rows for name, part in fits.items()}
        intervals = replace(
            empty_intervals(dict.fromkeys(FAMILIES, 1)),
            kernels={name: np.array([-width, width], np.float32) for name, width in widths.items()},
            gpu_range={name: _gpu_range(of_family, device) for name, of_family in of_fits.items()},
            shape_range={
                name: range_of(np.asarray(row_features(of_family.without([device]))))
                for name, of_family in of_fits.items()
            },
        )
        predictors[device] = replace(left_out_predictor(fits, tiles, device), intervals=intervals)
    return predictors


def _gpu_range(rows: Rows, device: str) -> np.ndarray:
    return range_of(np.asarray(gpu_ratios(rows.gpus))[[name != device for name in rows.devices]])


def _pools(data: Measurements, device: str, families: tuple[str, ...]) -> dict[str, Rows]:
    return {name: thin(sweep_rows(data, name, [device]), POOL) for name in families}
