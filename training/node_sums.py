"""How far the measured nodes of a run are from the whole-model label of the same run.

    python -m neusight_jax.training.node_sums MEASUREMENTS [DEVICE ...]

A forecast that sums kernels and is right about every one of them is off by this much: the floor of the errors of whole
models. Event overhead is taken off every node, once as much as nodes without a tensor take (5 to 7 us, `nodes_s`) and
once as much as views do (7 to 13 us, `least_s`); contaminated runs are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError
from neusight_jax.gpu_catalog import gpu_info
from neusight_jax.scaling.per_op import PHASES, WORKLOAD, event_overhead_s, trace_of_nodes
from neusight_jax.training.data import contaminated
from neusight_jax.training.evaluation import percentiles

KEYS: tuple[str, ...] = ("device", *WORKLOAD)
VIEWS: tuple[str, ...] = ("size", "view")
"""Calls that launch nothing."""


def node_sums(measurements: Sequence[Path | str] | Path | str, devices: Sequence[str] | None = None) -> pd.DataFrame:
    """One row for every run with nodes and a label: the run, label_s, both sums, and their errors in %.

    Raises: `InputError` when no run has both.
    """
    data = read_measurements(measurements, on_invalid="drop", devices=devices)
    if data.per_op is None or data.end_to_end is None:
        raise InputError("sums of nodes need models/per_op.parquet and models/end_to_end.csv")
    nodes = data.per_op[~contaminated(data.per_op)]
    totals = [
        {
            **dict(zip(KEYS, key, strict=True)),
            "nodes_s": trace_of_nodes(part, "").kernel_s,
            "least_s": _less_views(part),
        }
        for key, part in nodes.groupby(list(KEYS))
    ]
    labels = data.end_to_end[data.end_to_end["option"] == ""].rename(columns={"e2e_s": "label_s"})
    sums = pd.DataFrame(totals, columns=[*KEYS, "nodes_s", "least_s"])
    found = labels[[*KEYS, "label_s"]].merge(sums, on=list(KEYS))
    if not len(found):
        raise InputError("no run of these GPUs has both nodes and a label")
    return found.assign(
        error=100.0 * (found["nodes_s"] / found["label_s"] - 1.0),
        least_error=100.0 * (found["least_s"] / found["label_s"] - 1.0),
    )


def _less_views(nodes: pd.DataFrame) -> float:
    """Sum of a run's nodes, each less what a view takes."""
    overhead_s = event_overhead_s(nodes, nodes["fx_target"].isin(VIEWS))
    parts = [(nodes[column] - overhead_s).clip(lower=0.0) for column, _ in PHASES]
    return float(sum((part * nodes["layer_repeat"]).sum() for part in parts))


def main() -> None:
    """Print every run, and the errors by GPU and of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements")
    parser.add_argument("devices", nargs="*")
    chosen = parser.parse_args()
    found = node_sums(chosen.measurements, [gpu_info(name).name for name in chosen.devices] or None)
    sys.stdout.write(found.round(4).to_string(index=False) + "\n")
    for device, part in [*found.groupby("device"), ("all", found)]:
        for column in ("error", "least_error"):
            scores = percentiles(np.abs(part[column].to_numpy()))
            listed = ", ".join(f"{name} {value:.1f}" for name, value in scores.items())
            sys.stdout.write(f"{device}, {len(part)} runs, {column}: {listed} %\n")


if __name__ == "__main__":
    main()
