"""How far the measured nodes of a run are from the whole-model label of the same run.

    python -m neusight_jax.training.evaluation.node_sums MEASUREMENTS [DEVICE ...]

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
from neusight_jax.scaling.per_op import WORKLOAD, trace_of_nodes
from neusight_jax.training.data import contaminated
from neusight_jax.training.evaluation.scores import percentile_line

KEYS: tuple[str, ...] = ("device", *WORKLOAD)


def node_sums(measurements: Sequence[Path | str] | Path | str, devices: Sequence[str] | None = None) -> pd.DataFrame:
    """One row for every run with nodes and a label: the run, label_s, both sums, and their errors in % (`timed_error`
    and `error`).

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
            "timed_s": float((part["total_s"] * part["layer_repeat"]).sum()),
        }
        for key, part in nodes.groupby(list(KEYS))
    ]
    labels = data.end_to_end[data.end_to_end["option"] == ""].rename(columns={"e2e_s": "label_s"})
    sums = pd.DataFrame(totals, columns=[*KEYS, "nodes_s", "timed_s"])
    found = labels[[*KEYS, "label_s"]].merge(sums, on=list(KEYS))
    if not len(found):
        raise InputError("no run of these GPUs has both nodes and a label")
    return found.assign(
        error=100.0 * (found["nodes_s"] / found["label_s"] - 1.0),
        timed_error=100.0 * (found["timed_s"] / found["label_s"] - 1.0),
    )


def main() -> None:
    """Print every run, and the errors by GPU and of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements")
    parser.add_argument("devices", nargs="*")
    chosen = parser.parse_args()
    found = node_sums(chosen.measurements, chosen.devices or None)
    sys.stdout.write(found.round(4).to_string(index=False) + "\n")
    for device, part in [*found.groupby("device"), ("all", found)]:
        for column in ("timed_error", "error"):
            listed = percentile_line(np.abs(part[column].to_numpy()))
            sys.stdout.write(f"{device}, {len(part)} runs, {column}: {listed}\n")


if __name__ == "__main__":
    run_script(main)
