"""Few-shot calibration: a handful of measured kernels of one GPU into shifts of the predictor's heads.

The log error of an unmeasured GPU is a Gaussian process (`prior`). The posterior mean is found by Gauss-Newton steps
through the predictor itself, with weights that keep a bad row from counting fully.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import neusight_jax
from neusight_jax.datasets.devices import measured_device, own_devices
from neusight_jax.datasets.measurements import Measurements, measured_names, read_measurements, table_from_frame
from neusight_jax.datasets.row_checks import OnInvalid
from neusight_jax.errors import InputError
from neusight_jax.files import refuse_existing
from neusight_jax.hardware.catalog import canonical_name
from neusight_jax.hardware.cluster import Machine, gpu_of, on_device
from neusight_jax.hardware.files import load_named_gpu
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelBatch, KernelTable
from neusight_jax.model.calibrated import CalibratedPredictor, ShapeEffect, shape_kernel
from neusight_jax.model.checkpoint import load_card, load_predictor, save_checkpoint
from neusight_jax.model.intervals import Intervals, gpu_ratios, gpu_widening, kernel_bounds
from neusight_jax.model.latency import require_covered
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.residuals import EFFECTS
from neusight_jax.training.intervals import calibrated_width, mean_error_percent
from neusight_jax.training.prior import Prior, linearised, points_of, prior_of

# A calibrated checkpoint: measured kernels of one GPU and a checkpoint in, a complete checkpoint and its card out.


def calibrate_checkpoint(
    measurements: Sequence[Path | str],
    gpu: str,
    output: Path | str,
    checkpoint: str = "fp32",
    *,
    drop_invalid: bool = False,
) -> dict[str, Any]:
    """Calibrate a checkpoint on one GPU and write the result to a folder.

    A GPU the checkpoint was trained on starts from its measured effect.

    Args:
      measurements: files or folders of the schema, or a filled plan; rows of other GPUs are left out.
      gpu: name (of a board that was measured or that a GPU file among them describes), or file of figures.
      output: folder to write, new or empty; checkpoint: name or path.
      drop_invalid: leave bad rows out instead of refusing.
    Returns: the card.
    Raises: `InputError` for bad measurements, unknown names, a checkpoint that cannot be calibrated.
    """
    refuse_existing(output)
    name, machine, data = measured_on(measurements, gpu, drop_invalid=drop_invalid)
    card = load_card(checkpoint)
    if "calibrated" in card:
        raise InputError(
            f"{checkpoint} is calibrated already, on {card['calibrated']['gpu']}; start from "
            f"{card['calibrated']['checkpoint']} with all measured kernels together"
        )
    has_effect = canonical_name(name) in card.get("device_effects", {})
    predictor = load_predictor(checkpoint, canonical_name(name))
    done = calibration(predictor, machine, data)
    rows = {family: int(item["rows"]) for family, item in done.summary.items()}
    kept = {key: value for key, value in card.items() if key not in ("format", "seconds")}
    out = {
        **kept,
        "kind": "calibrated",
        "architecture": {**card["architecture"], "points": rows},
        "trained_dtypes": sorted({*card.get("trained_dtypes", ()), *data.frame["dtype"].unique()}),
        "held_out": [device for device in card.get("held_out", ()) if device != name],
        "device_effects": {},
        "device_intervals": {},
        "notes": list(data.notes),
        "version": neusight_jax.__version__,
        "made_by": f'neusight-jax calibrate --checkpoint {checkpoint} --measurements DIR --gpu "{gpu}" --output DIR',
        "calibrated": {
            "gpu": name,
            "figures": {name: float(np.asarray(value)) for name, value in machine.known().items()},
            "checkpoint": checkpoint,
            "from_measured_effect": has_effect,
            "rows": rows,
            "summary": done.summary,
            "prior": {family: asdict(prior_of(family)) for family in rows},
        },
    }
    save_checkpoint(output, done.predictor, out)
    return out


def measured_on(
    measurements: Sequence[Path | str], gpu: str, *, drop_invalid: bool = False
) -> tuple[str, GPU, Measurements]:
    """A GPU by the name or file that a user gives, its figures, and its measurements.

    Args: as of `calibrate_checkpoint`.
    """
    if canonical_name(gpu) is not None:
        with suppress(InputError):  # rows need not name their device; if these do, reading them says so
            gpu = measured_device(gpu, measured_names(measurements))
    described = own_devices([Path(path) for path in measurements])[0]
    name, machine = (gpu, described[gpu]) if gpu in described else load_named_gpu(gpu)
    on_invalid: OnInvalid = "drop" if drop_invalid else "refuse"
    return name, machine, read_measurements(measurements, on_invalid=on_invalid, measured_on=(name, machine))


STEPS = 8
"""Gauss-Newton steps."""
PARTS: tuple[float, ...] = (1.0, 0.5, 0.25, 0.1)
"""Parts of a step that are tried until one mends the fit: whole steps go astray where heads take turns."""
MOST_ROWS = 500
"""At most this many rows of a family are used: solving is cubic in them, and little is gained beyond."""


@dataclass(frozen=True)
class Calibration:
    """Outcome of a calibration.

    Attributes:
      predictor: the calibrated predictor.
      summary: by family: rows given and used; mean absolute percentage error of the used rows before, and after with
        each row left out of its own forecast; the half-width of its 80 % interval in logarithms, where it has one.
    """

    predictor: CalibratedPredictor
    summary: dict[str, dict[str, float]]


def calibrate(
    predictor: Predictor,
    gpu: Machine,
    table: KernelTable | Measurements,
    seconds: Float[np.ndarray, " row"] | Sequence[float] | None = None,
    prior: Prior | None = None,
) -> CalibratedPredictor:
    """Calibrate a predictor with measured kernels of one GPU, 4 to 200 of each family.

    Args:
      predictor: of kind `mixture`; its own device effects, if any, are where the calibration starts.
      gpu: the machine the kernels were measured on, a cluster where some of them are collectives.
      table: the kernels (`read_kernels`), measured one by one; or `read_measurements` of that GPU, seconds included.
      seconds: measured latency of each row of the table, in file order.
      prior: widths of the shifts; the defaults (`prior_of`) were chosen by leave-one-GPU-out.
    Returns: the predictor for this GPU and what-if variants of it. Families without rows are as before: measured on
      other GPUs, the shift of one family says nothing of another's.
    Raises: `InputError` for a predictor of another kind, rows of several devices, or latencies that cannot be.
    """
    return calibration(predictor, gpu, table, seconds, prior).predictor


def calibration(
    predictor: Predictor,
    gpu: Machine,
    table: KernelTable | Measurements,
    seconds: Float[np.ndarray, " row"] | Sequence[float] | None = None,
    prior: Prior | None = None,
) -> Calibration:
    """Calibrate as `calibrate` does, with a summary by family.

    Args: as of `calibrate`.
    """
    predictor = calibratable(predictor)
    table, measured = measured_kernels(predictor, table, seconds)
    shapes, summary, left_out = {}, {}, {}
    for network in predictor.families:
        parts = [name for name, batch in table.families.items() if FAMILIES[name].network == network and batch.num_rows]
        if parts:
            shapes[network], summary[network], left_out[network] = _fit(
                predictor, gpu, table, parts, measured, prior or prior_of(network)
            )
    base = predictor
    if predictor.intervals is not None:
        intervals, widths = _credited(predictor.intervals, gpu, left_out)
        base = replace(predictor, intervals=intervals)
        summary = {network: {**figures, "log_half_width": widths[network]} for network, figures in summary.items()}
    return Calibration(CalibratedPredictor(base, shapes, jnp.float32((prior or Prior()).length)), summary)


def _credited(
    intervals: Intervals, gpu: Machine, left_out: Mapping[str, np.ndarray]
) -> tuple[Intervals, dict[str, float]]:
    """Intervals of the families that were measured, and their half-widths on this GPU by network.

    Args:
      left_out: log(measured / forecast) of measured kernels, each left out of its own forecast, by network.
    """
    ratios = gpu_ratios(gpu_of(gpu))
    widths, pairs = {}, {}
    for network, errors in left_out.items():
        wider = float(gpu_widening(ratios, intervals.gpu_range[network]))
        before = float(jnp.max(jnp.abs(kernel_bounds(intervals, network, gpu_of(gpu))))) * wider
        widths[network] = calibrated_width(errors, before)
        # A forecast widens the interval of this GPU by the same factor again.
        pairs[network] = jnp.array([-1.0, 1.0], jnp.float32) * widths[network] / wider
    return intervals.with_kernels(pairs), {network: round(width, 4) for network, width in widths.items()}


def calibratable(predictor: Predictor) -> MixturePredictor:
    """A predictor that measurements of one GPU can be explained with; `InputError` for any other."""
    if isinstance(predictor, CalibratedPredictor):
        raise InputError("this predictor is calibrated already; start from the one before, with all measured kernels")
    if not isinstance(predictor, MixturePredictor):
        raise InputError("only predictors of kind mixture can be calibrated; take a checkpoint such as fp32")
    return predictor


def measured_kernels(
    predictor: MixturePredictor, table: KernelTable | Measurements, seconds: Any
) -> tuple[KernelTable, Float[np.ndarray, " row"]]:
    """Measured kernels and their seconds. Args, and what is raised: as of `calibrate`."""
    if not isinstance(table, KernelTable):
        frame = table.frame.reset_index(drop=True)
        devices = sorted(frame["device"].unique())
        if len(devices) != 1:
            raise InputError(
                f"calibration takes kernels of one GPU, these were measured on {len(devices)}: {', '.join(devices)}; "
                "read one with read_measurements(..., devices=[name])"
            )
        if seconds is not None:
            raise InputError("measurements hold their own latencies; leave `seconds` out")
        table, seconds = table_from_frame(frame), frame["latency_s"]
    if seconds is None:
        raise InputError("a kernel table holds no latencies; give the measured seconds of its rows too")
    measured = np.asarray(seconds, np.float64)
    if measured.shape != (table.num_rows,):
        raise InputError(f"seconds has shape {measured.shape}, expected one for each of the {table.num_rows} kernels")
    if not measured.size:
        raise InputError("no kernel was measured; give at least one, better ten of each family")
    wrong = np.flatnonzero(~(np.isfinite(measured) & (measured > 0)))
    if wrong.size:
        raise InputError(f"seconds of row {wrong[0]} is {measured[wrong[0]]}, expected a number above 0")
    require_covered(predictor, table)
    return table, measured


@dataclass(frozen=True)
class _Points:
    """Measured kernels of one network: shape points, and where each family's rows lie among them."""

    batches: dict[str, tuple[KernelBatch, slice]]
    points: np.ndarray
    log_seconds: np.ndarray


