"""Forecasts of training runs on four GPUs of one server against the labels of the NeuSight repository.

    python -m benchmarks.four_gpus MEASUREMENTS_FOLDER

A label has one micro-batch and no optimizer: data, tensor or pipeline parallel over four GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

import neusight_jax as nj

LAYOUTS = {"dp4": {"data": 4}, "tp4": {"tensor": 4}, "pp4_1": {"pipeline": 4}}


def errors(folder: Path) -> pd.DataFrame:
    """One row for each label: measured and forecast seconds, and the error in percent."""
    labels = pd.read_csv(folder / "fp32" / "models" / "end_to_end.csv")
    predictor, rows = nj.load_predictor("tensorcore"), []
    for label in labels[labels["option"].isin(LAYOUTS)].to_dict("records"):
        fields = LAYOUTS[label["option"]]
        layout = nj.Parallelism(**fields, micro_batch_size=label["batch_size"] // fields.get("data", 1))
        job = nj.job_from_config(
            label["model"],
            layout,
            global_batch_size=label["batch_size"],
            sequence_length=label["sequence_length"],
            dtype="fp32",
            optimizer=None,
        )
        step = nj.predict(predictor, nj.load_cluster(f"4x {label['device']}"), job)
        head = {name: label[name] for name in ("device", "model", "option", "batch_size")}
        error = 100.0 * (step.total_s / label["e2e_s"] - 1.0)
        rows.append({**head, "measured_s": label["e2e_s"], "forecast_s": step.total_s, "error": error})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    found = errors(Path(sys.argv[1]))
    print(found.round(4).to_string(index=False))
    print(f"mean {found['error'].abs().mean():.1f} %")
