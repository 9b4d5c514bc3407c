"""The whole-model protocol: every label forecast by fits, kernels and in-model rows alike, that never saw its GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console, RenderableType

from neusight_jax.baselines import load_baseline
from neusight_jax.errors import InputError
from neusight_jax.mixture import MixturePredictor
from neusight_jax.reports.text import table
from neusight_jax.terms import Predictor
from neusight_jax.training.calibration import calibrate, prior_of
from neusight_jax.training.data import NETWORKS, devices_with, join_rows, model_rows, sweep_rows, thin
from neusight_jax.training.evaluation import System, model_scores, percentiles
from neusight_jax.training.few_shot import designed_order, rows_table
from neusight_jax.training.fit import Job, Settings
from neusight_jax.training.kinds import MixtureKind, effect_penalties
from neusight_jax.training.left_out import LeftOut, fit_left_out, left_out_predictor
from neusight_jax.training.protocol import ROWS_PER_DEVICE, read_for
from neusight_jax.training.rows import Rows
from neusight_jax.training.systems import fit_tile

LOGO_MODELS = "logo-models"
"""Name of the protocol."""
SETTINGS = Settings()
COUNTS: tuple[int, ...] = (10, 50)
"""Measured kernels of each family that the same fits are calibrated with."""
DRAWS = 10
"""Draws of those kernels: from one to the next a GPU's models move by several percent, the mean of all by one."""


@dataclass(frozen=True)
class ModelsResult:
    """Scores of the protocol.

    Attributes:
      seeds: members of every ensemble.
      rows: one row per label, system and draw of the kernels it was calibrated with (0 for a system without):
        `evaluation.Evaluation.models`, and draw.
    """

    seeds: int
    rows: pd.DataFrame

    @property
    def scores(self) -> pd.DataFrame:
        """Mean, median and p90 absolute percentage error: system, option, device ("all" for all), labels, draws, and
        `sd` of the mean over draws."""
        records = []
        for (system, option), part in self.rows.groupby(["system", "option"], sort=False):
            groups = [(str(device), own) for device, own in part.groupby("device", sort=True)]
            for device, own in [*groups, ("all", part)]:
                errors = own["error"].abs()
                means = errors.groupby(own["draw"]).mean()
                head = {"system": system, "option": option, "device": device}
                counted = {"labels": len(own) // len(means), "draws": len(means)}
                records.append(head | counted | percentiles(errors.to_numpy()) | {"sd": float(means.std(ddof=0))})
        return pd.DataFrame(records)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"protocol": LOGO_MODELS, "seeds": self.seeds, "scores": self.scores.to_dict("records")}

    def to_markdown(self) -> str:
        """A table: systems and GPUs."""
        header, cells = self._cells()
        about = f"Protocol `{LOGO_MODELS}`, {self.seeds} seeds as one ensemble, absolute percentage error"
        lines = [f"{about} (standard deviation over draws of the kernels).", ""]
        lines += ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)]) + "\n"

    def tables(self) -> RenderableType:
        """The same for people."""
        header, cells = self._cells()
        title = f"{LOGO_MODELS}, {self.seeds} seeds as one ensemble: whole models on the GPU left out"
        return table(title, header, cells, text_columns=3)

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        header = ["system", "option", "GPU left out", "labels", "mean", "median", "p90"]
        cells = [
            [row["system"], row["option"], row["device"], str(row["labels"])]
            + [f"{row['mean']:.1f}" + (f" ({row['sd']:.1f})" if row["draws"] > 1 else "")]
            + [f"{row[name]:.1f}" for name in ("median", "p90")]
            for row in self.scores.to_dict("records")
        ]
        return header, cells


def run_models_protocol(
    measurements: Sequence[Path | str],
    *,
    seeds: int = 5,
    devices: Sequence[str] | None = None,
    counts: Sequence[int] = COUNTS,
    drop_invalid: bool = False,
    console: Console | None = None,
) -> ModelsResult:
    """Fit every family with each GPU left out, and forecast that GPU's whole-model labels, beside the roofline.

    Once as it is, and after calibrations with a few measured kernels of that GPU, no model's among them, `DRAWS` times.

    Args:
      measurements: files or folders of the schema with whole-model labels; seeds: members of every ensemble.
      devices: only these GPUs; counts: kernels of each family to calibrate with; console: for progress.
    Raises: `InputError` for fewer than two GPUs, or without whole-model labels.
    """
    data, names = read_for(LOGO_MODELS, measurements, seeds, devices, drop_invalid)
    labels = data.end_to_end
    if labels is None or not labels["device"].isin(names).any():
        raise InputError(f"{LOGO_MODELS} scores whole models; the measurements hold no end_to_end.csv of these GPUs")
    console = console or Console(quiet=True)
    parts: dict[str, LeftOut] = {}
    tiles = {}
    for name in NETWORKS:
        present = devices_with(data, name, names)
        if len(present) < 2:
            if present:
                console.print(f"{name}: passed over, measured on {present[0]} alone")
            continue
        rows = join_rows([thin(sweep_rows(data, name, names), ROWS_PER_DEVICE), model_rows(data, name, names)])
        console.print(f"{name}: fitting, {seeds * len(names)} fits together")
        tiles[name] = fit_tile(rows, Job(0))
        kind = MixtureKind(tiles[name], penalties=effect_penalties(rows))
        parts[name] = fit_left_out(kind, rows, seeds, SETTINGS)

    @functools.cache
    def unseen(device: str) -> MixturePredictor:
        return left_out_predictor(parts, tiles, device)

    @functools.cache
    def designed(device: str, draw: int) -> list[Rows]:
        """The sweep rows of each family to measure, the most telling first."""
        chosen = []
        for name, part in parts.items():
            own = part.rows.of_device(device)
            own = own.take(own.isolated > 0.5)
            if len(own.seconds):
                random = np.random.default_rng(draw)
                order = designed_order(unseen(device), own, data.gpu(device), max(counts), prior_of(name), random)
                chosen.append(own.take(order))
        return chosen

    def calibrated(device: str, count: int, draw: int) -> Predictor:
        measured = [rows.take(np.arange(min(count, len(rows.seconds)))) for rows in designed(device, draw)]
        seconds = np.concatenate([rows.seconds for rows in measured])
        return calibrate(unseen(device), data.gpu(device), rows_table(measured), seconds)

    roofline = load_baseline("roofline")
    systems: dict[str, System] = {"mixture": unseen}
    drawn: dict[str, tuple[str, int]] = {}
    for count in counts:
        for draw in range(DRAWS):
            name = f"mixture, {count} kernels"
            drawn[f"{name}, draw {draw}"] = name, draw
            systems[f"{name}, draw {draw}"] = functools.cache(functools.partial(calibrated, count=count, draw=draw))
    systems["roofline"] = lambda _: roofline
    console.print(f"calibrating with {' and '.join(map(str, counts))} kernels of each family, {DRAWS} draws")
    found, notes = model_scores(labels[labels["device"].isin(names)], systems, data.gpu)
    if found.empty:
        raise InputError(f"{LOGO_MODELS}: no whole model can be forecast; {'; '.join(notes)}")
    for note in notes:
        console.print(note)
    parted = [drawn.get(name, (name, 0)) for name in found["system"]]
    found = found.assign(system=[name for name, _ in parted], draw=[draw for _, draw in parted])
    return ModelsResult(seeds, found)
