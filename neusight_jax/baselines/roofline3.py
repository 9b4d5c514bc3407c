"""Three-parameter roofline: max(compute / a, memory / b) + c, three numbers per family fitted to measurements.

a and b are the efficiencies of arithmetic and of memory, c the launch floor an isolated kernel pays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.baselines.roofline import bounded
from neusight_jax.hardware.cluster import Machine
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.roofline import Isolated, Relaxation
from neusight_jax.model.terms import KernelTerms


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ThreeNumbers:
    """Efficiencies as raw values before a sigmoid, and the floor in log seconds."""

    raw_compute: Float[Array, ""]
    raw_memory: Float[Array, ""]
    log_floor_s: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Roofline3Predictor:
    """Three numbers for every family with measurements."""

    families: dict[str, ThreeNumbers] = field(default_factory=dict)

    def covers(self, family: Family) -> bool:
        """Families with fitted numbers."""
        return family.network in self.families

    def terms(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelTerms:
        """Forecast kernels of one family; the floor is paid by isolated kernels only. `relaxation` changes nothing."""
        numbers = self.families[family.network]
        found = bounded(family, machine, batch)
        compute_s = found.bounds.compute_s / jax.nn.sigmoid(numbers.raw_compute)
        memory_s = found.memory_s / jax.nn.sigmoid(numbers.raw_memory)
        launch_s = jnp.exp(numbers.log_floor_s) * jnp.asarray(isolated, dtype=float)
        return found.terms(jnp.maximum(compute_s, memory_s), launch_s, compute_s, memory_s)
