"""Untrained baselines of a given size: the templates their checkpoints are read into."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from neusight_jax.baselines.gbt import LEAVES, TREES, Forest, GBTPredictor
from neusight_jax.baselines.habitat_mlp import HabitatMLPPredictor
from neusight_jax.baselines.li import LiLine, LiPredictor
from neusight_jax.baselines.roofline3 import Roofline3Predictor, ThreeNumbers
from neusight_jax.kernels.family import Family
from neusight_jax.model.terms import Predictor
from neusight_jax.model.utilization import init_network

Families = Mapping[str, Family]
GPU_FIGURES = 4
"""GPU figures `habitat-mlp` sees; beside them and the dims, the element size and whether a kernel runs alone."""


def _habitat_mlp(families: Families, hidden: tuple[int, ...]) -> Predictor:
    key, sizes = jax.random.key(0), {name: len(family.dims) + 2 + GPU_FIGURES for name, family in families.items()}
    return HabitatMLPPredictor(
        {name: init_network(key, jnp.zeros((2, size)), hidden, 1, members=1) for name, size in sizes.items()}
    )


TEMPLATES: dict[str, Callable[[Families, tuple[int, ...]], Predictor]] = {
    "roofline3": lambda families, _: Roofline3Predictor({name: ThreeNumbers(*jnp.zeros(3)) for name in families}),
    "li": lambda families, _: LiPredictor({name: LiLine(*jnp.zeros(4)) for name in families}),
    "habitat-mlp": _habitat_mlp,
    "gbt": lambda families, _: GBTPredictor(
        {name: Forest(*jnp.zeros((5, TREES, 2 * LEAVES - 1))) for name in families}
    ),
}
"""Kind of a checkpoint's card -> template, from its families and hidden layers."""
