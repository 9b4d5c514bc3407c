"""The few-shot protocol: predictors that never saw a GPU, calibrated with a few of its kernels, scored on the rest.

For every GPU left out and every seed: fit on the other GPUs, take K kernels of the one left out (at random, or by
`design` from the shapes alone), calibrate, and score all its other rows: for the fit of every seed by itself, and for
all of them as one ensemble, which is what a checkpoint is. On tensor cores the whole architecture of a GPU is left out:
its siblings would give it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from rich.console import Console

from neusight_jax.errors import InputError
from neusight_jax.hardware.cluster import on_device
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.calibrated import shape_kernel, shape_points
from neusight_jax.model.checkpoint import with_libraries
from neusight_jax.model.latency import predict_kernels
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.residuals import EFFECTS
from neusight_jax.training.calibration import Prior, calibrate, linearised, most_telling, prior_of
from neusight_jax.training.data import NETWORKS, Rows, devices_with, sweep_rows, thin
from neusight_jax.training.evaluation.protocol import ROWS_PER_DEVICE, read_for
from neusight_jax.training.evaluation.result import Evaluation, View, averaged, percentiles
from neusight_jax.training.evaluation.systems import fit_tile
from neusight_jax.training.fit import settings_for
from neusight_jax.training.left_out import LeftOut, fit_left_out, left_out_jobs, merged
from neusight_jax.training.objectives import MixtureObjective, effect_penalties

FEW_SHOT = "few-shot"
"""Name of the protocol."""
COUNTS: tuple[int, ...] = (2, 10, 50, 200)
"""Kernels measured of each family; 2 of each is ten in all."""
DESIGNS: tuple[str, ...] = ("random", "designed")
POOL = 500
"""Rows, drawn at random, that designed kernels are chosen among and for."""


_DETAIL: dict[str, str] = {
    **{"family": "{family}", "GPU left out": "{device}", "seeds in one": "{members}", "kernels": "{kernels} {design}"},
    **{"rows": "{rows:.0f}", "before": "{before:.1f}", "after (sd)": "{mean:.1f} ({sd:.1f})"},
    **{"median": "{median:.1f}", "p90": "{p90:.1f}"},
}


def run_few_shot(
    measurements: Sequence[Path | str],
    *,
    seeds: int = 5,
    devices: Sequence[str] | None = None,
    counts: Sequence[int] = COUNTS,
    prior: Prior | None = None,
    drop_invalid: bool = False,
    console: Console | None = None,
) -> Evaluation:
    """Run the protocol over every GPU of the measurements and every family.

    Args:
      measurements: files or folders of the schema; seeds: fits and draws per GPU left out; devices: only these GPUs.
      counts: kernels measured of each family, left out where no other row is left; prior: of the calibration.
      console: for progress.
    Returns: frames `by_family` (see there) and `scores` (rows averaged over seeds, with `sd` of the mean error over
      them); rows: family, device, members (1, or all seeds as an ensemble), seed (of the draw, and of the fit of one
      member), design, kernels (K), rows (scored), before (zero-shot mean error on the same rows), mean, median, p90.
    Raises: `InputError` for fewer than two GPUs, or too few rows to score any.
    """
    data, names = read_for(FEW_SHOT, measurements, seeds, devices, drop_invalid)
    console = console or Console(quiet=True)
    present = {family: devices_with(data, family, names) for family in NETWORKS}
    every = [thin(sweep_rows(data, family, gpus), ROWS_PER_DEVICE) for family, gpus in present.items() if len(gpus) > 1]
    apart = [rows for rows in every if left_out_jobs(seeds, rows.devices, _left_out_by(rows))]
    parts = [rows for rows in apart if np.bincount(rows.device).max() > min(counts)]
    if not parts:
        raise InputError(
            f"{FEW_SHOT} measures {min(counts)} kernels of each family and scores the rest; no family has more than "
            "that on any of two GPUs (two architectures on tensor cores), so there is nothing to score: give more rows"
        )
    records: list[dict[str, Any]] = []
    for rows in parts:
        jobs = left_out_jobs(seeds, rows.devices, _left_out_by(rows))
        console.print(f"{rows.family.name}: fitting, {len(jobs)} fits together")
        kind = MixtureObjective(fit_tile(rows, jobs[0]), penalties=effect_penalties(rows))
        fits = fit_left_out(kind, rows, seeds, settings_for(rows.family), _left_out_by(rows))
        for device in rows.devices:
            device_rows, gpu, belief = rows.of_device(device), data.gpu(device), prior or prior_of(rows.family.network)
            singles = [_predictor(fits, device, slice(seed, seed + 1)) for seed in range(seeds)]
            together = [_predictor(fits, device, slice(None))] * seeds if seeds > 1 else []
            for members, predictors in ((1, singles), (seeds, together)):
                for seed, predictor in enumerate(predictors):
                    head = {"family": rows.family.name, "device": device, "members": members}
                    records += [head | row for row in device_scores(predictor, device_rows, gpu, seed, counts, belief)]
    scored = pd.DataFrame(records)
    keys = ("family", "device", "members", "design", "kernels")
    scores = averaged(scored, keys, ("rows", "before", "mean", "median", "p90"))
    means = by_family(scores)
    title = f"{FEW_SHOT}, {seeds} seeds: mean absolute percentage error on the GPU left out"
    return Evaluation(
        {"by_family": means, "scores": scores},
        (View(*_by_count(means), title, text_columns=2), View(scores, _DETAIL)),
        scored,
        {"protocol": FEW_SHOT, "seeds": seeds},
        f"Protocol `{FEW_SHOT}`, {seeds} seeds, mean absolute percentage error.",
    )


def by_family(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean error before and after by family, members, design and K, GPUs weighted equally; `change` in %."""
    keys = ["family", "members", "design", "kernels"]
    out = scores.groupby(keys, sort=False)[["before", "mean"]].mean().reset_index()
    return out.assign(change=100.0 * (out["mean"] / out["before"] - 1.0))


