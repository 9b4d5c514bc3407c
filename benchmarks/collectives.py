"""How well collectives are forecast: new sizes, another architecture, ten points of it, more nodes than were seen.

    python -m benchmarks.collectives MEASUREMENTS [--seeds N]

Beside each forecast two baselines on the same rows: `ring`, steps at the sheet's latency and then bytes at the sheet's
rate; `alpha-beta`, α + β · bytes / rate with α and β fitted to the rows that the forecast was fitted to, by relative
least squares: of the machine where it was seen, else of all, for every operator, group size and software.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import run_script
from neusight_jax.hardware.catalog import gpu_info
from neusight_jax.hardware.cluster import Cluster
from neusight_jax.hardware.files import load_gpu, usual_topology
from neusight_jax.kernels.collective import COLLECTIVE, SOFTWARE
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.heads import init_tile_choice, launched, physical_times
from neusight_jax.model.latency import predict_kernels
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import element_bytes
from neusight_jax.training.calibration import calibrate
from neusight_jax.training.data import Rows, devices_with, measured_devices, sweep_rows
from neusight_jax.training.fit import Job, fit, row_features, sample_of
from neusight_jax.training.left_out import LeftOut, left_out_jobs, left_out_predictor
from neusight_jax.training.objectives import MixtureObjective, effect_penalties, forecast
from neusight_jax.training.prior import prior_of, telling_order
from neusight_jax.training.recipes import RECIPES

RECIPE = RECIPES["collectives"]
POINTS = 10
LARGE_BYTES = 4e6
FEW_NODES = 2


@dataclass(frozen=True)
class Protocol:
    """One protocol: which rows the fits may see, and which are scored."""

    name: str
    fitted: np.ndarray
    scored: np.ndarray


def fitted_kind(rows: Rows) -> MixtureObjective:
    """Objective that is fitted; collectives have no measured tiles."""
    tile = init_tile_choice(jax.random.key(0), COLLECTIVE, row_features(rows))
    return MixtureObjective(tile, RECIPE.hidden, effect_penalties(rows))


def seen_logs(rows: Rows, protocol: Protocol, seeds: int) -> np.ndarray:
    """log seconds of the scored rows on machines that were seen, members averaged."""
    training = rows.take(protocol.fitted)
    kind = fitted_kind(training)
    best = fit(kind, training, [Job(seed) for seed in range(seeds)], RECIPE.settings).best
    sample = sample_of(rows.take(protocol.scored))
    run = jax.jit(lambda member: jnp.log(forecast(COLLECTIVE, kind.predictor(member, COLLECTIVE, sample), sample)))
    logs = [run(jax.tree.map(lambda leaf, at=at: leaf[at], best)) for at in range(seeds)]
    return np.asarray(np.mean(np.asarray(logs), axis=0))


def machine_of(device: str) -> Cluster:
    """A measured device in its usual server."""
    gpu = load_gpu(device)
    return Cluster(gpu, usual_topology(device, gpu), 0)


def log_s(predictor: Predictor, rows: Rows, device: str) -> np.ndarray:
    """log seconds of rows of one device."""
    return np.asarray(np.log(predict_kernels(predictor, machine_of(device), table_of(rows))))


def table_of(rows: Rows) -> KernelTable:
    """Rows as a table, in their order."""
    place = np.arange(len(rows.seconds), dtype=np.int32)
    batch = jax.tree.map(np.asarray, rows.batch)
    return KernelTable({COLLECTIVE.name: type(batch)(**{**vars(batch), "row": place, "node": place})})


def calibrated_logs(predictor: MixturePredictor, rows: Rows, points: np.ndarray, device: str) -> np.ndarray:
    """Log seconds of all rows of a device after calibration with some of them.

    Args:
      rows: all of the device.
      points: mask of those to calibrate with [row].
      device: canonical name; stands in its usual server.
    """
    measured = rows.take(points)
    return log_s(calibrate(predictor, machine_of(device), table_of(measured), measured.seconds), rows, device)


def telling(predictor: MixturePredictor, rows: Rows, device: str) -> list[int]:
    """Positions of the rows to measure first, chosen from what is forecast of them alone."""
    prior = prior_of(COLLECTIVE.network)
    return telling_order(predictor, [machine_of(device)], COLLECTIVE.name, rows.batch, POINTS, prior)


def ring_parts(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of steps at the sheet's latency and of bytes at the sheet's rate, in a ring, links and network added."""
    sample = sample_of(rows)
    work = COLLECTIVE.work(sample.batch.dims, element_bytes(sample.batch.dtype))
    peak = jnp.asarray(sample.gpu.fp32_flop_per_s)
    at = launched(sample.gpu, COLLECTIVE, work, peak, sample.batch.dtype, topology=sample.topology)
    times = {name: np.asarray(values, np.float64)[:, 0] for name, values in physical_times(at).items()}
    return times["hops"] + times["far hops"], times["link"] + times["nic"]


def alpha_beta(rows: Rows, fitted: np.ndarray, scored: np.ndarray, by_device: bool) -> np.ndarray:
    """Forecasts of the scored rows by α + β · bytes / rate, group by group; NaN where a group was not fitted.

    Args:
      fitted: mask of the rows that α and β are fitted to [row].
      scored: mask of the rows to forecast [row].
      by_device: groups of each device by itself, else of all devices together.
    Returns: seconds [scored row].
    """
    dims = rows.batch.dims
    keys = [np.asarray(dims[name]) for name in ("operation", "ranks", "software")]
    group = np.stack([*keys, np.asarray(rows.batch.dtype), rows.device if by_device else 0 * rows.device], axis=1)
    moved, out = ring_parts(rows)[1], np.full(len(rows.seconds), np.nan)
    # A group with too few fitted rows takes the line of the same operation over other numbers of ranks.
    for key in np.unique(group[scored], axis=0):
        in_group = (group == key).all(axis=1)
        near = in_group & fitted
        if near.sum() < 2:  # another group size
            near = (group == key)[:, [0, 2, 3, 4]].all(axis=1) & fitted
        if near.sum() < 2:
            continue
        share = 1.0 / rows.seconds[near]
        sides = np.stack([share, moved[near] * share], axis=1)
        coefficients = np.linalg.lstsq(sides, np.ones(near.sum()), rcond=None)[0]
        out[in_group] = np.maximum(coefficients[0] + coefficients[1] * moved[in_group], 1e-7)
    return np.asarray(out[scored])


