"""How much of a GPU's error do its own kernels teach, whoever learns from them?

    python benchmarks/learners.py DIR FAMILY [--device NAME ...] [--hindsight DRAWS]

`DIR` is a folder of the measurement schema. Every GPU is left out of a fit (five seeds as one), and what that forecast
misses is learned from K of its kernels: by `calibrate`, by gradient-boosted trees (LightGBM) on the coordinates that
`calibrate` uses and the forecast itself, and by trees on what `calibrate` leaves. 10 and 50 kernels are chosen as
`profile --list` chooses, more are drawn at random; all other rows are scored. Mean absolute percentage errors of two
draws, GPUs equally weighted.

With `--hindsight`, `calibrate` alone with that many choices of 10 and 50 kernels, chosen and drawn at random: the mean
over them, and the one that is best for each GPU, picked with all of its errors in view. What no luck beats.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from neusight_jax.calibrated import shape_points
from neusight_jax.errors import InputError, run_script, unknown_name
from neusight_jax.gpu import GPU
from neusight_jax.latency import predict_kernels
from neusight_jax.mixture import MixturePredictor
from neusight_jax.training.calibration import MOST_ROWS, calibrate, prior_of
from neusight_jax.training.conformal import mean_error_percent
from neusight_jax.training.data import NETWORKS, devices_with, sweep_rows, thin
from neusight_jax.training.evaluation.boosting import boosting_library
from neusight_jax.training.evaluation.few_shot import designed_order, device_scores, rows_table
from neusight_jax.training.evaluation.protocol import ROWS_PER_DEVICE, read_for
from neusight_jax.training.evaluation.systems import fit_tile
from neusight_jax.training.fit import Job, settings_for
from neusight_jax.training.kinds import MixtureKind, effect_penalties
from neusight_jax.training.left_out import LeftOut, fit_left_out, left_out_predictor
from neusight_jax.training.rows import Rows

SEEDS, DRAWS = 5, 2
CHOSEN, DRAWN = (10, 50), (500, 2000)


def trees(inputs: np.ndarray, missed: np.ndarray, every: np.ndarray) -> np.ndarray:
    """What trees that learned from a few rows say of all."""
    lightgbm = boosting_library()
    settings = {"objective": "l1", "num_leaves": 8, "learning_rate": 0.05, "num_threads": 2, "verbosity": -1}
    least = {"min_data_in_leaf": max(3, len(missed) // 30), "min_data_in_bin": 1}
    rounds = 300 if len(missed) > 100 else 100
    learned = lightgbm.train({**settings, **least}, lightgbm.Dataset(inputs, missed), num_boost_round=rounds)
    return np.asarray(learned.predict(every))


def unseen(fits: LeftOut, device: str) -> tuple[MixturePredictor, GPU, Rows]:
    """The forecast of a GPU left out, its figures, and its rows."""
    rows = fits.rows
    gpu = jax.tree.map(lambda column: column[rows.devices.index(device)], rows.gpus)
    predictor = left_out_predictor({rows.family.name: fits}, {rows.family.name: fits.kind.tile}, device)
    return predictor, gpu, rows.of_device(device)


def choice_errors(fits: LeftOut, device: str, draw: int) -> list[dict[str, object]]:
    """Errors on one GPU calibrated with one choice of kernels, designed and at random."""
    predictor, gpu, own = unseen(fits, device)
    scores = device_scores(predictor, own, gpu, draw, CHOSEN, prior_of(own.family.network))
    records = [{"kernels": row["kernels"], "choice": row["design"], "error": row["mean"]} for row in scores]
    records.append({"kernels": 0, "choice": "none", "error": scores[0]["before"]})
    return [{**record, "device": device} for record in records]


def device_errors(fits: LeftOut, device: str, draw: int) -> list[dict[str, object]]:
    """Errors on one GPU, by learner and number of kernels."""
    predictor, gpu, own = unseen(fits, device)
    prior, table = prior_of(own.family.network), rows_table([own])
    plain, measured = np.log(predict_kernels(predictor, gpu, table)), np.log(own.seconds)
    shapes = shape_points(own.family, jax.tree.map(jnp.asarray, own.batch))
    inputs = np.column_stack([np.asarray(shapes), plain])
    random = np.random.default_rng([draw, 7])
    chosen = designed_order(predictor, own, gpu, max(CHOSEN), prior, random)
    drawn = random.permutation(len(measured))
    records: list[dict[str, object]] = []
    for count in (*CHOSEN, *DRAWN):
        taken = (chosen if count in CHOSEN else drawn)[:count]
        rest = np.setdiff1d(np.arange(len(measured)), taken)
        said = {"none": plain, "trees": plain + trees(inputs[taken], (measured - plain)[taken], inputs)}
        if count <= MOST_ROWS:
            tuned = calibrate(predictor, gpu, rows_table([own.take(taken)]), own.seconds[taken], prior)
            said["calibrate"] = calibrated = np.log(predict_kernels(tuned, gpu, table))
            left = trees(inputs[taken], (measured - calibrated)[taken], inputs)
            said["calibrate, then trees"] = calibrated + left
        for learner, logs in said.items():
            error = mean_error_percent((measured - logs)[rest])
            records.append({"learner": learner, "device": device, "kernels": count, "error": error})
    return records


def main() -> None:
    """A table: errors by number of kernels, and by learner or choice."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("family")
    parser.add_argument("--device", action="append")
    parser.add_argument("--hindsight", type=int, default=0, metavar="DRAWS")
    given = parser.parse_args()
    if given.family not in NETWORKS:
        raise unknown_name("family", given.family, NETWORKS)
    if not given.hindsight:
        boosting_library()  # said before the fits, not after them
    data, names = read_for("learners", [given.folder], SEEDS, given.device, False)
    present = devices_with(data, given.family, names)
    if len(present) < 2:
        raise InputError(f"{given.family} was measured on {len(present)} of these GPUs; expected at least two")
    rows = thin(sweep_rows(data, given.family, present), ROWS_PER_DEVICE)
    kind = MixtureKind(fit_tile(rows, Job(0)), penalties=effect_penalties(rows))
    fits = fit_left_out(kind, rows, SEEDS, settings_for(rows.family))
    errors, draws = (choice_errors, given.hindsight) if given.hindsight else (device_errors, DRAWS)
    found = pd.DataFrame([one for name in rows.devices for draw in range(draws) for one in errors(fits, name, draw)])
    by = "choice" if given.hindsight else "learner"
    shown = {"mean of the draws": "mean"}
    if given.hindsight:
        shown["best draw of each GPU, in hindsight"] = "min"
    for title, of_draws in shown.items():
        table = found.pivot_table(index=["kernels", by], columns="device", values="error", aggfunc=of_draws)
        print(title)
        print(table.assign(mean=table.mean(axis=1)).round(1).to_string())


if __name__ == "__main__":
    run_script(main)
