"""Slopes: what a percent of each figure of a machine does to the times that requests meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.hardware.cluster import Cluster, Machine, as_cluster, on_device
from neusight_jax.hardware.variant import fields_of, vary
from neusight_jax.hardware.variant import figure as figure_of
from neusight_jax.model.predictor import Predictor
from neusight_jax.serving.simulators import Run
from neusight_jax.serving.steady import Demand, steady
from neusight_jax.serving.steps import Steps
from neusight_jax.serving.times import Engine, Times, bounded_times, times


def elasticities(
    predictor: Predictor, machine: Machine, steps: Steps, engine: Engine, request: Demand, requests: float, most: float
) -> tuple[Any, Any]:
    """Percent that TTFT and TPOT change for a percent of each figure, as two machines of elasticities.

    At one load, below saturation, in closed form; 0 for figures that are 0.

    Args:
      predictor: forecasts the kernels.
      machine: GPU or cluster whose figures are changed, scalars.
      steps: of the replica's layout.
      engine: numbers of the engine's own time.
      request: demand of the requests.
      requests: that the replica holds.
      most: of them that run at once; the others wait.
    """

    def logs(point: Machine) -> jax.Array:
        state = steady(times(predictor, point, steps, engine), request, requests, most)
        return jnp.log(jnp.stack([state.ttft_s, state.tpot_s]))

    figures = on_device(machine)
    slopes = jax.jit(jax.jacrev(logs))(figures)
    first, further = (
        jax.tree.map(lambda slope, figure, row=row: slope[row] * jnp.nan_to_num(figure), slopes, figures)
        for row in (0, 1)
    )
    return first, further


STEP = 0.05
"""Of a figure's logarithm to either side: wide enough that whole steps of requests do not show."""


def run_elasticities(
    predictor: Predictor,
    machine: Machine,
    steps: Steps,
    engine: Engine,
    run: Callable[[Times], Run],
    figures: Sequence[str],
    percentile: float = 50.0,
) -> dict[str, dict[str, float]]:
    """Percent that TTFT and TPOT change for a percent of each figure, where an engine runs the load: central
    differences with common random numbers, so that chance falls out.

    Args:
      run: a load on step times with the same arrivals every time, as `simulators.run` does; below saturation, where
        times follow the machine and not the queue.
      figures: names of fields of a GPU or a topology; percentile: 50 or 95 of requests.
    Returns: by figure, `ttft_s` and `tpot_s`.
    Raises: `InputError` for a figure that the machine has not.
    """
    cluster, key = as_cluster(machine), f"p{percentile:g}"

    def logs(figure: str, step: float) -> np.ndarray:
        timing = bounded_times(predictor, _scaled(cluster, figure, math.exp(step)), steps, engine)[0]
        outcome = run(timing)
        return np.log([outcome.ttft_s[key], outcome.tpot_s[key]])

    slopes = {figure: (logs(figure, STEP) - logs(figure, -STEP)) / (2.0 * STEP) for figure in figures}
    return {figure: dict(zip(("ttft_s", "tpot_s"), map(float, slope), strict=True)) for figure, slope in slopes.items()}


def _scaled(cluster: Cluster, figure: str, factor: float) -> Cluster:
    """A cluster with one figure of its topology or its GPU scaled."""
    value = float(np.asarray(figure_of(cluster, figure))) if figure in fields_of(cluster) else math.nan
    if not value > 0.0:
        raise InputError(f"{figure} is no figure of this machine; expected one that is a positive number")
    return vary(cluster, {figure: value * factor}, peaks_follow=False)
