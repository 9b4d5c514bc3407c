"""How well measured runs scale from one GPU to another: every ordered pair of GPUs, every run both have.

    python -m benchmarks.cross_gpu MEASUREMENTS CHECKPOINT [DEVICE ...] [--effects WHICH]

Nodes of a run on the origin, scaled by `scaling.rules` and by wave scaling alone, against the whole-model label of the
same run on the target. Contaminated rows are left out on both sides. A GPU the checkpoint measured is forecast with
its effect, as Habitat's networks knew all of their GPUs; `--effects origin` treats every target as a GPU nobody has
measured, though it helped to fit the weights: hold it out of the checkpoint for more.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd

from benchmarks.node_sums import KEYS, nodes_and_labels
from neusight_jax.arithmetic import DTYPES
from neusight_jax.errors import InputError, run_script, unknown_name
from neusight_jax.hardware.files import load_gpu
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel
from neusight_jax.model.checkpoint import load_card, load_predictor
from neusight_jax.model.rivals import memory_boundedness, wave_ratio
from neusight_jax.model.roofline import element_bytes, peak_flop_per_s
from neusight_jax.scaling.rules import Machine, figure, limits_of, plain_rule, scaling
from neusight_jax.scaling.tables import WORKLOAD, trace_of_nodes
from neusight_jax.scaling.trace import Measured, Trace
from neusight_jax.training.evaluation.scores import percentiles


def wave_scaling(items: Sequence[Measured], origin: Machine, target: Machine, *, general: bool = True) -> np.ndarray:
    """Ratio of every item by Habitat's wave scaling alone, a baseline.

    An item of several kernels is scaled by each, weighted with its roofline time on the origin. One of unknown work
    goes by `plain_rule`.

    Args:
      items: measured on the origin.
      origin: where they were measured.
      target: what they are scaled to.
      general: whether kernels of known work go by the general equation, which counts whole waves; else by the
        simplified.
    Returns: seconds on the target over seconds on the origin [item].
    """
    ratios = np.ones(len(items))
    for at, item in enumerate(items):
        if not item.kernels:
            ratios[at] = plain_rule(item, origin, target)[1]
            continue
        parts = [_wave_of_work(kernel, item.dtype, origin.gpu, target.gpu, general) for kernel in item.kernels]
        ratios[at] = sum(ratio * weight for ratio, weight in parts) / sum(weight for _, weight in parts)
    return ratios


def _wave_of_work(kernel: Kernel, dtype: str, origin: GPU, target: GPU, general: bool) -> tuple[float, float]:
    """Wave ratio of one kernel of known work, and its roofline time on the origin."""
    family = FAMILIES[kernel.family]
    dims = {name: jnp.array([float(kernel.dims[name])], jnp.float32) for name in family.dims}
    work = family.work(dims, element_bytes(jnp.array([DTYPES.index(dtype)])))
    flop, moved = float(work.flop[0]), float(work.bytes_moved[0])

    def peak(gpu: GPU) -> float:
        return float(peak_flop_per_s(gpu, family, jnp.array([DTYPES.index(dtype)]))[0])

    ridge = peak(target) / figure(target.mem_bytes_per_s)
    gamma = memory_boundedness(jnp.asarray(flop / moved), jnp.asarray(ridge))
    blocks = work.blocks[0, -1, 0] if general else None
    roofline_s = max(flop / peak(origin), moved / figure(origin.mem_bytes_per_s))
    return float(wave_ratio(origin, target, gamma, blocks)), roofline_s


SYSTEMS: dict[str, Callable[..., Any]] = {
    "scale_trace": lambda *pair: scaling(*pair)[1],
    "scale_trace plain": lambda *pair: scaling(*pair, plain=True)[1],
    "habitat-wave": wave_scaling,
    "habitat-wave-simplified": functools.partial(wave_scaling, general=False),
}
"""Ratios of the kernels of a run, from its items, origin and target."""
EFFECTS: tuple[str, ...] = ("both", "origin", "none")


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
    nodes, labels = nodes_and_labels(measurements, devices, "cross-GPU scaling")
    runs: dict[Any, Trace] = {key: trace_of_nodes(part, "") for key, part in nodes.groupby(KEYS)}
    measured = {tuple(row[:-1]): row[-1] for row in labels.itertuples(index=False, name=None)}
    with_effect = load_card(checkpoint).get("device_effects", {})

    @functools.cache
    def machine(name: str, tuned: bool) -> Machine:
        effect = name if tuned and name in with_effect else None
        return Machine(load_gpu(name), limits_of(name), load_predictor(checkpoint, effect))

    records = []
    for (origin, *workload), trace in runs.items():
        seconds = np.array([item.seconds for item in trace.items])
        for target in sorted({key[0] for key in runs} - {origin}):
            there = (target, *workload)
            if there not in runs or there not in measured:
                continue
            pair = trace.items, machine(origin, effects != "none"), machine(target, effects == "both")
            forecasts = {name: float((seconds * ratios(*pair)).sum()) for name, ratios in SYSTEMS.items()}
            run = {"origin": origin, "target": target, **dict(zip(WORKLOAD, workload, strict=True))}
            records.append({**run, "measured_s": measured[there], **forecasts})
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
    frame = cross_gpu(chosen.measurements, chosen.checkpoint, chosen.devices or None, chosen.effects)
    sys.stdout.write(cross_gpu_errors(frame).round(1).to_string(index=False) + "\n")
    by_pair = frame.assign(error=100.0 * np.abs(frame["scale_trace"] / frame["measured_s"] - 1.0))
    pairs = by_pair.pivot_table(index="origin", columns="target", values="error", aggfunc="mean")
    sys.stdout.write(pairs.round(1).to_string() + "\n")


if __name__ == "__main__":
    run_script(main)
