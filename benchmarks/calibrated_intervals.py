"""Intervals of a GPU that was calibrated with a few kernels: how they hold on its other kernels.

    python benchmarks/calibrated_intervals.py DIR [--device NAME ...]

`DIR` is a folder of the measurement schema. Every GPU is left out of the fits (two seeds as one), its interval made of
the errors of the other GPUs left out, and calibrated with K kernels chosen as `profile --list` chooses (four draws).
Coverage of its other rows by the interval before and after, mean over GPUs (least of a GPU), in percent, and the
interval score (`intervals.interval_score`).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pandas as pd

from neusight_jax.errors import run_script
from neusight_jax.model.intervals import empty_intervals, gpu_ratios, kernel_bounds, range_of
from neusight_jax.model.latency import predict_kernels
from neusight_jax.training.calibration import calibrate
from neusight_jax.training.data import NETWORKS, Rows, devices_with, sweep_rows, thin
from neusight_jax.training.evaluation.protocols import ROWS_PER_DEVICE, designed_order, read_for, rows_table
from neusight_jax.training.evaluation.systems import fit_tile
from neusight_jax.training.fit import Job, settings_for
from neusight_jax.training.intervals import conformal_interval, interval_score, left_out_widenings, narrowed
from neusight_jax.training.left_out import fit_left_out, left_out_predictor
from neusight_jax.training.objectives import MixtureObjective, effect_penalties
from neusight_jax.training.prior import prior_of

SEEDS, DRAWS = 2, 4
COUNTS = (4, 10, 50, 200)


def family_scores(rows: Rows) -> list[dict[str, object]]:
    """Coverage and score of every GPU and draw, before and after."""
    kind = MixtureObjective(fit_tile(rows, Job(0)), penalties=effect_penalties(rows))
    fits = fit_left_out(kind, rows, SEEDS, settings_for(rows.family))
    name, ratios, errors = rows.family.name, np.asarray(gpu_ratios(rows.gpus)), fits.residuals()
    wider = left_out_widenings(fits)
    records = []
    for at, device in enumerate(rows.devices):
        others = {other: error for other, error in errors.items() if other != device}
        width, apart = conformal_interval(narrowed(others, wider)).width, np.arange(len(rows.devices)) != at
        intervals = replace(
            empty_intervals({name: 1}),
            kernels={name: np.array([-width, width], np.float32)},
            gpu_range={name: range_of(ratios[apart])},
        )
        bare = left_out_predictor({name: fits}, {name: kind.tile}, device)
        predictor = replace(bare, intervals=intervals)
        own, gpu = rows.of_device(device), jax.tree.map(lambda column, at=at: column[at], rows.gpus)
        machine, every, prior = wider[device], rows_table([own]), prior_of(name)
        plain = np.log(predict_kernels(predictor, gpu, every))
        for draw in range(DRAWS):
            order = designed_order(predictor, own, gpu, max(COUNTS), prior, np.random.default_rng([draw, 7]))
            for count in COUNTS:
                taken = order[:count]
                tuned = calibrate(predictor, gpu, rows_table([own.take(taken)]), own.seconds[taken])
                assert tuned.intervals is not None
                after = float(kernel_bounds(tuned.intervals, name, gpu)[1])
                rest = np.setdiff1d(np.arange(len(own.seconds)), taken)
                logs = np.log(predict_kernels(tuned, gpu, every))
                for when, log, half in (("before", plain, width * machine), ("after", logs, after * machine)):
                    inside, score = interval_score((np.log(own.seconds) - log)[rest], -half, half)
                    head = {"family": name, "device": device, "kernels": count, "when": when}
                    records.append({**head, "inside": 100 * inside, "half": half, "score": score})
    return records


def main() -> None:
    """A table of all families, by number of kernels."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", action="append")
    given = parser.parse_args()
    data, names = read_for("calibrated_intervals", [given.folder], SEEDS, given.device, False)
    records: list[dict[str, object]] = []
    for family in NETWORKS:
        present = devices_with(data, family, names)
        if len(present) > 2:
            records += family_scores(thin(sweep_rows(data, family, present), ROWS_PER_DEVICE))
    keys = ["family", "kernels", "when"]
    by_device = pd.DataFrame(records).groupby([*keys, "device"], sort=False)[["inside", "half", "score"]].mean()
    table = by_device.groupby(keys, sort=False).mean()
    table["least"] = by_device["inside"].groupby(keys, sort=False).min()
    print(table.round({"inside": 0, "half": 2, "score": 2, "least": 0}).to_string())


if __name__ == "__main__":
    run_script(main)
