"""The whole-model protocols: every label forecast by fits, kernels and in-model rows alike, that never saw its GPU.

`logo-models` leaves one GPU out at a time, `architecture-models` all GPUs of one architecture together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console

from neusight_jax.baselines import load_baseline
from neusight_jax.datasets.measurements import Measurements
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.model.heads import TileChoice
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.training.calibration import calibrate, prior_of
from neusight_jax.training.data import NETWORKS, Rows, devices_with, join_rows, model_rows, sweep_rows, thin
from neusight_jax.training.evaluation.few_shot import designed_order, rows_table
from neusight_jax.training.evaluation.protocol import ROWS_PER_DEVICE, read_for
from neusight_jax.training.evaluation.result import Evaluation, View, scores
from neusight_jax.training.evaluation.scores import System, model_scores
from neusight_jax.training.evaluation.systems import fit_tile
from neusight_jax.training.fit import Job, Settings
from neusight_jax.training.left_out import LeftOut, fit_left_out, left_out_jobs, left_out_predictor
from neusight_jax.training.objectives import MixtureObjective, effect_penalties

LEFT_OUT_BY = {"logo-models": "device", "architecture-models": "architecture"}
"""Protocol -> what is left out together."""
SETTINGS = Settings()
COUNTS: tuple[int, ...] = (10, 50)
"""Measured kernels of each family that the same fits are calibrated with."""
DRAWS = 10
"""Draws of those kernels: from one to the next a GPU's models move by several percent, the mean of all by one."""


_COLUMNS: dict[str, str] = {
    **{"system": "{system}", "option": "{option}", "GPU left out": "{device}", "labels": "{labels}"},
    **{"mean": "{mean_sd}", "median": "{median:.1f}", "p90": "{p90:.1f}"},
}


def run_models_protocol(
    measurements: Sequence[Path | str],
    protocol: str = "logo-models",
    *,
    seeds: int = 5,
    devices: Sequence[str] | None = None,
    counts: Sequence[int] = COUNTS,
    drop_invalid: bool = False,
    console: Console | None = None,
) -> Evaluation:
    """Fit every family with each GPU or architecture left out, and forecast its whole models, beside the roofline.

    Once as it is, and after calibrations with a few measured kernels of a GPU, no model's among them, `DRAWS` times.

    Args:
      measurements: files or folders of the schema with whole-model labels; protocol: a key of `LEFT_OUT_BY`.
      seeds: members of every ensemble.
      devices: only these GPUs; counts: kernels of each family to calibrate with; console: for progress.
    Returns: frame `scores` (system, option, device or "all", labels, draws, mean, median, p90, `sd` of the mean over
      draws); rows: those of `model_scores`, and the draw of the kernels (0 for a system without).
    Raises: `InputError` for fewer than two GPUs, or without whole-model labels.
    """
    if protocol not in LEFT_OUT_BY:
        raise unknown_name("protocol", protocol, LEFT_OUT_BY)
    data, names = read_for(protocol, measurements, seeds, devices, drop_invalid)
    labels = data.end_to_end
    if labels is None or not labels["device"].isin(names).any():
        raise InputError(f"{protocol} scores whole models; the measurements hold no end_to_end.csv of these GPUs")
    console = console or Console(quiet=True)
    unseen, calibrated = _predictors(data, names, LEFT_OUT_BY[protocol], seeds, max(counts), console)
    roofline = load_baseline("roofline")
    systems: dict[str, System] = {"mixture": unseen}
    drawn: dict[str, tuple[str, int]] = {}
    for count, draw in itertools.product(counts, range(DRAWS)):
        name = f"mixture, {count} kernels"
        drawn[f"{name}, draw {draw}"] = name, draw
        systems[f"{name}, draw {draw}"] = functools.cache(functools.partial(calibrated, count=count, draw=draw))
    systems["roofline"] = lambda _: roofline
    console.print(f"calibrating with {' and '.join(map(str, counts))} kernels of each family, {DRAWS} draws")
    rows, notes = model_scores(labels[labels["device"].isin(names)], systems, data.gpu)
    if rows.empty:
        raise InputError(f"{protocol}: no whole model can be forecast; {'; '.join(notes)}")
    for note in notes:
        console.print(note)
    parted = [drawn.get(name, (name, 0)) for name in rows["system"]]
    rows = rows.assign(system=[name for name, _ in parted], draw=[draw for _, draw in parted])
    table = scores_by_device(rows)
    means = [f"{row['mean']:.1f}" + (f" ({row['sd']:.1f})" if row["draws"] > 1 else "") for _, row in table.iterrows()]
    title = f"{protocol}, {seeds} seeds as one ensemble: whole models on the GPU left out"
    return Evaluation(
        {"scores": table},
        (View(table.assign(mean_sd=means), _COLUMNS, title, text_columns=3),),
        rows,
        {"protocol": protocol, "seeds": seeds},
        f"Protocol `{protocol}`, {seeds} seeds as one ensemble, absolute percentage error (standard deviation over "
        "draws of the kernels).",
    )


