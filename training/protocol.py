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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from rich.console import Console, Group, RenderableType

from neusight_jax.datasets.measurements import Measurements, read_measurements
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.kernels.family import Family
from neusight_jax.reports.text import table
from neusight_jax.roofline import element_bytes
from neusight_jax.terms import Predictor
from neusight_jax.training.data import NETWORKS, devices_with, measured_devices, sweep_rows, thin
from neusight_jax.training.evaluation import percentiles
from neusight_jax.training.fit import Job, Sample, sample_of
from neusight_jax.training.left_out import left_out_jobs
from neusight_jax.training.rows import Rows
from neusight_jax.training.systems import DEFAULT_SYSTEMS, SYSTEMS, Shown, fit_tile

PROTOCOLS: tuple[str, ...] = ("logo", "logo-size", "architecture", "seen")
SMALL, LARGE = 0.70, 0.85
"""Quantiles of size: train below the first, score above the second (`logo-size`)."""
ROWS_PER_DEVICE = 3000
LONG_S = 50e-6
"""Attention is scored apart on kernels longer than this: shorter ones are mostly their floor."""


@dataclass(frozen=True)
class ProtocolResult:
    """Scores and rows of a protocol.

    Attributes:
      protocol, seeds: what was run.
      scores: system, family, device, rows, mean, median, p90 (absolute percentage errors, averaged over seeds), sd of
        the mean over seeds.
      rows: one row per scored kernel: family, device, dims, measured_s, and the forecast of seed 0 of every system.
      notes: what was left out, and why.
    """

    protocol: str
    seeds: int
    scores: pd.DataFrame
    rows: pd.DataFrame
    notes: tuple[str, ...] = ()

    def by_family(self) -> pd.DataFrame:
        """Mean error per system (rows) and family (columns), GPUs weighted equally."""
        means = self.scores.groupby(["system", "family"])["mean"].mean().unstack("family")
        order = [label for name in NETWORKS for label in (name, f"{name} > 50 us")]
        return means[[name for name in order if name in means]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the rows are left to `rows`."""
        scores = self.scores.to_dict("records")
        return {"protocol": self.protocol, "seeds": self.seeds, "scores": scores, "notes": list(self.notes)}

    def to_markdown(self) -> str:
        """A table: systems × families, and GPUs apart."""
        lines = [f"Protocol `{self.protocol}`, {self.seeds} seeds, mean absolute percentage error.", ""]
        families = self.by_family()
        lines += [
            "| system | " + " | ".join(map(str, families.columns)) + " |",
            "|---" * (len(families.columns) + 1) + "|",
        ]
        lines += [
            f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + " |"
            for name, values in zip(families.index, families.to_numpy(), strict=True)
        ]
        header = ("system", "family", "GPU left out", "rows", "mean (sd)", "median", "p90")
        lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        for row in self.scores.to_dict("records"):
            mean = f"{row['mean']:.1f} ({row['sd']:.1f})"
            cells = (row["system"], row["family"], row["device"], row["rows"], mean)
            lines.append(f"| {' | '.join(map(str, cells))} | {row['median']:.1f} | {row['p90']:.1f} |")
        lines += [f"\nNote: {note}." for note in self.notes]
        return "\n".join(lines) + "\n"

    def tables(self) -> RenderableType:
        """The table of systems and families for people."""
        families = self.by_family()
        rows = [
            [str(name), *(f"{value:.1f}" for value in values)]
            for name, values in zip(families.index, families.to_numpy(), strict=True)
        ]
        title = f"{self.protocol}, {self.seeds} seeds: mean absolute percentage error on the GPU left out"
        return Group(table(title, ["system", *families], rows), *(f"note: {note}" for note in self.notes))


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
) -> ProtocolResult:
    """Run a protocol over every GPU of the measurements, every family, and the systems.

    A family is scored on the GPUs that have measurements of it, where there are at least two (or architectures, where
    these are left out).

    Args:
      measurements: files or folders of the schema; protocol: one of `PROTOCOLS`; seeds: fits per GPU left out.
      devices: only these GPUs; systems: keys of `SYSTEMS`; notes: for the result; console: for progress.
    Raises: `InputError` for unknown names or fewer than two GPUs.
    """
    if protocol not in PROTOCOLS:
        raise unknown_name("protocol", protocol, PROTOCOLS)
    for name in systems:
        if name not in SYSTEMS:
            raise unknown_name("system", name, SYSTEMS)
    data, names = read_for(protocol, measurements, seeds, devices, drop_invalid)
    console = console or Console(quiet=True)
    by = "architecture" if protocol == "architecture" else "device"
    scores: list[dict[str, Any]] = []
    frames: list[pd.DataFrame] = []
    passed_over = [*notes, *data.notes]
    for family in NETWORKS:
        present = devices_with(data, family, names)
        if len(present) < 2:
            passed_over += [f"{family}: passed over, measured on {present[0]} alone"] if present else []
            continue
        every = sweep_rows(data, family, present)
        rows = thin(every, ROWS_PER_DEVICE)
        training, scored = rows, rows
        if protocol == "logo-size":
            size = _size(rows)
            training, scored = rows.take(size < np.quantile(size, SMALL)), rows.take(size > np.quantile(size, LARGE))
        elif protocol == "seen":
            fifth = np.random.default_rng(0).permutation(len(rows.seconds)) % 5 == 0
            training, scored = rows.take(~fifth), rows.take(fifth)
        groups = () if protocol == "seen" else left_out_jobs(seeds, rows.devices, by)
        if protocol != "seen" and not groups:
            passed_over.append(f"{family}: passed over, its GPUs are of one {by}")
            console.print(passed_over[-1])
            continue
        found, frame = _family_scores(training, scored, every, systems, seeds, groups, console)
        scores += found
        frames.append(frame)
    if not frames:
        raise InputError(
            f"{protocol} leaves out one {by} after the other; no family was measured on two: give more GPUs"
        )
    return ProtocolResult(
        protocol, seeds, pd.DataFrame(scores), pd.concat(frames, ignore_index=True), tuple(passed_over)
    )


def read_for(
    protocol: str, measurements: Sequence[Path | str], seeds: int, devices: Sequence[str] | None, drop_invalid: bool
) -> tuple[Measurements, list[str]]:
    """What a protocol runs on, and the GPUs in it; `InputError` for fewer than two GPUs or one seed."""
    data = read_measurements(measurements, on_invalid="drop" if drop_invalid else "refuse", devices=devices)
    names = measured_devices(data)
    if len(names) < 2 or seeds < 1:
        raise InputError(f"{protocol} needs at least two GPUs and one seed; found {len(names)} GPUs, {seeds} seeds")
    return data, names


@functools.partial(jax.jit, static_argnames="family")
def _seconds(family: Family, predictor: Predictor, sample: Sample) -> jax.Array:
    return predictor.terms(family, sample.gpu, sample.batch, isolated=sample.isolated).seconds


def _size(rows: Rows) -> np.ndarray:
    work = rows.family.work(jax.tree.map(jnp.asarray, rows.batch.dims), element_bytes(jnp.asarray(rows.batch.dtype)))
    return np.asarray(work.flop if rows.family.matrix else work.bytes_moved)


def _family_scores(
    training: Rows,
    scored: Rows,
    every: Rows,
    systems: Sequence[str],
    seeds: int,
    jobs: Sequence[Job],
    console: Console,
) -> tuple[list[dict[str, Any]], pd.DataFrame]:
    """Scores of one family; without jobs every GPU is in training."""
    family, devices = training.family, training.devices
    shown = Shown(training, every, fit_tile(training, jobs[0] if jobs else Job(0)))
    parts = {device: scored.of_device(device) for device in devices}
    samples = {device: sample_of(part, seen=False) for device, part in parts.items()}
    forecasts: dict[tuple[str, str], list[np.ndarray]] = {}
    for name in systems:
        console.print(f"{family.name}: fitting {name}, {len(jobs) or seeds} fits")
        fits: dict[str, Sequence[Predictor]] = {}
        if jobs:
            for held_out, predictors in SYSTEMS[name].fit(shown, jobs).items():
                fits |= dict.fromkeys(held_out, predictors)
        else:
            fits |= SYSTEMS[name].fit_seen(shown, seeds)
        for device, predictors in fits.items():
            sample = samples[device]
            forecasts[name, device] = [np.asarray(_seconds(family, predictor, sample)) for predictor in predictors]
    scores = []
    for label, least in ((family.name, 0.0), (f"{family.name} > 50 us", LONG_S)):
        if least and family.generations != "attention":
            continue
        for (name, device), runs in forecasts.items():
            long = parts[device].seconds > least
            measured = parts[device].seconds[long]
            each = [percentiles(100.0 * np.abs(run[long] / measured - 1.0)) for run in runs]
            mean = {key: float(np.mean([item[key] for item in each])) for key in each[0]}
            spread = float(np.std([item["mean"] for item in each]))
            scores.append(
                {"system": name, "family": label, "device": device, "rows": len(measured), **mean, "sd": spread}
            )
    frames = [
        pd.DataFrame(
            {
                "family": family.name,
                "device": device,
                **part.batch.dims,
                "measured_s": part.seconds,
                **{f"{name}_s": forecasts[name, device][0] for name in systems},
            }
        )
        for device, part in parts.items()
    ]
    return scores, pd.concat(frames, ignore_index=True)