def _fit(
    predictor: MixturePredictor, gpu: Machine, table: KernelTable, parts: list[str], measured: np.ndarray, prior: Prior
) -> tuple[ShapeEffect, dict[str, float], np.ndarray]:
    """The shifts of a network, its summary, and log(measured / forecast) with each row left out of its own."""
    network = FAMILIES[parts[0]].network
    given_rows = sum(table.families[name].num_rows for name in parts)
    rows = _points({name: table.families[name] for name in parts}, measured, prior)
    kernel = np.asarray(shape_kernel(jnp.asarray(rows.points), jnp.asarray(rows.points)), np.float64)
    noise = prior.noise_of(len(rows.log_seconds))

    def state(dual: np.ndarray) -> _State:
        constant, weights = _posterior(prior, dual)
        logs, shares = _linear(predictor, network, gpu, rows, constant + kernel @ weights)
        error = rows.log_seconds - logs
        spread = constant @ dual.sum(axis=0) + np.sum(dual * (kernel @ weights))
        return _State(dual, constant, weights, error, shares, float(spread))

    start = here = state(np.zeros((len(rows.log_seconds), len(EFFECTS))))
    weight = np.ones(len(here.error))
    # Forecasts are linear only near the shifts, and weights go by the residuals: both are taken anew in each step.
    for _ in range(STEPS):
        target = here.error + np.sum(here.shares * (here.constant + kernel @ here.weights), axis=1)
        inverse = np.linalg.inv(prior.covariance(here.shares, here.shares, kernel) + np.diag(noise**2 / weight))
        solution = inverse @ target
        proposed = here.shares * solution[:, None]
        # A step that mends nothing in any part is not taken; the weights below may still change the next one.
        for part in PARTS:
            there = state(here.dual + part * (proposed - here.dual))
            if there.cost(weight, noise) < here.cost(weight, noise):
                here = there
                break
        weight = prior.weight(here.error)
    left_out = solution / np.diag(inverse)  # the residual of each row from a fit to the others
    summary = {
        "given": given_rows,
        "rows": len(start.error),
        "before": mean_error_percent(start.error),
        "after": mean_error_percent(left_out),
    }
    leaves = (jnp.asarray(leaf, jnp.float32) for leaf in (here.constant, rows.points, here.weights))
    return ShapeEffect(*leaves), summary, left_out


