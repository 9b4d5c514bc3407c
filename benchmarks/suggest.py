"""`suggest` on GPUs left out: whole models after ten suggested kernels, and after ten at random.

    python -m benchmarks.suggest FP32_FOLDER [--kept FILE] [--draws 20] [--gpu NAME ...]

Every GPU of `unseen`, with its eager whole-model labels as what is decided upon. In each draw 60 measured kernels of
each family may be taken. Ten are those that narrow the totals most (`narrowing_rows`), chosen before any is measured,
or drawn at random; the predictor is calibrated with them. Mean error of the models in percent.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd

import neusight_jax as nj
from benchmarks.identify import CANDIDATES, KERNELS, padded, taken
from benchmarks.unseen import GPUS, HELD_OUT, Unseen, unseen_gpus
from neusight_jax.datasets.row_checks import MODES
from neusight_jax.errors import run_script
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.model.calibrated import CalibratedPredictor, ShapeEffect, init_shape_effect, shape_coordinates
from neusight_jax.training.calibration import calibrate
from neusight_jax.training.plan import narrowing_rows


def labels_of(folder: Path, device: str) -> tuple[list[Graph], np.ndarray]:
    """Eager whole models of a GPU, and their measured seconds."""
    frame = pd.read_csv(folder / "models" / "end_to_end.csv")
    frame = frame[(frame.device == device) & frame.option.isna()]
    graphs = [
        nj.graph_from_config(row.model, int(row.batch_size), int(row.sequence_length), MODES[row.mode])
        for row in frame.itertuples()
    ]
    return graphs, frame.e2e_s.to_numpy()


def of_one_size(predictor: CalibratedPredictor) -> CalibratedPredictor:
    """The same with as many points for every network, so that all draws share a program."""

    def filled(name: str) -> ShapeEffect:
        bare = init_shape_effect(KERNELS, shape_coordinates(FAMILIES[name]))
        effect = predictor.shapes.get(name, bare)
        more = ((0, KERNELS - len(effect.points)), (0, 0))
        return replace(effect, points=jnp.pad(effect.points, more), weights=jnp.pad(effect.weights, more))

    return replace(predictor, shapes={name: filled(name) for name in predictor.base.families})


def scores(unseen: Unseen, folder: Path, draws: int) -> list[dict[str, Any]]:
    """Errors of the whole models of one GPU, by draw and choice of kernels."""
    graphs, measured_s = labels_of(folder, unseen.name)

    def error(predictor: Any) -> float:
        seconds = np.array([float(nj.latency(predictor, unseen.gpu, graph.kernels)) for graph in graphs])
        return float(100.0 * np.mean(np.abs(seconds / measured_s - 1.0)))

    plain, records = of_one_size(CalibratedPredictor(replace(unseen.predictor, intervals=None))), []
    before = error(plain)
    for draw in range(draws):
        random = np.random.default_rng(draw)
        parts = {
            name: rows.take(np.sort(random.permutation(len(rows.seconds))[:CANDIDATES]))
            for name, rows in unseen.rows.items()
        }
        pool, _ = padded(parts, CANDIDATES, {name: np.arange(len(rows.seconds)) for name, rows in parts.items()})
        choices = {
            "suggested": narrowing_rows(unseen.predictor, unseen.gpu, pool, KERNELS, graphs),
            "random": random.permutation(pool.num_rows)[:KERNELS].tolist(),
        }
        for choice, order in choices.items():
            tuned = calibrate(unseen.predictor, unseen.gpu, *taken(parts, order))
            bare = replace(tuned, base=replace(tuned.base, intervals=None))
            records.append({"GPU": unseen.name, "choice": choice, "before": before, "error": error(of_one_size(bare))})
    return records


def main() -> None:
    """Print errors by GPU, and the mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--gpu", nargs="+", default=[*GPUS, HELD_OUT])
    options = parser.parse_args()
    parts = []
    for unseen in unseen_gpus(options.folder, options.kept)[1]:
        if unseen.name not in options.gpu:
            continue
        parts.append(pd.DataFrame(scores(unseen, options.folder, options.draws)))
        print(
            parts[-1].groupby(["GPU", "before", "choice"]).error.agg(["mean", "std"]).round(2).to_string(), flush=True
        )
    frame = pd.concat(parts)
    by_gpu = frame.groupby(["choice", "GPU"], sort=False).agg({"before": "mean", "error": "mean"})
    print(by_gpu.groupby("choice", sort=False).mean().round(2).to_string())


if __name__ == "__main__":
    run_script(main)
