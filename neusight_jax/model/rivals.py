"""Baselines that are fitted: each a row of `RIVALS`, its equation and the parameters it has for every family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from neusight_jax.hardware.cluster import Machine, gpu_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.heads import largest_tile, launched, most_times, physical_times
from neusight_jax.model.network import Network, apply_network, init_network
from neusight_jax.model.predictor import Bounded, KernelForecast, bounded
from neusight_jax.model.roofline import Isolated, Relaxation, element_bytes, peak_flop_per_s

Equation: TypeAlias = Callable[[Any, Family, Bounded, KernelBatch, Isolated], KernelForecast]
"""Forecast of kernels of one family: its fitted parameters, the family, the kernels with their bounds, the same kernels
as a batch, and whether they run alone."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["families"], meta_fields=["kind"])
@dataclass(frozen=True)
class FittedBaseline:
    """A baseline with what was fitted of it.

    Attributes:
      kind: key of `RIVALS`.
      families: parameters by family.
    """

    kind: str
    families: dict[str, Any]

    def covers(self, family: Family) -> bool:
        """Families with fitted parameters."""
        return family.network in self.families

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelForecast:
        """Forecast kernels of one family, never below the speed of light. `relaxation` changes nothing.

        Args: as of `Predictor.forecast_kernels`.
        """
        kernels = bounded(family, machine, batch)
        return RIVALS[self.kind].equation(self.families[family.network], family, kernels, batch, isolated)


# Gradient-boosted trees (`gbt`): what a table learner makes of the same inputs, without any physics of its own.
#
#     log t = Σ_trees leaf(inputs)
#
# Inputs are the family's shape features, the logarithms of every physical time the `mixture` mixes and of the roofline,
# whether the kernel runs alone, and in a backward pass where that matters. LightGBM (extra `gbt`) fits the trees; the
# forecast needs no library: trees are arrays, walked inside `jit`. Gradients: a sum of steps, so they are zero.
# Source: Friedman, Annals of Statistics 2001; Ke et al., "LightGBM", NeurIPS 2017.

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


def _gbt(forest: Forest, family: Family, kernels: Bounded, batch: KernelBatch, isolated: Isolated) -> KernelForecast:
    return kernels.forecast(jnp.exp(walk(forest, gbt_inputs(family, kernels, batch, isolated))))


def gbt_inputs(
    family: Family, kernels: Bounded, batch: KernelBatch, isolated: Isolated
) -> Float[Array, "kernel feature"]:
    """Inputs of the trees: shape features, log physical times, log roofline, and whether a kernel runs alone.

    Which tiles the library launches counts where the kernels say whose library it is.

    Args:
      family: of all kernels; its work and tiles give the times.
      kernels: with their bounds; batch: the same kernels, their dims and dtypes.
      isolated: 1 for a kernel that runs alone; one answer, or [kernel].
    """
    at = launched(kernels.gpu, family, kernels.work, kernels.peak, batch.dtype)
    columns = jnp.concatenate([*physical_times(at).values(), *most_times(at).values()], axis=1)
    roofline_s = kernels.bounds.roofline_s[:, None]
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


# Habitat's networks (`habitat-mlp`): one MLP per family takes dims and GPU figures straight to a latency.
#
#     log t = MLP(log dims, element size, alone?; log memory size, log bandwidth, log SMs, log peak)
#
# As in the paper the network sees the same four GPU figures as absolute numbers, so nothing holds it off the known
# GPUs. Deliberate differences, all in its favour or for size: logarithms in and out (the paper z-scores raw values and
# clips a negative latency to 0), 4 × 64 smooth units (8 × 1024 ReLU), the log error every system here is fitted by (the
# paper's is a mean percentage), inputs clipped to ± 3 deviations. Used directly, not as a ratio to a measured time;
# `scale_trace` offers the ratio form with any checkpoint. Gradients: reach the four figures through the network, with
# any sign.
# Source: Yu, Gao, Golikov, Pekhimenko, "Habitat", USENIX ATC 2021, section 3.4.


