"""Gradient-boosted trees (`gbt`): what a table learner makes of the same inputs, without any physics of its own.

    log t = Σ_trees leaf(inputs)

Inputs are the family's shape features, the logarithms of every physical time the `mixture` mixes and of the roofline,
whether the kernel runs alone, and in a backward pass where that matters. LightGBM (extra `gbt`) fits the trees; the
forecast needs no library: trees are arrays, walked inside `jit`. Gradients: a sum of steps, so they are zero.
Source: Friedman, Annals of Statistics 2001; Ke et al., "LightGBM", NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.baselines.roofline import bounded
from neusight_jax.hardware.cluster import Machine, gpu_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.heads import launched, most_times, physical_times
from neusight_jax.model.roofline import Isolated, Relaxation, element_bytes
from neusight_jax.model.terms import KernelTerms

TREES, LEAVES = 300, 31
"""Trees of a forest, and leaves of a tree, at most."""
MAX_DEPTH = 8
"""Splits on the way to a leaf, at most; a walk takes exactly as many steps."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forest:
    """Trees of one family as arrays [tree, node]; node 0 is the root, a leaf is its own child. Whole numbers as floats.

    Attributes:
      feature: input a node looks at; threshold: a value at or below it goes left.
      left, right: positions of the children.
      value: what a leaf adds, log seconds.
    """

    feature: Float[Array, "tree node"]
    threshold: Float[Array, "tree node"]
    left: Float[Array, "tree node"]
    right: Float[Array, "tree node"]
    value: Float[Array, "tree node"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GBTPredictor:
    """A forest for every family with measurements."""

    families: dict[str, Forest] = field(default_factory=dict)

    def covers(self, family: Family) -> bool:
        """Families with a fitted forest."""
        return family.network in self.families

    def terms(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelTerms:
        """Forecast kernels of one family; see `latency.kernel_latency`. `relaxation` changes nothing."""
        log_s = walk(self.families[family.network], gbt_inputs(family, gpu_of(machine), batch, isolated))
        return bounded(family, machine, batch).terms(jnp.exp(log_s))


def gbt_inputs(family: Family, gpu: GPU, batch: KernelBatch, isolated: Isolated) -> Float[Array, "kernel feature"]:
    """Shape features, log physical times, log roofline, which tiles the library launches where the kernels say whose it
    is, 1 for a kernel that runs alone."""
    found = bounded(family, gpu, batch)
    at = launched(gpu, family, found.work, found.peak, batch.dtype)
    columns = jnp.concatenate([*physical_times(at).values(), *most_times(at).values()], axis=1)
    roofline_s = found.bounds.roofline_s[:, None]
    alone = jnp.broadcast_to(jnp.asarray(isolated, dtype=float), roofline_s.shape[:1])[:, None]
    logs = jnp.log(jnp.maximum(jnp.concatenate([columns, roofline_s], axis=1), 1e-30))
    return jnp.concatenate([family.features(batch.dims, element_bytes(batch.dtype)), logs, alone], axis=1)


def walk(forest: Forest, inputs: Float[Array, "kernel feature"]) -> Float[Array, " kernel"]:
    """Sum of the leaves every row falls into."""
    feature, left, right = (item.astype(int) for item in (forest.feature, forest.left, forest.right))

    def leaves(row: Array) -> Array:
        def step(_: int, at: Array) -> Array:
            tree = jnp.arange(at.shape[0])
            goes_left = row[feature[tree, at]] <= forest.threshold[tree, at]
            return jnp.where(goes_left, left[tree, at], right[tree, at])

        at = jax.lax.fori_loop(0, MAX_DEPTH, step, jnp.zeros(feature.shape[0], int))
        return jnp.sum(jnp.take_along_axis(forest.value, at[:, None], axis=1))

    summed: Array = jax.vmap(leaves)(inputs)
    return summed