@dataclass(frozen=True)
class _State:
    """Where the fit of a network stands: the dual [row, effect] says it all."""

    dual: np.ndarray
    constant: np.ndarray
    weights: np.ndarray
    error: np.ndarray
    shares: np.ndarray
    spread: float

    def cost(self, weight: np.ndarray, noise: float) -> float:
        """Twice the negative log posterior, of rows that count for so much."""
        return float(np.sum(weight * self.error**2)) / noise**2 + self.spread


def _posterior(prior: Prior, dual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Constants [effect] and kernel weights [row, effect] of a dual [row, effect]."""
    common = dual.sum(axis=1, keepdims=True)
    return np.square(prior.constants) * dual.sum(axis=0), prior.shape**2 * dual + prior.common**2 * common


def _points(batches: dict[str, KernelBatch], measured: np.ndarray, prior: Prior) -> _Points:
    """Rows of the families that share a network, padding dropped, at most `MOST_ROWS` of them."""
    # Solving is cubic in the rows, so that of too many some are drawn, over all families together.
    total = sum(batch.num_rows for batch in batches.values())
    kept = np.ones(total, bool)
    if total > MOST_ROWS:
        kept[np.random.default_rng(0).permutation(total)[MOST_ROWS:]] = False
    taken: dict[str, tuple[KernelBatch, slice]] = {}
    points, logs, done, seen = [], [], 0, 0
    for name, batch in batches.items():
        real = np.flatnonzero(np.asarray(batch.row) >= 0)
        where = real[kept[seen : seen + len(real)]]
        seen += len(real)
        part: KernelBatch = jax.tree.map(lambda column, where=where: np.asarray(column)[where], batch)
        points.append(np.asarray(points_of(name, part, prior.length)))
        logs.append(np.log(measured[part.row]))
        taken[name] = (part, slice(done, done + len(where)))
        done += len(where)
    return _Points(taken, np.concatenate(points), np.concatenate(logs))


def _linear(
    predictor: MixturePredictor, network: str, gpu: Machine, rows: _Points, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log forecasts of the rows at these shifts [row, effect], and their slopes J in them."""
    logs, shares = np.zeros(len(shift)), np.zeros(shift.shape)
    for name, (batch, where) in rows.batches.items():
        part = jnp.asarray(shift[where], jnp.float32)
        log, share = linearised(name, predictor, on_device(gpu), batch, part)
        logs[where], shares[where] = np.asarray(log), np.asarray(share)
    return logs, shares


def summary_lines(summary: dict[str, dict[str, float]]) -> list[str]:
    """A line for each family, for people."""
    lines = []
    for name, figures in summary.items():
        width = figures.get("log_half_width")
        interval = "" if width is None else f"; 80% interval {math.expm1(-width):+.0%} to {math.expm1(width):+.0%}"
        lines.append(
            f"{name}: {figures['rows']:.0f} kernels, error {figures['before']:.1f}% before, {figures['after']:.1f}% "
            f"after (each kernel forecast from the others){interval}"
        )
    return lines