def _habitat_mlp(
    network: Network, family: Family, kernels: Bounded, batch: KernelBatch, isolated: Isolated
) -> KernelForecast:
    log_s = jnp.mean(apply_network(network, habitat_inputs(family, kernels.gpu, batch, isolated)), axis=0)[:, 0]
    return kernels.forecast(jnp.exp(log_s))


def habitat_inputs(family: Family, gpu: GPU, batch: KernelBatch, isolated: Isolated) -> Float[Array, "kernel feature"]:
    """Log dims, log element size, 1 for a kernel that runs alone, and the logarithms of four GPU figures.

    Args:
      family: of all kernels; the dims are those of the family whose network it is: what another one adds to them was in
        no measurement.
      gpu: its figures, scalars or arrays [kernel].
      isolated: 1 for a kernel that runs alone; one answer, or [kernel].
    """
    size = element_bytes(batch.dtype)
    peak = peak_flop_per_s(gpu, family, batch.dtype)
    # A dim may be 0, and its logarithm must be finite.
    dims = [jnp.log(jnp.maximum(batch.dims[name], 0.1)) for name in FAMILIES[family.network].dims]
    figures = [jnp.log(jnp.maximum(item, 1.0)) for item in (gpu.mem_bytes, gpu.mem_bytes_per_s, gpu.num_sms, peak)]
    columns = [*dims, jnp.log(size), jnp.asarray(isolated, dtype=float), *figures]
    return jnp.stack([jnp.broadcast_to(column, size.shape) for column in columns], axis=-1)


# Habitat's wave scaling (`habitat-wave`): the time of a kernel measured on one GPU, carried to another.
#
# With B thread blocks, W = SMs × resident blocks per SM, D = memory bandwidth, C = clock, o the origin, d the target:
#
#     general      t_d = t_o · ⌈B / W_d⌉ / ⌈B / W_o⌉ · (D_o / D_d · W_d / W_o)^γ · (C_o / C_d)^(1 − γ)
#     simplified   t_d = t_o · (D_o / D_d)^γ · (W_o / W_d · C_o / C_d)^(1 − γ)              for many waves
#
# γ in [0, 1] says how memory-bound a kernel of intensity x is on the target, whose ridge point is R:
#
#     γ = 1 − x / 2R  for x < R,    R / 2x  otherwise
#
# Gradients: everywhere but through the wave counts of the general form. The predictor looks a kernel up among those
# measured on the origin (same op, dims and dtype); one that was not measured there gets the target's roofline.
# Source: Yu, Gao, Golikov, Pekhimenko, "Habitat", USENIX ATC 2021, section 3.3.

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

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelForecast:
        """Scale the kernels that were measured; `isolated` and `relaxation` change nothing.

        Args: as of `Predictor.forecast_kernels`.
        """
        gpu = gpu_of(machine)
        measured = self.families[family.name]
        same = (batch.op[:, None] == measured.op) & (batch.dtype[:, None] == measured.dtype)
        for position, name in enumerate(family.dims):
            same &= batch.dims[name][:, None] == measured.dims[:, position]
        measured_s = jnp.take(measured.seconds, jnp.argmax(same, axis=1))
        kernels = bounded(family, machine, batch)
        gamma = memory_boundedness(kernels.work.flop / kernels.work.bytes_moved, kernels.peak / gpu.mem_bytes_per_s)
        blocks = largest_tile(gpu, kernels.work).blocks if self.general else None
        ratio = wave_ratio(self.origin, gpu, gamma, blocks)
        return kernels.forecast(jnp.where(jnp.any(same, axis=1), measured_s * ratio, kernels.bounds.roofline_s))


