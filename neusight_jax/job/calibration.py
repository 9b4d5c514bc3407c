"""Calibration of a cluster's software: a few measured steps, used for other layouts and models there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from neusight_jax.errors import InputError
from neusight_jax.hardware.cluster import Machine
from neusight_jax.job.job import Job
from neusight_jax.job.software import NAMES, STEP_NOISE, WIDTHS, Software
from neusight_jax.job.step import Seconds, check_cluster, compose, once, seconds_of_job
from neusight_jax.model.terms import Predictor

ROUNDS = 4
"""Linearisations: seconds are nearly linear in the logarithms of the software's numbers."""


def calibrate_steps(
    predictor: Predictor,
    machine: Machine,
    steps: Sequence[tuple[Job, float]],
    *,
    noise: float = STEP_NOISE,
) -> Software:
    """The software of a cluster from measured steps of jobs on it: for `Job.replace`, `nj.job_from_config` and
    `nj.parallelize`.

    Every number of the software starts from that of the first job and moves as far as its prior lets it and the steps
    ask for: the most probable values, with logarithms of numbers and of measured over forecast seconds normal.

    Args:
      predictor, machine: as `nj.predict`; steps: (job, measured seconds of a step).
      noise: spread of steps around a forecast with the right software, in logarithms.
    Raises: `InputError` for no step, or seconds that are no positive number.
    """
    pairs = list(steps)
    if not pairs:
        raise InputError("no measured step; expected at least one pair of a job and its seconds")
    for job, seconds in pairs:
        check_cluster(machine, job)
        if not (math.isfinite(seconds) and seconds > 0.0):
            raise InputError(f"a measured step of {job.plan.model} is {seconds!r} s, expected a positive number")
    first = np.array([float(np.asarray(getattr(pairs[0][0].software, name))) for name in NAMES])
    owns = [seconds_of_job(predictor, machine, job, run=once) for job, _ in pairs]
    measured = np.log([seconds for _, seconds in pairs])
    widths, at = np.array([WIDTHS[name] for name in NAMES]), np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        found = [_log_seconds(at, first, own, job) for own, (job, _) in zip(owns, pairs, strict=True)]
        values, slopes = np.array([value for value, _ in found]), np.stack([slope for _, slope in found])
        spread = slopes * widths**2
        left = measured - values + slopes @ at
        at = spread.T @ np.linalg.solve(spread @ slopes.T + noise**2 * np.eye(len(pairs)), left)
    return Software(**dict(zip(NAMES, (first * np.exp(at)).tolist(), strict=True)))


def _log_seconds(at: np.ndarray, first: np.ndarray, own: Seconds, job: Job) -> tuple[float, np.ndarray]:
    """ln of a step, and its slopes by the logarithms of the software's numbers."""

    def seconds(logs: Array) -> Any:
        numbers = dict(zip(NAMES, jnp.asarray(first) * jnp.exp(logs), strict=True))
        pipeline, tail, _ = compose(own, Software(**numbers), job.plan)
        return jnp.log(pipeline + tail)

    value, slope = jax.value_and_grad(seconds)(jnp.asarray(at, jnp.float32))
    return float(value), np.asarray(slope, np.float64)
