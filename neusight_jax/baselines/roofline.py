"""Textbook roofline: max(FLOP / peak, bytes / bandwidth), every byte from memory, no launch; and what baselines share.

Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.hardware.cluster import Machine, gpu_of, linked_topology
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family, Work
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.roofline import (
    Isolated,
    LowerBounds,
    Relaxation,
    Scalar,
    element_bytes,
    lower_bounds,
    peak_flop_per_s,
)
from neusight_jax.model.terms import KernelTerms
from neusight_jax.model.tiles import largest_tile


class Bounded(NamedTuple):
    """Kernels of one family on a GPU, with their bounds.

    Attributes:
      gpu, work: the machine, and what the kernels ask of it.
      peak: of the kernels' arithmetic path, FLOP/s.
      bounds: lower bounds; memory_s: all bytes at full bandwidth, seconds.
    """

    gpu: GPU
    work: Work
    peak: Float[Array, " kernel"]
    bounds: LowerBounds
    memory_s: Float[Array, " kernel"]

    def terms(
        self,
        body_s: Float[Array, " kernel"],
        launch_s: Scalar = 0.0,
        compute_s: Array | None = None,
        memory_s: Array | None = None,
    ) -> KernelTerms:
        """A forecast of body and launch, the body never below the speed of light; its parts default to the bounds."""
        body_s = jnp.maximum(body_s, self.bounds.speed_of_light_s)
        launch_s = jnp.broadcast_to(jnp.asarray(launch_s, body_s.dtype), body_s.shape)
        compute_s = self.bounds.compute_s if compute_s is None else compute_s
        memory_s = self.memory_s if memory_s is None else memory_s
        tile = largest_tile(self.gpu, self.work)
        return KernelTerms(body_s + launch_s, self.bounds, compute_s, memory_s, launch_s, tile)


def bounded(family: Family, machine: Machine, batch: KernelBatch) -> Bounded:
    """Kernels of one family on a machine, with their bounds."""
    gpu = gpu_of(machine)
    work = family.work(batch.dims, element_bytes(batch.dtype))
    peak = peak_flop_per_s(gpu, family, batch.dtype)
    return Bounded(
        gpu,
        work,
        peak,
        lower_bounds(gpu, work, peak, linked_topology(family, machine)),
        work.bytes_moved / gpu.mem_bytes_per_s,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RooflinePredictor:
    """The textbook roofline; it has no parameters."""

    def covers(self, family: Family) -> bool:
        """All families."""
        return True

    def terms(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelTerms:
        """Forecast kernels of one family; `isolated` and `relaxation` change nothing."""
        found = bounded(family, machine, batch)
        return found.terms(found.bounds.roofline_s)
