"""What every predictor says of kernels, and the interface it says it through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.hardware.cluster import Machine
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.roofline import Isolated, LowerBounds, Relaxation
from neusight_jax.model.tiles import ChosenTile


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelTerms:
    """A forecast of kernels with its parts, all [kernel].

    Attributes:
      seconds: forecast latency of one launch.
      bounds: lower bounds.
      compute_s, memory_s: time of the arithmetic side (its limits included) and of memory, before they overlap; the
        way between L2 and SMs is in neither.
      launch_s: what is added before and after the body: launch and serial overhead.
      tile: the tile reported.
    """

    seconds: Float[Array, " kernel"]
    bounds: LowerBounds
    compute_s: Float[Array, " kernel"]
    memory_s: Float[Array, " kernel"]
    launch_s: Float[Array, " kernel"]
    tile: ChosenTile

    @property
    def utilization(self) -> Float[Array, " kernel"]:
        """Share of the speed of light reached while the kernel runs, in (0, 1].

        An ensemble mean keeps it at most 1: a geometric mean of sums is at least the sum of the geometric means.
        """
        return jnp.minimum(self.bounds.speed_of_light_s / (self.seconds - self.launch_s), 1.0)


@runtime_checkable
class Predictor(Protocol):
    """What every predictor and baseline is: a pytree that forecasts the families it covers."""

    def covers(self, family: Family) -> bool:
        """Whether it can forecast a family; a checkpoint covers those it was trained on."""
        ...

    def terms(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelTerms:
        """Forecast the kernels of one family on one machine."""
        ...
