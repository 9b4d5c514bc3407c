"""Habitat's networks (`habitat-mlp`): one MLP per family takes dims and GPU figures straight to a latency.

    log t = MLP(log dims, element size, alone?; log memory size, log bandwidth, log SMs, log peak)

As in the paper the network sees the same four GPU figures as absolute numbers, so nothing holds it off the known GPUs.
Deliberate differences, all in its favour or for size: logarithms in and out (the paper z-scores raw values and clips a
negative latency to 0), 4 × 64 smooth units (8 × 1024 ReLU), the log error every system here is fitted by (the paper's
is a mean percentage), inputs clipped to ± 3 deviations. Used directly, not as a ratio to a measured time; `scale_trace`
offers the ratio form with any checkpoint. Gradients: reach the four figures through the network, with any sign.
Source: Yu, Gao, Golikov, Pekhimenko, "Habitat", USENIX ATC 2021, section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.baselines.roofline import bounded
from neusight_jax.hardware.cluster import Machine, gpu_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.roofline import Isolated, Relaxation, element_bytes, peak_flop_per_s
from neusight_jax.model.terms import KernelTerms
from neusight_jax.model.utilization import Network, apply_network


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HabitatMLPPredictor:
    """A network for every family with measurements."""

    networks: dict[str, Network] = field(default_factory=dict)

    def covers(self, family: Family) -> bool:
        """Families whose network was trained."""
        return family.network in self.networks

    def terms(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelTerms:
        """Forecast kernels of one family, never below the speed of light. `relaxation` changes nothing."""
        inputs = habitat_inputs(family, gpu_of(machine), batch, isolated)
        log_s = jnp.mean(apply_network(self.networks[family.network], inputs), axis=0)[:, 0]
        return bounded(family, machine, batch).terms(jnp.exp(log_s))


def habitat_inputs(family: Family, gpu: GPU, batch: KernelBatch, isolated: Isolated) -> Float[Array, "kernel feature"]:
    """Log dims, log element size, 1 for a kernel that runs alone, and the logarithms of four GPU figures.

    The dims are those of the family whose network it is: what another family adds to them was in no measurement.
    """
    size = element_bytes(batch.dtype)
    peak = peak_flop_per_s(gpu, family, batch.dtype)
    dims = [jnp.log(jnp.maximum(batch.dims[name], 0.1)) for name in FAMILIES[family.network].dims]
    figures = [jnp.log(jnp.maximum(item, 1.0)) for item in (gpu.mem_bytes, gpu.mem_bytes_per_s, gpu.num_sms, peak)]
    columns = [*dims, jnp.log(size), jnp.asarray(isolated, dtype=float), *figures]
    return jnp.stack([jnp.broadcast_to(column, size.shape) for column in columns], axis=-1)
