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
from neusight_jax.terms import Predictor
from neusight_jax.utilization import init_network

Families = Mapping[str, Family]
GPU_FIGURES = 4
"""GPU figures `habitat-mlp` sees; beside them and the dims, the element size and whether a kernel runs alone."""


def _gbt(families: Families, hidden: tuple[int, ...]) -> Predictor:
    nodes = jnp.zeros((TREES, 2 * LEAVES - 1))
    return GBTPredictor({name: Forest(nodes, nodes, nodes, nodes, nodes) for name in families})


def _li(families: Families, hidden: tuple[int, ...]) -> Predictor:
    zero = jnp.zeros(())
    return LiPredictor({name: LiLine(zero, zero, zero, zero) for name in families})


def _roofline3(families: Families, hidden: tuple[int, ...]) -> Predictor:
    zero = jnp.zeros(())
    return Roofline3Predictor({name: ThreeNumbers(zero, zero, zero) for name in families})


def _habitat_mlp(families: Families, hidden: tuple[int, ...]) -> Predictor:
    inputs = {name: jnp.zeros((2, len(family.dims) + 2 + GPU_FIGURES)) for name, family in families.items()}
    return HabitatMLPPredictor(
        {name: init_network(jax.random.key(0), inputs[name], hidden, 1, members=1) for name in families}
    )


TEMPLATES: dict[str, Callable[[Families, tuple[int, ...]], Predictor]] = {
    "roofline3": _roofline3,
    "li": _li,
    "habitat-mlp": _habitat_mlp,
    "gbt": _gbt,
}
"""Kind of a checkpoint's card -> template, from its families and hidden layers."""
