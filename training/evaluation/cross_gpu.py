"""How well measured runs scale from one GPU to another: every ordered pair of GPUs, every run both have.

    python -m neusight_jax.training.evaluation.cross_gpu MEASUREMENTS CHECKPOINT [DEVICE ...] [--effects WHICH]

Nodes of a run on the origin, scaled by `scaling.rules` and by wave scaling alone, against the whole-model label of the
same run on the target. Contaminated rows are left out on both sides. A GPU the checkpoint measured is forecast with
its effect, as Habitat's networks knew all of their GPUs; `--effects origin` treats every target as a GPU nobody has
measured, though it helped to fit the weights: hold it out of the checkpoint for more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from neusight_jax.checkpoint import load_card, load_predictor
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError, run_script, unknown_name
from neusight_jax.gpu_file import load_gpu
from neusight_jax.scaling.occupancy import limits_of
from neusight_jax.scaling.per_op import WORKLOAD, trace_of_nodes
from neusight_jax.scaling.rules import Machine, scaling, wave_scaling
from neusight_jax.training.data import contaminated
from neusight_jax.training.evaluation.scores import percentiles

SYSTEMS: tuple[str, ...] = ("scale_trace", "scale_trace plain", "habitat-wave", "habitat-wave-simplified")
EFFECTS: tuple[str, ...] = ("both", "origin", "none")
RIVALS: tuple[str, ...] = SYSTEMS[2:]


def cross_gpu(
    measurements: Sequence[Path | str] | Path | str,
    checkpoint: str,
    devices: Sequence[str] | None = None,
    effects: str = "both",
) -> pd.DataFrame:
    """One row per ordered pair and run: origin, target, the workload, measured_s on the target, and each of `SYSTEMS`.

    Args:
      effects: which GPUs of a pair are forecast with their measured effect, one of `EFFECTS`.
    Raises: `InputError` when no run was measured on two GPUs, or for unknown `effects`.
    """
    if effects not in EFFECTS:
        raise unknown_name("effects", effects, EFFECTS)
    data = read_measurements(measurements, on_invalid="drop", devices=devices)
    if data.per_op is None or data.end_to_end is None:
        raise InputError("cross-GPU scaling needs models/per_op.parquet and models/end_to_end.csv")
    keys = ["device", *WORKLOAD]
    nodes = data.per_op[~contaminated(data.per_op)]
    runs = {key: trace_of_nodes(part, "") for key, part in nodes.groupby(keys)}
    labels = data.end_to_end[data.end_to_end["option"] == ""]
    measured = dict(zip(labels[keys].itertuples(index=False, name=None), labels["e2e_s"], strict=True))
    measured_effects = load_card(checkpoint).get("device_effects", {})
    names = sorted({str(key[0]) for key in runs})

    def machines_of(known: bool) -> dict[str, Machine]:
        return {
            name: Machine(
                load_gpu(name),
                limits_of(name),
                load_predictor(checkpoint, name if known and name in measured_effects else None),
            )
            for name in names
        }

    origins, targets = machines_of(effects != "none"), machines_of(effects == "both")
    records = []
    for key, trace in runs.items():
        origin, workload = str(key[0]), key[1:]
        seconds = np.array([item.seconds for item in trace.items])
        for target in names:
            there = (target, *workload)
            if target == origin or there not in runs or there not in measured:
                continue
            pair = trace.items, origins[origin], targets[target]
            ratios = (
                scaling(*pair)[1],
                scaling(*pair, plain=True)[1],
                wave_scaling(*pair),
                wave_scaling(*pair, general=False),
            )
            forecasts = {name: float((seconds * ratio).sum()) for name, ratio in zip(SYSTEMS, ratios, strict=True)}
            run = dict(zip(WORKLOAD, workload, strict=True))
            records.append({"origin": origin, "target": target, **run, "measured_s": measured[there], **forecasts})
    if not records:
        raise InputError("no run was measured on two of these GPUs")
    return pd.DataFrame(records)


def cross_gpu_errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean, median and p90 of the absolute percentage error of each system, over all rows."""
    errors = {name: 100.0 * np.abs(frame[name] / frame["measured_s"] - 1.0).to_numpy() for name in SYSTEMS}
    return pd.DataFrame(
        [{"system": name, "rows": len(frame), **percentiles(values)} for name, values in errors.items()]
    )


def main() -> None:
    """Print the errors of every system, and of `scale_trace` by pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements")
    parser.add_argument("checkpoint")
    parser.add_argument("devices", nargs="*")
    parser.add_argument("--effects", default="both", choices=EFFECTS)
    chosen = parser.parse_args()
    devices = chosen.devices or None
    found = cross_gpu(chosen.measurements, chosen.checkpoint, devices, chosen.effects)
    sys.stdout.write(cross_gpu_errors(found).round(1).to_string(index=False) + "\n")
    by_pair = found.assign(error=100.0 * np.abs(found["scale_trace"] / found["measured_s"] - 1.0))
    pairs = by_pair.pivot_table(index="origin", columns="target", values="error", aggfunc="mean")
    sys.stdout.write(pairs.round(1).to_string() + "\n")


if __name__ == "__main__":
    run_script(main)
