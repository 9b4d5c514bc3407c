"""The seed predictor, `neusight`: the paper's equations with its slips mended.

    roofline    = min(peak, padded FLOP / bytes · bandwidth)
    utilization = σ(γ) · (1 − σ(α) / waves)              positive and at most 1 by construction
    time        = waves · block FLOP · SMs / (roofline · utilization)

γ, α come from a network that sees four logarithms of (kernel, GPU): block FLOP over peak per SM, block bytes over
bandwidth per SM, and bytes of all waves over memory and L2 per SM. One network per family, with one for convolutions,
which the paper has not; memory traffic runs at full bandwidth, and there is no launch term. Deliberate differences: SI
units throughout (the original mixes GiB and GB), σ(γ)(1 − σ(α)/waves) in place of σ(γ) − σ(α)/waves (which can be ≤ 0),
a learned tile choice in place of a nearest-neighbour table. Source: Lee, Phanishayee, Mahajan, ASPLOS 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.hardware.cluster import Machine, gpu_of, topology_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.heads import ChosenTile, TileChoice, choose_tile
from neusight_jax.model.network import Network, apply_network
from neusight_jax.model.predictor import KernelForecast
from neusight_jax.model.roofline import Isolated, Relaxation, element_bytes, lower_bounds, peak_flop_per_s

OUTPUTS = 2
"""Network outputs: γ and α."""
MOST_OUTPUT = 9.0
"""Largest γ and −γ, α and −α: a launch alone leaves some 1e-4 of a roofline, and no kernel needs less."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NeuSightPredictor:
    """Networks and tile choices of the families that have them."""

    networks: dict[str, Network] = field(default_factory=dict)
    tiles: dict[str, TileChoice] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<NeuSightPredictor: {', '.join(self.networks) or 'no families'}>"

    def covers(self, family: Family) -> bool:
        """Families whose network was trained."""
        return family.network in self.tiles

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelForecast:
        """Forecast kernels of one family; see `latency.kernel_latency`. `isolated` changes nothing.

        Args:
          family, machine, batch, isolated, relaxation: as `Predictor.forecast_kernels`.
        """
        gpu = gpu_of(machine)
        size = element_bytes(batch.dtype)
        work = family.work(batch.dims, size)
        peak = peak_flop_per_s(gpu, family, batch.dtype)
        bounds = lower_bounds(gpu, work, peak, topology_of(machine) if family.linked else None, isolated)
        tile = choose_tile(self.tiles[family.network], gpu, work, family.features(batch.dims, size), relaxation)
        zero = jnp.zeros_like(work.flop)
        if family.network != family.name:
            seconds = jnp.maximum(bounds.roofline_s, bounds.speed_of_light_s)
            return KernelForecast(seconds, bounds, bounds.compute_s, bounds.roofline_s, zero, tile)
        padded = tile.blocks * tile.block_flop
        roofline = jnp.minimum(peak, padded / work.bytes_moved * gpu.mem_bytes_per_s)
        inputs = neusight_inputs(gpu, tile, peak)
        outputs = jnp.mean(apply_network(self.networks[family.network], inputs), axis=0)
        gamma, alpha = MOST_OUTPUT * jnp.tanh(outputs.T / MOST_OUTPUT)
        # 1 − σ(α) is σ(−α): a difference would round to nothing with one wave, and teach nothing there.
        utilization = jax.nn.sigmoid(gamma) * (tile.waves - 1.0 + jax.nn.sigmoid(-alpha)) / tile.waves
        seconds = tile.waves * tile.block_flop * gpu.num_sms / (roofline * utilization)
        seconds = jnp.maximum(seconds, bounds.speed_of_light_s)
        memory_s = work.bytes_moved / gpu.mem_bytes_per_s
        return KernelForecast(seconds, bounds, padded / peak, memory_s, zero, tile)


def neusight_inputs(gpu: GPU, tile: ChosenTile, peak: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    """The paper's four network inputs, logarithms to base 2."""
    wave_bytes = tile.waves * tile.block_bytes
    ratios = (
        tile.block_flop * gpu.num_sms / peak,
        tile.block_bytes * gpu.num_sms / gpu.mem_bytes_per_s,
        wave_bytes * gpu.num_sms / gpu.mem_bytes,
        wave_bytes * gpu.num_sms / gpu.l2_bytes,
    )
    return jnp.stack([jnp.log2(jnp.maximum(ratio, 1e-30)) for ratio in ratios], axis=-1)
