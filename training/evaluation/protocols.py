"""Protocols: fits that never saw a GPU, scored on it, for every GPU and several seeds.

`logo` (leave one GPU out) scores all rows of the GPU left out. `logo-size` also extrapolates in size: it trains on the
smaller 70 % of the rows (by FLOP, or bytes where there are few) and scores the largest 15 % of the GPU left out.
`architecture` leaves out all GPUs of one architecture together: where a twin would stay in training, `logo` flatters.
`seen` leaves no GPU out: it trains on four fifths of the rows and scores the rest. Errors
are of single seeds, not of their ensemble; device effects are at zero, as for any GPU nobody has measured. Wave scaling
is told more than the others, in both: the measured time of the very kernel on another GPU.

`few-shot` takes K kernels of the GPU left out (at random, or by design from the shapes alone), calibrates with them,
and scores all its other rows: for the fit of every seed by itself, and for all of them as one ensemble, which is what a
checkpoint is. On tensor cores the whole architecture of a GPU is left out: its siblings would give it away.

`logo-models` and `architecture-models` forecast every whole-model label by fits, kernels and in-model rows alike, that
never saw its GPU, or any of its architecture.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from rich.console import Console

from neusight_jax.datasets.measurements import Measurements, read_measurements
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import predict_kernels
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import Predictor, load_baseline
from neusight_jax.model.roofline import element_bytes
from neusight_jax.training.calibration import calibrate
from neusight_jax.training.data import (
    NETWORKS,
    Rows,
    devices_with,
    join_rows,
    measured_devices,
    model_rows,
    sweep_rows,
    thin,
)
from neusight_jax.training.evaluation.scores import (
    LONG,
    PERCENTILES,
    Evaluation,
    View,
    averaged,
    family_means,
    percentiles,
    scores,
)
from neusight_jax.training.evaluation.systems import DEFAULT_SYSTEMS, SYSTEMS, FamilyRows, fit_tile
from neusight_jax.training.fit import Job, Settings, sample_of, settings_for
from neusight_jax.training.left_out import LeftOut, fit_left_out, left_out_jobs, left_out_predictor
from neusight_jax.training.objectives import MixtureObjective, effect_penalties, seconds_of
from neusight_jax.training.prior import Prior, prior_of, telling_order
from neusight_jax.training.whole_models import System, model_scores

ROWS_PER_DEVICE = 3000


def read_for(
    protocol: str, measurements: Sequence[Path | str], seeds: int, devices: Sequence[str] | None, drop_invalid: bool
) -> tuple[Measurements, list[str]]:
    """Read what a protocol runs on, and the GPUs in it.

    Args:
      protocol: its name, for messages.
      measurements: files or folders of the schema.
      devices: only these GPUs; None = all.
      drop_invalid: leave bad rows out instead of refusing.
    Raises: `InputError` for fewer than two GPUs or one seed.
    """
    data = read_measurements(measurements, on_invalid="drop" if drop_invalid else "refuse", devices=devices)
    names = measured_devices(data)
    if len(names) < 2 or seeds < 1:
        raise InputError(f"{protocol} needs at least two GPUs and one seed; found {len(names)} GPUs, {seeds} seeds")
    return data, names


def left_out_families(
    data: Measurements, names: Sequence[str], seeds: int, by: Callable[[str], str], notes: list[str]
) -> Iterator[tuple[str, tuple[str, ...], tuple[Job, ...]]]:
    """Families that leave something to fit to, each with the GPUs that have rows of it, and its fits.

    Args:
      data: all measurements.
      names: canonical names of the GPUs to fit to.
      seeds: fits of each that is left out.
      by: family -> "device" or "architecture", what is left out in one.
      notes: takes what is passed over.
    """
    for family in NETWORKS:
        present = devices_with(data, family, names)
        jobs = left_out_jobs(seeds, present, by(family))
        if jobs:
            yield family, present, jobs
        elif present:
            alone = f"measured on {present[0]} alone" if len(present) == 1 else f"its GPUs are of one {by(family)}"
            notes.append(f"{family}: passed over, {alone}")


# Kernels of the GPU left out: `logo`, `logo-size`, `architecture` and `seen`.

PROTOCOLS: tuple[str, ...] = ("logo", "logo-size", "architecture", "seen")
SMALL, LARGE = 0.70, 0.85
"""Quantiles of size: train below the first, score above the second (`logo-size`)."""
LONG_S = 50e-6
"""Attention is scored apart on kernels longer than this: shorter ones are mostly their floor."""
_DETAIL: dict[str, str] = {
    **{"system": "{system}", "family": "{family}", "GPU left out": "{device}", "rows": "{rows}"},
    **{"mean (sd)": "{mean:.1f} ({sd:.1f})", "median": "{median:.1f}", "p90": "{p90:.1f}"},
}


def run_protocol(
    measurements: Sequence[Path | str],
    protocol: str,
    *,
    seeds: int = 5,
    devices: Sequence[str] | None = None,
    systems: Sequence[str] = DEFAULT_SYSTEMS,
    notes: Sequence[str] = (),
    drop_invalid: bool = False,
    console: Console | None = None,
) -> Evaluation:
    """Run a protocol over every GPU of the measurements, every family, and the systems.

    A family is scored on the GPUs that have measurements of it, where there are at least two (or architectures, where
    these are left out).

    Args:
      measurements: files or folders of the schema; protocol: one of `PROTOCOLS`; seeds: fits per GPU left out.
      devices: only these GPUs; systems: keys of `SYSTEMS`; notes: for the result; console: for progress.
    Returns: frame `scores` (system, family, device, rows, mean, median, p90 averaged over seeds, sd of the mean over
      them); rows: one per scored kernel: family, device, dims, measured_s, the forecast of seed 0 of every system.
    Raises: `InputError` for unknown names or fewer than two GPUs.
    """
    for what, name, choices in (("protocol", protocol, PROTOCOLS), *(("system", name, SYSTEMS) for name in systems)):
        if name not in choices:
            raise unknown_name(what, name, choices)
    data, names = read_for(protocol, measurements, seeds, devices, drop_invalid)
    console = console or Console(quiet=True)
    by = "architecture" if protocol == "architecture" else "device"
    runs: list[dict[str, Any]] = []
    frames: list[pd.DataFrame] = []
    passed_over = [*notes, *data.notes]
    for family, present, jobs in left_out_families(data, names, seeds, lambda _: by, passed_over):
        every = sweep_rows(data, family, present)
        training, scored = split_rows(protocol, thin(every, ROWS_PER_DEVICE))
        jobs = tuple(map(Job, range(seeds))) if protocol == "seen" else jobs
        family_runs, frame = _family_runs(training, scored, every, systems, jobs, console)
        runs += family_runs
        frames.append(frame)
    if not frames:
        raise InputError(
            f"{protocol} leaves out one {by} after the other; no family was measured on two: give more GPUs"
        )
    table = averaged(pd.DataFrame(runs), ("system", "family", "device"), ("rows", *PERCENTILES)).astype({"rows": int})
    means = family_means(table).reset_index()
    columns = {"system": "{system}", **{name: f"{{{name}:.1f}}" for name in means.columns[1:]}}
    title = f"{protocol}, {seeds} seeds: mean absolute percentage error on the GPU left out"
    return Evaluation(
        {"scores": table},
        (View(means, columns, title), View(table, _DETAIL)),
        pd.concat(frames, ignore_index=True),
        {"protocol": protocol, "seeds": seeds},
        f"Protocol `{protocol}`, {seeds} seeds, mean absolute percentage error.",
        tuple(passed_over),
    )


def split_rows(protocol: str, rows: Rows) -> tuple[Rows, Rows]:
    """Rows to train on and rows to score; the GPU left out is taken from the first later."""
    if protocol == "logo-size":
        size = _size(rows)
        return rows.take(size < np.quantile(size, SMALL)), rows.take(size > np.quantile(size, LARGE))
    if protocol == "seen":
        # Without a GPU left out, rows that were fitted would be scored: a fifth of them is kept apart.
        fifth = np.random.default_rng(0).permutation(len(rows.seconds)) % 5 == 0
        return rows.take(~fifth), rows.take(fifth)
    return rows, rows


def _size(rows: Rows) -> np.ndarray:
    work = rows.family.work(jax.tree.map(jnp.asarray, rows.batch.dims), element_bytes(jnp.asarray(rows.batch.dtype)))
    return np.asarray(work.flop if rows.family.matrix else work.bytes_moved)


def _family_runs(
    training: Rows,
    scored: Rows,
    every: Rows,
    systems: Sequence[str],
    jobs: Sequence[Job],
    console: Console,
) -> tuple[list[dict[str, Any]], pd.DataFrame]:
    """Scores of every fit of one family, and its rows."""
    family = training.family
    data = FamilyRows(training, every, fit_tile(training, jobs[0]))
    parts = {device: scored.of_device(device) for device in training.devices}
    samples = {device: sample_of(part, seen=False) for device, part in parts.items()}
    forecasts: dict[tuple[str, str], list[np.ndarray]] = {}
    for name in systems:
        console.print(f"{family.name}: fitting {name}, {len(jobs)} fits")
        for device, predictors in SYSTEMS[name].fit(data, jobs).items():
            runs = [np.asarray(seconds_of(family, predictor, samples[device])) for predictor in predictors]
            forecasts[name, device] = runs
    labels = {family.name: 0.0} | ({LONG.format(family.name): LONG_S} if family.generations == "attention" else {})
    records = []
    for label, least_s in labels.items():
        for (name, device), runs in forecasts.items():
            long = parts[device].seconds > least_s
            measured_s = parts[device].seconds[long]
            head = {"system": name, "family": label, "device": device, "rows": len(measured_s)}
            records += [{**head, **percentiles(100.0 * np.abs(run[long] / measured_s - 1.0))} for run in runs]
    frames = [
        pd.DataFrame(
            {"family": family.name, "device": device, **part.batch.dims, "measured_s": part.seconds}
            | {f"{name}_s": forecasts[name, device][0] for name in systems}
        )
        for device, part in parts.items()
    ]
    return records, pd.concat(frames, ignore_index=True)


# The same after calibrations with few of its kernels: `few-shot`.

FEW_SHOT = "few-shot"
COUNTS: tuple[int, ...] = (2, 10, 50, 200)
"""Kernels measured of each family; 2 of each is ten in all."""
DESIGNS: tuple[str, ...] = ("random", "designed")
POOL = 500
"""Rows, drawn at random, that designed kernels are chosen among and for."""
_FEW_SHOT: dict[str, str] = {
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
    parts = [
        (thin(sweep_rows(data, family, present), ROWS_PER_DEVICE), jobs)
        for family, present, jobs in left_out_families(data, names, seeds, _left_out_by, [])
    ]
    parts = [(rows, jobs) for rows, jobs in parts if np.bincount(rows.device).max() > min(counts)]
    if not parts:
        raise InputError(
            f"{FEW_SHOT} measures {min(counts)} kernels of each family and scores the rest; no family has more than "
            "that on any of two GPUs (two architectures on tensor cores), so there is nothing to score: give more rows"
        )
    records: list[dict[str, Any]] = []
    for rows, jobs in parts:
        console.print(f"{rows.family.name}: fitting, {len(jobs)} fits together")
        kind = MixtureObjective(fit_tile(rows, jobs[0]), penalties=effect_penalties(rows))
        fits = fit_left_out(kind, rows, seeds, settings_for(rows.family), _left_out_by(rows.family.name))
        for device in rows.devices:
            device_rows, gpu, belief = rows.of_device(device), data.gpu(device), prior or prior_of(rows.family.network)
            singles, together = [_unseen(fits.of_seed(seed), device) for seed in range(seeds)], []
            if seeds > 1:
                together = [_unseen(fits, device)] * seeds
            # As one ensemble the fits are what a checkpoint is; one by one they say how much a seed matters.
            for members, predictors in ((1, singles), (seeds, together)):
                for seed, predictor in enumerate(predictors):
                    head = {"family": rows.family.name, "device": device, "members": members}
                    records += [head | row for row in device_scores(predictor, device_rows, gpu, seed, counts, belief)]
    scored = pd.DataFrame(records)
    keys = ("family", "device", "members", "design", "kernels")
    table = averaged(scored, keys, ("rows", "before", "mean", "median", "p90"))
    means = few_shot_means(table)
    title = f"{FEW_SHOT}, {seeds} seeds: mean absolute percentage error on the GPU left out"
    return Evaluation(
        {"by_family": means, "scores": table},
        (View(*_by_count(means), title, text_columns=2), View(table, _FEW_SHOT)),
        scored,
        {"protocol": FEW_SHOT, "seeds": seeds},
        f"Protocol `{FEW_SHOT}`, {seeds} seeds, mean absolute percentage error.",
    )


def few_shot_means(table: pd.DataFrame) -> pd.DataFrame:
    """Mean error before and after by family, members, design and K, GPUs weighted equally; `change` in %."""
    keys = ["family", "members", "design", "kernels"]
    out = table.groupby(keys, sort=False)[["before", "mean"]].mean().reset_index()
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


def _left_out_by(family: str) -> str:
    """Unit a fit leaves out: a GPU, or on tensor cores an architecture."""
    return "architecture" if FAMILIES[family].tensor_core else "device"


def _unseen(fits: LeftOut, device: str) -> MixturePredictor:
    return left_out_predictor({fits.rows.family.network: fits}, {fits.rows.family.network: fits.kind.tile}, device)


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
    chosen: np.ndarray = pool[telling_order(predictor, [gpu], rows.family.name, rows.take(pool).batch, count, prior)]
    return chosen


def rows_table(parts: Sequence[Rows]) -> KernelTable:
    """Rows of one device as a table, in their order; a part for each family."""
    families, done = {}, 0
    for rows in parts:
        position: Any = np.arange(done, done + len(rows.seconds), dtype=np.int32)
        families[rows.family.name] = replace(rows.batch, row=position, node=position)
        done += len(rows.seconds)
    return KernelTable(families)


# Whole models: `logo-models` and `architecture-models`.

LEFT_OUT_BY = {"logo-models": "device", "architecture-models": "architecture"}
"""Protocol -> what is left out together."""
SETTINGS = Settings()
MODEL_COUNTS: tuple[int, ...] = (10, 50)
"""Measured kernels of each family that the same fits are calibrated with."""
DRAWS = 10
"""Draws of those kernels: from one to the next a GPU's models move by several percent, the mean of all by one."""
_MODELS: dict[str, str] = {
    **{"system": "{system}", "option": "{option}", "GPU left out": "{device}", "labels": "{labels}"},
    **{"mean": "{mean_sd}", "median": "{median:.1f}", "p90": "{p90:.1f}"},
}


def run_models_protocol(
    measurements: Sequence[Path | str],
    protocol: str = "logo-models",
    *,
    seeds: int = 5,
    devices: Sequence[str] | None = None,
    counts: Sequence[int] = MODEL_COUNTS,
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
        (View(table.assign(mean_sd=means), _MODELS, title, text_columns=3),),
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


def _predictors(
    data: Measurements, names: Sequence[str], by: str, seeds: int, most: int, console: Console
) -> tuple[System, Callable[..., Predictor]]:
    """Predictors that never saw a GPU: from its name, and from its name, a count of kernels to measure, and a draw."""
    parts: dict[str, LeftOut] = {}
    tiles = {}
    passed_over: list[str] = []
    for name, _, jobs in left_out_families(data, names, seeds, lambda _: by, passed_over):
        console.print(f"{name}: fitting, {len(jobs)} fits together")
        rows = join_rows([thin(sweep_rows(data, name, names), ROWS_PER_DEVICE), model_rows(data, name, names)])
        tiles[name] = fit_tile(rows, Job(0))
        kind = MixtureObjective(tiles[name], penalties=effect_penalties(rows))
        parts[name] = fit_left_out(kind, rows, seeds, SETTINGS, by)
    for note in passed_over:
        console.print(note)

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