# Li et al.: latency is linear in work on every GPU, and the slope of a new GPU is read off a line over the known ones.
#
#     t = a · work + c                     per family and known GPU; work = FLOP of matrix products, bytes of the rest
#     1 / a = p · bandwidth + q            over the known GPUs; on a new one t = work / (p · bandwidth + q)
#
# Two variants share this record (`LiLine`), and differ in how they are fitted (`training.evaluation.systems`):
#
# - `li-published`, as NeuSight's authors coded it: ordinary least squares on seconds, which the largest kernels decide;
#   bandwidth for every family, so that the arithmetic peak plays no part; c = 0 on a new GPU.
# - `li`: relative least squares, c ≥ 0 (the median over the known GPUs, paid by kernels that run alone), the slope of
#   matrix products on peak FLOP/s, of the rest on bandwidth, p, q ≥ 0.
#
# Gradients: through work, bandwidth and peak. Source: Li, Sun, Jog, "Path Forward Beyond Simulators:
# Fast and Accurate GPU Execution Time Prediction for DNN Workloads", MICRO 2023.


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


def _li(line: LiLine, family: Family, kernels: Bounded, batch: KernelBatch, isolated: Isolated) -> KernelForecast:
    rate = line.per_bandwidth * kernels.gpu.mem_bytes_per_s + line.per_peak * kernels.peak + line.offset
    # A line that falls to zero or below far from the known GPUs forecasts the speed of light.
    body_s = li_work(family, batch) / jnp.where(rate > 0.0, rate, jnp.inf)
    return kernels.forecast(body_s, line.floor_s * jnp.asarray(isolated, dtype=float))


def li_work(family: Family, batch: KernelBatch) -> Float[Array, " kernel"]:
    """FLOP of matrix products, bytes moved of everything else."""
    work = family.work(batch.dims, element_bytes(batch.dtype))
    return work.flop if family.matrix else work.bytes_moved


# Three-parameter roofline: max(compute / a, memory / b) + c, three numbers per family fitted to measurements.
#
# a and b are the efficiencies of arithmetic and of memory, c the launch floor an isolated kernel pays.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ThreeNumbers:
    """Efficiencies as raw values before a sigmoid, and the floor in log seconds."""

    raw_compute: Float[Array, ""]
    raw_memory: Float[Array, ""]
    log_floor_s: Float[Array, ""]


def _roofline3(
    numbers: ThreeNumbers, family: Family, kernels: Bounded, batch: KernelBatch, isolated: Isolated
) -> KernelForecast:
    compute_s = kernels.bounds.compute_s / jax.nn.sigmoid(numbers.raw_compute)
    memory_s = kernels.memory_s / jax.nn.sigmoid(numbers.raw_memory)
    launch_s = jnp.exp(numbers.log_floor_s) * jnp.asarray(isolated, dtype=float)
    return kernels.forecast(jnp.maximum(compute_s, memory_s), launch_s, compute_s, memory_s)


class Rival(NamedTuple):
    """A fitted baseline.

    Attributes:
      equation: its forecast of kernels.
      untrained: parameters of a family with hidden layers of these sizes: the template a checkpoint is read into.
    """

    equation: Equation
    untrained: Callable[[Family, tuple[int, ...]], Any]


GPU_FIGURES = 4
"""GPU figures `habitat-mlp` sees; beside them and the dims, the element size and whether a kernel runs alone."""


def _untrained_network(family: Family, hidden: tuple[int, ...]) -> Network:
    inputs = jnp.zeros((2, len(family.dims) + 2 + GPU_FIGURES))
    return init_network(jax.random.key(0), inputs, hidden, 1, members=1)


RIVALS: dict[str, Rival] = {
    "roofline3": Rival(_roofline3, lambda family, hidden: ThreeNumbers(*jnp.zeros(3))),
    "li": Rival(_li, lambda family, hidden: LiLine(*jnp.zeros(4))),
    "habitat-mlp": Rival(_habitat_mlp, _untrained_network),
    "gbt": Rival(_gbt, lambda family, hidden: Forest(*jnp.zeros((5, TREES, 2 * LEAVES - 1)))),
}
"""Fitted baselines by the kind in a checkpoint's card."""
