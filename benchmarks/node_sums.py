"""How far the measured nodes of a run are from the whole-model label of the same run.

    python -m benchmarks.node_sums MEASUREMENTS [DEVICE ...]

A forecast that sums kernels and is right about every one of them is off by this much: the floor of the errors of whole
models. Once as the nodes were timed (`timed_s`), and once less what passes before a kernel starts, as long as a view
takes (7 to 17 us, `nodes_s`); contaminated runs are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError, run_script
from neusight_jax.scaling.tables import WORKLOAD, trace_of_nodes
from neusight_jax.training.data import contaminated
from neusight_jax.training.evaluation.scores import percentiles

KEYS: list[str] = ["device", *WORKLOAD]
"""Columns that tell one run from another."""


def nodes_and_labels(
    measurements: Sequence[Path | str] | Path | str, devices: Sequence[str] | None, what: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Nodes of measured runs, contaminated ones left out, and the labels of eager runs: `KEYS` and label_s.

    Raises: `InputError` that names `what` needs both, where one is missing.
    """
    data = read_measurements(measurements, on_invalid="drop", devices=devices)
    if data.per_op is None or data.end_to_end is None:
        raise InputError(f"{what} needs models/per_op.parquet and models/end_to_end.csv")
    eager = data.end_to_end[data.end_to_end["option"] == ""].rename(columns={"e2e_s": "label_s"})
    return data.per_op[~contaminated(data.per_op)], eager[[*KEYS, "label_s"]]


def node_sums(measurements: Sequence[Path | str] | Path | str, devices: Sequence[str] | None = None) -> pd.DataFrame:
    """One row for every run with nodes and a label: the run, label_s, both sums, and their errors in % (`timed_error`
    and `error`).

    Raises: `InputError` when no run has both.
    """
    nodes, labels = nodes_and_labels(measurements, devices, "the sum of nodes")
    groups = nodes.assign(timed_s=nodes["total_s"] * nodes["layer_repeat"]).groupby(KEYS)
    sums = groups["timed_s"].sum().reset_index()
    sums.insert(len(KEYS), "nodes_s", [trace_of_nodes(part, "").kernel_s for _, part in groups])
    runs = labels.merge(sums, on=KEYS)
    if runs.empty:
        raise InputError("no run of these GPUs has both nodes and a label")
    errors = 100.0 * (runs[["nodes_s", "timed_s"]].div(runs["label_s"], axis=0) - 1.0)
    return runs.assign(error=errors["nodes_s"], timed_error=errors["timed_s"])


def main() -> None:
    """Print every run, and the errors by GPU and of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements")
    parser.add_argument("devices", nargs="*")
    chosen = parser.parse_args()
    runs = node_sums(chosen.measurements, chosen.devices or None)
    sys.stdout.write(runs.round(4).to_string(index=False) + "\n")
    for device, part in [*runs.groupby("device"), ("all", runs)]:
        for column in ("timed_error", "error"):
            errors = percentiles(np.abs(part[column].to_numpy()))
            text = ", ".join(f"{name} {value:.1f}" for name, value in errors.items())
            sys.stdout.write(f"{device}, {len(part)} runs, {column}: {text} %\n")


if __name__ == "__main__":
    run_script(main)
