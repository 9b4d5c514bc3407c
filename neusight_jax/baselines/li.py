"""Li et al.: latency is linear in work on every GPU, and the slope of a new GPU is read off a line over the known ones.

    t = a · work + c                     per family and known GPU; work = FLOP of matrix products, bytes of the rest
    1 / a = p · bandwidth + q            over the known GPUs; on a new one t = work / (p · bandwidth + q)

Two variants share this record (`LiLine`), and differ in how they are fitted (`training.evaluation.baselines`):

- `li-published`, as NeuSight's authors coded it: ordinary least squares on seconds, which the largest kernels decide;
  bandwidth for every family, so that the arithmetic peak plays no part; c = 0 on a new GPU.
- `li`: relative least squares, c ≥ 0 (the median over the known GPUs, paid by kernels that run alone), the slope of
  matrix products on peak FLOP/s, of the rest on bandwidth, p, q ≥ 0.

Gradients: through work, bandwidth and peak. Source: Li, Sun, Jog, "Path Forward Beyond Simulators:
Fast and Accurate GPU Execution Time Prediction for DNN Workloads", MICRO 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.baselines.roofline import bounded
from neusight_jax.hardware.cluster import Machine, gpu_of
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.roofline import Isolated, Relaxation, element_bytes
from neusight_jax.model.terms import KernelTerms


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LiLine:
    """The line of one family: achieved rate = per_bandwidth · bandwidth + per_peak · peak + offset, work per second.

    Attributes:
      per_bandwidth: work per byte of bandwidth (p of a family on bandwidth, else 0).
      per_peak: work per FLOP of peak (p of a family on peak, else 0).
      offset: q, work per second.
      floor_s: c, seconds; paid by kernels that run alone.
    """

    per_bandwidth: Float[Array, ""]
    per_peak: Float[Array, ""]
    offset: Float[Array, ""]
    floor_s: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LiPredictor:
    """A line for every family with measurements."""

    families: dict[str, LiLine] = field(default_factory=dict)

    def covers(self, family: Family) -> bool:
        """Families with a line."""
        return family.network in self.families

    def terms(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelTerms:
        """Forecast kernels of one family; see `latency.kernel_latency`. `relaxation` changes nothing.

        A line that falls to zero or below far from the known GPUs forecasts the speed of light.
        """
        gpu = gpu_of(machine)
        line = self.families[family.network]
        found = bounded(family, machine, batch)
        rate = line.per_bandwidth * gpu.mem_bytes_per_s + line.per_peak * found.peak + line.offset
        body_s = li_work(family, batch) / jnp.where(rate > 0.0, rate, jnp.inf)
        return found.terms(body_s, line.floor_s * jnp.asarray(isolated, dtype=float))


def li_work(family: Family, batch: KernelBatch) -> Float[Array, " kernel"]:
    """FLOP of matrix products, bytes moved of everything else."""
    work = family.work(batch.dims, element_bytes(batch.dtype))
    return work.flop if family.matrix else work.bytes_moved
