"""Speed of light: max(FLOP / peak, bytes / bandwidth), every byte from memory, no launch.

Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from neusight_jax.gpu import GPU
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.roofline import Isolated, Scalar, element_bytes, light, peak_flop_per_s
from neusight_jax.terms import KernelTerms
from neusight_jax.tiles import largest_tile


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RooflinePredictor:
    """The textbook roofline; it has no parameters."""

    def covers(self, family: Family) -> bool:
        """All families."""
        return True

    def terms(
        self, family: Family, gpu: GPU, batch: KernelBatch, *, isolated: Isolated, relaxation: Scalar = 0.0
    ) -> KernelTerms:
        """Forecast kernels of one family; `isolated` and `relaxation` change nothing."""
        size = element_bytes(batch.dtype)
        work = family.work(batch.dims, size)
        bounds = light(gpu, work, peak_flop_per_s(gpu, family, batch.dtype))
        seconds = jnp.maximum(bounds.roofline_s, bounds.speed_of_light_s)
        memory_s = work.bytes_moved / gpu.mem_bytes_per_s
        return KernelTerms(
            seconds, bounds, bounds.compute_s, memory_s, jnp.zeros_like(seconds), largest_tile(gpu, work)
        )