def _by_count(means: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, str]]:
    """Families in rows, K and design in columns, and how these are written."""
    records = []
    for (family, members), part in means.groupby(["family", "members"], sort=False):
        together = "each" if members == 1 else f"{members} as one"
        after = {f"{row.kernels} {row.design}": f"{row.mean:.1f} ({row.change:+.0f}%)" for row in part.itertuples()}
        records.append({"family": family, "seeds": together, "zero-shot": part["before"].mean(), **after})
    frame = pd.DataFrame(records)
    headers = [f"{count} {design}" for count in sorted(means["kernels"].unique()) for design in DESIGNS]
    columns = {"family": "{family}", "seeds": "{seeds}", "zero-shot": "{zero-shot:.1f}"}
    return frame, columns | {name: f"{{{name}}}" for name in headers if name in frame}


def _left_out_by(rows: Rows) -> str:
    """Unit a fit leaves out: a GPU, or on tensor cores an architecture."""
    return "architecture" if rows.family.tensor_core else "device"


def _predictor(fits: LeftOut, device: str, seeds: slice) -> MixturePredictor:
    """The fits of these seeds that did not see a device as one ensemble, device effects at zero."""
    members = jax.tree.map(lambda leaf: leaf[seeds], fits.members(device))
    network = fits.rows.family.network
    family = merged(members, fits.rows, generation_of=device)
    return with_libraries(MixturePredictor({network: family}, {network: fits.kind.tile}), device)


def device_scores(
    predictor: MixturePredictor, rows: Rows, gpu: GPU, seed: int, counts: Sequence[int], prior: Prior
) -> list[dict[str, Any]]:
    """Scores of one predictor on the rows of one device, calibrated with so many of them, drawn by the seed.

    Args:
      rows: of one family on one device, which the predictor did not see.
      seed: of the draws.
      counts: kernels to calibrate with; one that leaves no row to score is skipped.
      prior: of the calibration, and of what is telling.
    Returns: rows of the protocol without family, device and members, one for each count and design.
    """
    everything = rows_table([rows])
    plain = predict_kernels(predictor, gpu, everything)
    random = np.random.default_rng([seed, 7])
    designed = designed_order(predictor, rows, gpu, max(counts), prior, random)
    drawn = random.permutation(len(rows.seconds))
    records = []
    # Both errors are of the rows that were not measured, so that before and after are of the same kernels.
    for count in counts:
        if count >= len(rows.seconds):
            continue
        for design, order in zip(DESIGNS, (drawn, designed), strict=True):
            measured = order[:count]
            tuned = calibrate(predictor, gpu, rows_table([rows.take(measured)]), rows.seconds[measured], prior)
            rest = np.setdiff1d(np.arange(len(rows.seconds)), measured)
            before, after = (
                100.0 * np.abs(seconds[rest] / rows.seconds[rest] - 1.0)
                for seconds in (plain, predict_kernels(tuned, gpu, everything))
            )
            records.append(
                {
                    "seed": seed,
                    "design": design,
                    "kernels": count,
                    "rows": len(rest),
                    "before": float(before.mean()),
                    **percentiles(after),
                }
            )
    return records


def designed_order(
    predictor: MixturePredictor, rows: Rows, gpu: GPU, count: int, prior: Prior, random: np.random.Generator
) -> np.ndarray:
    """Positions of the rows of one family to measure first, the most telling first.

    Chosen among `POOL` rows drawn at random, by their shapes and the GPU's figures alone.

    Args:
      rows: of one family on one device; their latencies are not looked at.
      count: how many positions, at most `POOL`.
      prior: of the log errors.
      random: draws the pool.
    """
    pool = random.permutation(len(rows.seconds))[:POOL]
    batch = rows.take(pool).batch
    still = jnp.zeros((len(pool), len(EFFECTS)))
    shares = np.asarray(linearised(rows.family.name, predictor, on_device(gpu), batch, still)[1], np.float64)
    points = shape_points(rows.family, jax.tree.map(jnp.asarray, batch), prior.length)
    covariance = prior.covariance(shares, shares, np.asarray(shape_kernel(points, points), np.float64))
    chosen: np.ndarray = pool[most_telling([covariance], count, prior.noise)]
    return chosen


def rows_table(parts: Sequence[Rows]) -> KernelTable:
    """Rows of one device as a table, in their order; a part for each family."""
    families, done = {}, 0
    for rows in parts:
        position: Any = np.arange(done, done + len(rows.seconds), dtype=np.int32)
        families[rows.family.name] = replace(rows.batch, row=position, node=position)
        done += len(rows.seconds)
    return KernelTable(families)
