"""Kernels of models' shapes on GPUs left out of everything, where measurements keep them in a folder of their own.

    python -m benchmarks.model_shapes FP32_FOLDER [--by architecture] [--seeds 5]

Every family is fitted to `FP32_FOLDER` and its `kernels_models` with each GPU (or architecture) left out, and scored on
that GPU's rows of `kernels_models`: the ensemble's mean absolute percentage error.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

import neusight_jax as nj
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.model.latency import kernel_latency
from neusight_jax.training.data import NETWORKS, devices_with, measured_devices, sweep_rows
from neusight_jax.training.evaluation.few_shot import rows_table
from neusight_jax.training.evaluation.models_protocol import fit_family
from neusight_jax.training.left_out import left_out_jobs, left_out_predictor


def errors(folder: Path, by: str, seeds: int) -> pd.DataFrame:
    """Mean absolute error in percent, a row for each family and GPU left out."""
    shaped = folder / "kernels_models"
    everything, scored = read_measurements([folder, shaped]), read_measurements([shaped])
    names = [name for name in measured_devices(everything) if name in measured_devices(scored)]
    found = []
    for family in NETWORKS:
        present = devices_with(scored, family, names)
        if not left_out_jobs(seeds, present, by):
            continue
        tile, part = fit_family(everything, family, names, by, seeds)
        for device in present:
            own = sweep_rows(scored, family, [device])
            predictor = left_out_predictor({family: part}, {family: tile}, device)
            forecast = kernel_latency(predictor, nj.load_gpu(device), rows_table([own]), isolated=True)[family]
            error = 100.0 * np.abs(np.asarray(forecast, np.float64) / own.seconds - 1.0)
            found.append({"family": family, "device": device, "rows": len(own.seconds), "error": float(error.mean())})
            print(found[-1], flush=True)
    return pd.DataFrame(found)


def main() -> None:
    """Print the table, and the mean over GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--by", choices=("device", "architecture"), default="device")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    table = errors(given.folder, given.by, given.seeds).pivot(index="family", columns="device", values="error")
    print(table.assign(mean=table.mean(axis=1)).round(1).to_string())


if __name__ == "__main__":
    main()
