"""Habitat's wave scaling (`habitat-wave`): the time of a kernel measured on one GPU, carried to another.

With B thread blocks, W = SMs × resident blocks per SM, D = memory bandwidth, C = clock, o the origin, d the target:

    general      t_d = t_o · ⌈B / W_d⌉ / ⌈B / W_o⌉ · (D_o / D_d · W_d / W_o)^γ · (C_o / C_d)^(1 − γ)
    simplified   t_d = t_o · (D_o / D_d)^γ · (W_o / W_d · C_o / C_d)^(1 − γ)              for many waves

γ in [0, 1] says how memory-bound a kernel of intensity x is on the target, whose ridge point is R:

    γ = 1 − x / 2R  for x < R,    R / 2x  otherwise

Gradients: everywhere but through the wave counts of the general form. The predictor looks a kernel up among those
measured on the origin (same op, dims and dtype); one that was not measured there gets the target's roofline.
Source: Yu, Gao, Golikov, Pekhimenko, "Habitat", USENIX ATC 2021, section 3.3.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from neusight_jax.baselines.roofline import bounded
from neusight_jax.hardware.cluster import Machine, gpu_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.roofline import Isolated, Relaxation
from neusight_jax.model.terms import KernelTerms
from neusight_jax.model.tiles import largest_tile

RESIDENT_BLOCKS = 8.0
"""Blocks an SM holds where nobody has said: 2048 threads in blocks of 256."""


def memory_boundedness(intensity: Array, ridge: Array) -> Array:
    """γ, from a kernel's FLOP per byte and the target's ridge point (peak over bandwidth), in [0, 1]."""
    ratio = jnp.asarray(intensity) / jnp.asarray(ridge)
    return jnp.where(ratio < 1.0, 1.0 - 0.5 * ratio, 0.5 / jnp.maximum(ratio, 1.0))


def wave_ratio(
    origin: GPU,
    target: GPU,
    gamma: Array,
    blocks: Array | float | None = None,
    origin_resident: Array | float = RESIDENT_BLOCKS,
    target_resident: Array | float = RESIDENT_BLOCKS,
) -> Array:
    """Time on the target over time on the origin, by wave scaling.

    Args:
      origin, target: figures; gamma: `memory_boundedness`.
      blocks: thread blocks of the launch for the general form; None for the simplified one.
      origin_resident, target_resident: blocks one SM holds at a time (occupancy).
    """
    bandwidth = jnp.asarray(origin.mem_bytes_per_s) / jnp.asarray(target.mem_bytes_per_s)
    clock = jnp.asarray(origin.clock_hz) / jnp.asarray(target.clock_hz)
    wave_origin, wave_target = origin.num_sms * origin_resident, target.num_sms * target_resident
    waves = jnp.asarray(wave_target) / jnp.asarray(wave_origin)
    if blocks is None:
        return bandwidth**gamma * (clock / waves) ** (1.0 - gamma)
    rounds = jnp.ceil(blocks / wave_target) / jnp.ceil(blocks / wave_origin)
    return rounds * (bandwidth * waves) ** gamma * clock ** (1.0 - gamma)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeasuredKernels:
    """Kernels of one family measured on the origin, [row].

    Attributes:
      dims: the family's dims [row, dim]; op, dtype: indices.
      seconds: measured latency.
    """

    dims: Float[Array, "row dim"]
    op: Int[Array, " row"]
    dtype: Int[Array, " row"]
    seconds: Float[Array, " row"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["origin", "families"], meta_fields=["general"])
@dataclass(frozen=True)
class WavePredictor:
    """Wave scaling of kernels measured on one GPU.

    Attributes:
      origin: where they were measured.
      families: the measured kernels.
      general: the general equation, else the simplified one.
    """

    origin: GPU
    families: dict[str, MeasuredKernels] = field(default_factory=dict)
    general: bool = True

    def covers(self, family: Family) -> bool:
        """Families with measured kernels."""
        return family.name in self.families

    def terms(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelTerms:
        """Scale the kernels that were measured; `isolated` and `relaxation` change nothing."""
        gpu = gpu_of(machine)
        known = self.families[family.name]
        same = (batch.op[:, None] == known.op) & (batch.dtype[:, None] == known.dtype)
        for position, name in enumerate(family.dims):
            same &= batch.dims[name][:, None] == known.dims[:, position]
        measured_s = jnp.take(known.seconds, jnp.argmax(same, axis=1))
        found = bounded(family, machine, batch)
        gamma = memory_boundedness(found.work.flop / found.work.bytes_moved, found.peak / gpu.mem_bytes_per_s)
        blocks = largest_tile(gpu, found.work).blocks if self.general else None
        ratio = wave_ratio(self.origin, gpu, gamma, blocks)
        return found.terms(jnp.where(jnp.any(same, axis=1), measured_s * ratio, found.bounds.roofline_s))