def scores_by_device(rows: pd.DataFrame) -> pd.DataFrame:
    """Scores of every system and option on each GPU, and then on all."""
    keys = ("system", "option", "device")
    parts = [
        scores(part, keys, "labels", repeat="draw")
        for _, group in rows.groupby(["system", "option"], sort=False)
        for part in (group.sort_values("device", kind="stable"), group.assign(device="all"))
    ]
    return pd.concat(parts, ignore_index=True)


def fit_family(data: Measurements, name: str, names: Sequence[str], by: str, seeds: int) -> tuple[TileChoice, LeftOut]:
    """Fit a family to its sweep and to nodes of models, every device or architecture of `names` left out in turn.

    Args:
      data: all measurements.
      name: of the family.
      names: canonical names of the devices to fit to.
      by: "device" or "architecture", what is left out in one.
      seeds: fits of each that is left out.
    """
    rows = join_rows([thin(sweep_rows(data, name, names), ROWS_PER_DEVICE), model_rows(data, name, names)])
    tile = fit_tile(rows, Job(0))
    return tile, fit_left_out(MixtureObjective(tile, penalties=effect_penalties(rows)), rows, seeds, SETTINGS, by)


def _predictors(
    data: Measurements, names: Sequence[str], by: str, seeds: int, most: int, console: Console
) -> tuple[System, Callable[..., Predictor]]:
    """Predictors that never saw a GPU: from its name, and from its name, a count of kernels to measure, and a draw."""
    parts: dict[str, LeftOut] = {}
    tiles = {}
    for name in NETWORKS:
        present = devices_with(data, name, names)
        if not left_out_jobs(seeds, present, by):
            if present:
                console.print(f"{name}: passed over, measured on {', '.join(present)} alone")
            continue
        console.print(f"{name}: fitting, {len(left_out_jobs(seeds, tuple(names), by))} fits together")
        tiles[name], parts[name] = fit_family(data, name, names, by, seeds)

    @functools.cache
    def unseen(device: str) -> MixturePredictor:
        return left_out_predictor(parts, tiles, device)

    @functools.cache
    def designed(device: str, draw: int) -> list[Rows]:
        """The sweep rows of each family to measure, the most telling first."""
        chosen = []
        for name, part in parts.items():
            sweep = part.rows.of_device(device)
            sweep = sweep.take(sweep.isolated > 0.5)
            if len(sweep.seconds):
                random = np.random.default_rng(draw)
                order = designed_order(unseen(device), sweep, data.gpu(device), most, prior_of(name), random)
                chosen.append(sweep.take(order))
        return chosen

    def calibrated(device: str, count: int, draw: int) -> Predictor:
        measured = [rows.take(np.arange(min(count, len(rows.seconds)))) for rows in designed(device, draw)]
        seconds = np.concatenate([rows.seconds for rows in measured])
        return calibrate(unseen(device), data.gpu(device), rows_table(measured), seconds)

    return unseen, calibrated
