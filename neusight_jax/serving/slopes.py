"""Slopes: what a percent of each figure of a machine does to the times that requests meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from neusight_jax.cluster import Machine, on_device
from neusight_jax.serving.engine import Engine
from neusight_jax.serving.steady import Demand, steady
from neusight_jax.serving.steps import Steps
from neusight_jax.serving.times import times
from neusight_jax.terms import Predictor


def elasticities(
    predictor: Predictor, machine: Machine, steps: Steps, engine: Engine, asked: Demand, requests: float, most: float
) -> tuple[Any, Any]:
    """Percent that TTFT and TPOT change for a percent of each figure, as two machines of elasticities.

    At one load, below saturation, in closed form; 0 for figures that are 0.
    """

    def logs(own: Machine) -> jax.Array:
        found = steady(times(predictor, own, steps, engine), asked, requests, most)
        return jnp.log(jnp.stack([found.ttft_s, found.tpot_s]))

    own = on_device(machine)
    slopes = jax.jit(jax.jacrev(logs))(own)
    first, further = (
        jax.tree.map(lambda slope, figure, row=row: slope[row] * jnp.nan_to_num(figure), slopes, own) for row in (0, 1)
    )
    return first, further