def percent(measured: np.ndarray, forecast_s: np.ndarray) -> np.ndarray:
    """Absolute errors, percent of the measured."""
    return np.asarray(100.0 * np.abs(forecast_s / measured - 1.0))


def scored_frame(
    rows: Rows, where: np.ndarray, fits: np.ndarray, name: str, seen: bool, logs: np.ndarray
) -> pd.DataFrame:
    """Table of errors, one row for each scored measurement.

    Args:
      where: mask of the scored rows [row].
      fits: mask of the rows that baselines are fitted to [row].
      name: of the protocol.
      seen: whether the machine was measured, so that baselines are fitted to each by itself.
      logs: forecast log seconds [scored row].
    """
    part = rows.take(where)
    hops_s, bytes_s = ring_parts(part)
    forecasts = {"forecast": np.exp(logs), "ring": hops_s + bytes_s, "alpha-beta": alpha_beta(rows, fits, where, seen)}
    dims = part.batch.dims
    return pd.DataFrame(
        {
            "protocol": name,
            "device": np.asarray(part.devices)[part.device],
            "software": np.asarray(SOFTWARE)[np.asarray(dims["software"]).astype(int)],
            "bytes": np.asarray(dims["bytes"]),
            **{system: percent(part.seconds, seconds) for system, seconds in forecasts.items()},
        }
    )


def evaluate_collectives(rows: Rows, seeds: int) -> pd.DataFrame:
    """Absolute errors in percent of every protocol, row by row."""
    dims = rows.batch.dims
    nodes = np.asarray(dims["domains"])
    new = np.round(np.log2(np.asarray(dims["bytes"]))).astype(int) % 4 == 2
    parts = []
    for protocol in (
        Protocol("new size, machine seen", ~new, new & (nodes <= FEW_NODES)),
        Protocol("4 to 8 nodes from 1 to 2", nodes <= FEW_NODES, nodes > FEW_NODES),
    ):
        logs = seen_logs(rows, protocol, seeds)
        parts.append(scored_frame(rows, protocol.scored, protocol.fitted, protocol.name, True, logs))
    jobs = left_out_jobs(seeds, rows.devices, "architecture")
    kind = fitted_kind(rows)
    out = LeftOut(kind, rows, jobs, fit(kind, rows, jobs, RECIPE.settings).best)
    for place, device in enumerate(rows.devices):
        device_rows = rows.device == place
        apart = ~np.isin(np.asarray(rows.devices)[rows.device], out.held_out_with(device))
        predictor = left_out_predictor({COLLECTIVE.name: out}, {COLLECTIVE.name: kind.tile}, device)
        parts.append(
            scored_frame(
                rows,
                device_rows,
                apart,
                "architecture left out",
                False,
                log_s(predictor, rows.take(device_rows), device),
            )
        )
        library = device_rows & (np.asarray(dims["software"]) == 0)
        points = library.copy()
        points[np.flatnonzero(library)[telling(predictor, rows.take(library), device)]] = False
        points = library & ~points
        logs = calibrated_logs(predictor, rows.take(library), points[library], device)[~points[library]]
        parts.append(scored_frame(rows, library & ~points, points, f"{POINTS} points of the machine", True, logs))
        fitted = library & ~new
        logs = calibrated_logs(predictor, rows.take(library), fitted[library], device)[new[library]]
        parts.append(scored_frame(rows, library & new, fitted, "new size, machine calibrated", True, logs))
    return pd.concat(parts, ignore_index=True)


def summary(errors: pd.DataFrame) -> str:
    """The errors as a table in Markdown: protocol, software and architecture."""
    errors = errors.assign(architecture=errors["device"].map(lambda name: gpu_info(name).architecture))
    lines = [
        "| protocol | software | architecture | rows | mean | median | > 4 MB | alpha-beta | ring |",
        "|" + " --- |" * 9,
    ]
    for keys, part in errors.groupby(["protocol", "software", "architecture"], sort=False):
        large = part[part["bytes"] > LARGE_BYTES]["forecast"].mean()
        figures = (
            part["forecast"].mean(),
            part["forecast"].median(),
            large,
            part["alpha-beta"].mean(),
            part["ring"].mean(),
        )
        cells = [*map(str, keys), str(len(part)), *("-" if np.isnan(value) else f"{value:.1f}" for value in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def collective_rows(measurements: Sequence[Path | str]) -> Rows:
    """All measured collectives."""
    data = read_measurements(measurements, on_invalid="drop", ops=[COLLECTIVE.name])
    return sweep_rows(data, COLLECTIVE.name, devices_with(data, COLLECTIVE.name, measured_devices(data)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="+")
    parser.add_argument("--seeds", type=int, default=RECIPE.members)
    parser.add_argument("--rows", help="file for the errors of every row, CSV")
    chosen = parser.parse_args()
    errors = evaluate_collectives(collective_rows(chosen.measurements), chosen.seeds)
    if chosen.rows:
        errors.to_csv(chosen.rows, index=False)
    sys.stdout.write(summary(errors))


if __name__ == "__main__":
    run_script(main)
