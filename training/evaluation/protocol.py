"""Protocols: train with one GPU left out, score that GPU, for every GPU and several seeds.

`logo` (leave one GPU out) scores all rows of the GPU left out. `logo-size` also extrapolates in size: it trains on the
smaller 70 % of the rows (by FLOP, or bytes where there are few) and scores the largest 15 % of the GPU left out.
`architecture` leaves out all GPUs of one architecture together: where a twin would stay in training, `logo` flatters.
`seen` leaves no GPU out: it trains on four fifths of the rows and scores the rest. Errors
are of single seeds, not of their ensemble; device effects are at zero, as for any GPU nobody has measured. Wave scaling
is told more than the others, in both: the measured time of the very kernel on another GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from rich.console import Console

from neusight_jax.datasets.measurements import Measurements, read_measurements
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.kernels.family import Family
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import element_bytes
from neusight_jax.training.data import NETWORKS, Rows, devices_with, measured_devices, sweep_rows, thin
from neusight_jax.training.evaluation.result import PERCENTILES, Evaluation, View, averaged, percentiles
from neusight_jax.training.evaluation.systems import DEFAULT_SYSTEMS, SYSTEMS, FamilyRows, fit_tile
from neusight_jax.training.fit import Job, Sample, sample_of
from neusight_jax.training.left_out import left_out_jobs

PROTOCOLS: tuple[str, ...] = ("logo", "logo-size", "architecture", "seen")
SMALL, LARGE = 0.70, 0.85
"""Quantiles of size: train below the first, score above the second (`logo-size`)."""
ROWS_PER_DEVICE = 3000
LONG_S = 50e-6
"""Attention is scored apart on kernels longer than this: shorter ones are mostly their floor."""
LONG = "{} > 50 us"

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
    for family in NETWORKS:
        present = devices_with(data, family, names)
        if len(present) < 2:
            passed_over += [f"{family}: passed over, measured on {present[0]} alone"] if present else []
            continue
        every = sweep_rows(data, family, present)
        training, scored = split_rows(protocol, thin(every, ROWS_PER_DEVICE))
        seen = protocol == "seen"
        jobs = tuple(map(Job, range(seeds))) if seen else left_out_jobs(seeds, present, by)
        if not jobs:
            passed_over.append(f"{family}: passed over, its GPUs are of one {by}")
            console.print(passed_over[-1])
            continue
        family_runs, frame = _family_runs(training, scored, every, systems, jobs, console)
        runs += family_runs
        frames.append(frame)
    if not frames:
        raise InputError(
            f"{protocol} leaves out one {by} after the other; no family was measured on two: give more GPUs"
        )
    return _evaluation(protocol, seeds, pd.DataFrame(runs), pd.concat(frames, ignore_index=True), passed_over)


def _evaluation(
    protocol: str, seeds: int, runs: pd.DataFrame, rows: pd.DataFrame, passed_over: Sequence[str]
) -> Evaluation:
    """The result of a protocol from the errors of every fit and the scored kernels."""
    scores = averaged(runs, ("system", "family", "device"), ("rows", *PERCENTILES)).astype({"rows": int})
    means = by_family(scores).reset_index()
    columns = {"system": "{system}", **{name: f"{{{name}:.1f}}" for name in means.columns[1:]}}
    title = f"{protocol}, {seeds} seeds: mean absolute percentage error on the GPU left out"
    return Evaluation(
        {"scores": scores},
        (View(means, columns, title), View(scores, _DETAIL)),
        rows,
        {"protocol": protocol, "seeds": seeds},
        f"Protocol `{protocol}`, {seeds} seeds, mean absolute percentage error.",
        tuple(passed_over),
    )


def by_family(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean error per system (rows) and family (columns), GPUs weighted equally."""
    means = scores.groupby(["system", "family"])["mean"].mean().unstack("family")
    return means[[label for name in NETWORKS for label in (name, LONG.format(name)) if label in means]]


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


def split_rows(protocol: str, rows: Rows) -> tuple[Rows, Rows]:
    """Rows to train on and rows to score; the GPU left out is taken from the first later."""
    if protocol == "logo-size":
        size = _size(rows)
        return rows.take(size < np.quantile(size, SMALL)), rows.take(size > np.quantile(size, LARGE))
    if protocol == "seen":
        fifth = np.random.default_rng(0).permutation(len(rows.seconds)) % 5 == 0
        return rows.take(~fifth), rows.take(fifth)
    return rows, rows


def _size(rows: Rows) -> np.ndarray:
    work = rows.family.work(jax.tree.map(jnp.asarray, rows.batch.dims), element_bytes(jnp.asarray(rows.batch.dtype)))
    return np.asarray(work.flop if rows.family.matrix else work.bytes_moved)


@functools.partial(jax.jit, static_argnames="family")
def _seconds(family: Family, predictor: Predictor, sample: Sample) -> jax.Array:
    return predictor.terms(family, sample.machine, sample.batch, isolated=sample.isolated).seconds


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
            runs = [np.asarray(_seconds(family, predictor, samples[device])) for predictor in predictors]
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
