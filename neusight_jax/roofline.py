"""What a machine allows: speed of light, and the physical times a kernel could be bound by.

Every time here is homogeneous of degree −1 in the machine's rates (scale all rates by c and it is divided by c) and
never rises when a rate or the L2 size does, or the SM count at a fixed rate per SM. The predictors only mix these
times.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from neusight_jax.arithmetic import ELEMENT_BYTES
from neusight_jax.gpu import GPU
from neusight_jax.kernels.family import Family, Work

Scalar: TypeAlias = float | Float[Array, ""]
Isolated: TypeAlias = bool | Float[Array, "*kernel"]
"""Whether kernels run alone, as a sweep measures them: one answer, or one (0 or 1) for each kernel."""

L2_BYTES_PER_CYCLE = 64.0
"""Bytes an SM takes from L2 per clock (NVIDIA, Volta to Hopper: 64 B/clk/SM)."""
ISSUE_FLOP_PER_CYCLE = 256.0
"""fp32 FLOP an SM's four warp schedulers can issue per clock if every slot is a fused multiply-add (4 × 32 × 2). An SM
of 64 lanes (Volta, A100) needs half of its slots for that and keeps the rest for loads and addresses; one of 128 lanes
(GP104, Ada, Hopper) has none to spare, and SGEMM stays below its peak."""
LEAST_SHARE = 1e-3
"""Arithmetic times are at least this share of the DRAM time."""
WARM_SHARE = 0.12
"""Share of the traffic that still goes to DRAM when the working set lies in L2."""
WARM_RAMP = (0.9, 1.3)
"""Working set over L2 size between which that share rises to 1 (measured on repeated launches)."""
KEPT_RAMP = (1.0, 1.9)
"""What a running kernel comes back for over the L2 it finds room in, between which L2 stops keeping it."""
ROTATED_RAMP = (0.12, 0.25)
"""The same of products on tensor cores: their measurements seem to go round several copies of the operands, so that
only sets of a sixth of L2 stay. L40S (96 MB) is warm below 16 MB; H200 beats H100 by bandwidth from 6 MB on, in 50."""
JOULE_PER_FLOP_16NM = 20e-12
"""Energy of one fp32 FLOP on 16 nm silicon, whole board, J (a fit to cards that throttle)."""
PROCESS_EXPONENT = 0.75
"""Energy per FLOP falls as (node / 16 nm) to this power: 16 nm 20 pJ, 12 nm 16 pJ, 7 nm 11 pJ, 4 nm 7 pJ."""
UNSAID_J = 1e-6
"""Most energy of an fp32 FLOP where a board says none, J: far beyond any."""
NARROW_FLOP_PER_CYCLE = 2048.0
"""16-bit FLOP a clock of an SM's matrix units (A100) at which feeding them takes as much energy as their arithmetic:
the narrower, the fewer FLOP share an operand fetched and an instruction issued. L40S (1024) sustains half to two thirds
of its peak in 350 W, Hopper (4096) and Blackwell (8192) three quarters and more."""
EXPONENTIALS_PER_CYCLE = 16.0
"""Exponentials an SM's special-function units take a clock where the GPU does not say (NVIDIA, Volta to Blackwell)."""
SOFTMAX_FLOP = 8.0
"""fp32 FLOP of a softmax for every score: scale, maximum, subtraction, sum, correction and conversion."""
DTYPE_ENERGY: tuple[float, ...] = (1.0, 0.13, 0.065, 0.065, 0.033, 0.017, 0.033)
"""Energy of one FLOP relative to fp32, in the order of `arithmetic.DTYPES` (matrix paths; halves with the width)."""
JOULE_PER_BYTE = 50e-12
"""Energy of one byte of DRAM traffic, J (HBM2 about 4 pJ/bit, GDDR6 about 7.5, plus the way to the SM)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Light:
    """Lower bounds on a kernel's time, seconds.

    Attributes:
      compute_s: FLOP that no algorithm avoids / peak of its path.
      memory_s: traffic that cannot stay in L2 / DRAM bandwidth, or all traffic / L2 rate, whichever is longer.
      roofline_s: the textbook roof, max(all FLOP / peak, all traffic / DRAM bandwidth).
    """

    compute_s: Float[Array, " kernel"]
    memory_s: Float[Array, " kernel"]
    roofline_s: Float[Array, " kernel"]

    @property
    def speed_of_light_s(self) -> Float[Array, " kernel"]:
        """The bound no forecast goes below."""
        return jnp.maximum(self.compute_s, self.memory_s)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PhysicalTimes:
    """Times a kernel could be bound by, seconds, one array [kernel, component] for each head of the mixture.

    Attributes:
      compute: ideal; blocks streamed without whole waves; where algorithms differ, the roofline of the fastest; every
        tile of the menu in whole waves; on tensor cores also the traffic of every tile at the L2-to-SM rate.
      dram: all traffic, the traffic that cannot stay in L2 and, where algorithms differ, the most any of them moves, at
        DRAM bandwidth; what is fetched again on top of each.
      reread: the traffic of every tile of the menu at DRAM bandwidth, as if L2 kept nothing for the next block, where
        the operands do not fit in L2; not on tensor cores.
      onchip: every tile of the menu in whole waves at the L2-to-SM rate; 1000 cycles.
      power: energy over board power, with all FLOP, where algorithms differ with the fewest, and of every tile of the
        menu with its padding.
      most_power: the same with the most that a FLOP takes (`GPU.fp32_joule_per_flop`), for products and convolutions in
        fp32.
      issue: fp32 vector arithmetic at the warp schedulers' rate, likewise; none on matrix paths.
      overhead: 1000 cycles; the serial loop of a block; the compute time of one block.
    """

    compute: Float[Array, "kernel _component"]
    dram: Float[Array, "kernel _component"]
    reread: Float[Array, "kernel _component"]
    onchip: Float[Array, "kernel _component"]
    power: Float[Array, "kernel _component"]
    issue: Float[Array, "kernel _component"]
    overhead: Float[Array, "kernel _component"]
    most_power: Float[Array, "kernel _component"] | None = None


def element_bytes(dtype: Int[Array, " kernel"]) -> Float[Array, " kernel"]:
    """Bytes of one element by dtype index."""
    return jnp.array(ELEMENT_BYTES, jnp.float32)[dtype]


def peak_flop_per_s(gpu: GPU, family: Family, dtype: Int[Array, " kernel"]) -> Float[Array, " kernel"]:
    """Peak of the path a family's kernels run on, FLOP/s; 0 where the chip lacks it (times become infinite).

    `gpu` holds scalars, or arrays [kernel] when every kernel has a machine of its own (training).
    """
    if not family.matrix:
        return jnp.broadcast_to(jnp.asarray(gpu.fp32_flop_per_s), dtype.shape)
    paths = gpu.matrix_paths()
    return paths[dtype] if paths.ndim == 1 else paths[jnp.arange(dtype.shape[0]), dtype]


def exponentials_per_s(gpu: GPU) -> Float[Array, "*gpu"]:
    """Rate of the special-function units, exponentials/s."""
    return _given(gpu.exp_per_s, EXPONENTIALS_PER_CYCLE * gpu.num_sms * gpu.clock_hz)


def whole_waves(blocks: Array, num_sms: Array, relaxation: Scalar) -> Array:
    """Waves of blocks over SMs: ceil(blocks / SMs), blended with its streaming limit max(blocks / SMs, 1).

    Args:
      blocks: thread blocks; num_sms: SMs, broadcast against it.
      relaxation: 0 = exact (no gradient through `ceil`), 1 = no quantisation at all. In between the wave count is
        biased low by less than `relaxation` waves, stays monotone in both arguments and has their gradient.
    """
    ratio = blocks / num_sms
    return (1.0 - relaxation) * jnp.ceil(ratio) + relaxation * jnp.maximum(ratio, 1.0)


def fastest(times: Float[Array, "... choice"]) -> Float[Array, "..."]:
    """The least time of each menu. Pairwise: `jnp.min` asks which entries equal its result when it is differentiated,
    and gives NaN where a compiler has rounded the two differently."""
    return functools.reduce(jnp.minimum, [times[..., place] for place in range(times.shape[-1])])


def joule_per_flop(process_nm: ArrayLike) -> Float[Array, "*gpu"]:
    """Energy of one fp32 FLOP on the vector path, whole board, J; falls with the node, or stays.

    From 7 down to 6 nm it stays, and from there to 5 nm it falls twice as fast: TSMC's 6 nm is its 7 nm with some
    layers printed by EUV, 18 % denser by the same design rules, with no saving of power announced (TSMC, April 2019),
    and MI210 (6 nm) settles at the same share of its peak as MI100 (7 nm). Gradient: 0 between 6 and 7 nm, at 6 nm
    that of going on.
    """
    node = jnp.asarray(process_nm)
    node = jnp.where((node > 6.0) & (node < 7.0), 7.0, jnp.where((node > 5.0) & (node <= 6.0), 2.0 * node - 5.0, node))
    return JOULE_PER_FLOP_16NM * (node / 16.0) ** PROCESS_EXPONENT


def _given(value: ArrayLike, usual: ArrayLike) -> Float[Array, "*gpu"]:
    """A figure of a GPU, or the usual one where it is 0, which says nothing."""
    given = jnp.asarray(value)
    return jnp.where(given > 0, given, usual)


def _column(value: ArrayLike, axes: int) -> Array:
    """A GPU field as an array that broadcasts over `axes` trailing axes, whether scalar or [kernel]."""
    array = jnp.asarray(value)
    return array.reshape(array.shape + (1,) * axes)


def dram_bytes(work: Work, l2_bytes: ArrayLike, ramp: tuple[float, float] = WARM_RAMP) -> Float[Array, " kernel"]:
    """Traffic that cannot stay in L2 when the working set is already there, bytes; falls with the L2 size."""
    return work.bytes_moved * (WARM_SHARE + (1.0 - WARM_SHARE) * lost_share(work.bytes_moved, l2_bytes, ramp))


def lost_share(held: Float[Array, " kernel"], room: ArrayLike, ramp: tuple[float, float]) -> Float[Array, " kernel"]:
    """Share of what L2 should keep that it does not, given the bytes to be held; falls with the room in L2."""
    low, high = ramp
    return jnp.clip((held / room - low) / (high - low), 0.0, 1.0)


def room_bytes(gpu: GPU) -> Float[Array, "*gpu"]:
    """What a stream finds room for in L2, bytes: a part of it, where parts keep what their own SMs read."""
    return jnp.asarray(gpu.l2_bytes) / jnp.maximum(jnp.asarray(gpu.l2_partitions), 1.0)


def fetched_again(gpu: GPU, work: Work) -> Float[Array, " kernel"] | float:
    """Traffic of what is fetched again because L2 did not keep it, bytes; falls with the room in L2."""
    if work.fetched_bytes is None or work.window_bytes is None:
        return 0.0
    return work.fetched_bytes * lost_share(work.window_bytes, room_bytes(gpu), KEPT_RAMP)


def _reread_bytes(gpu: GPU, work: Work, tile_traffic: Float[Array, "kernel tile"]) -> Float[Array, "kernel tile"]:
    """DRAM traffic if L2 keeps nothing for the next block, but for what finds room in it as a whole, bytes."""
    lost = lost_share(work.bytes_moved, room_bytes(gpu), KEPT_RAMP)[:, None]
    once = jnp.minimum(work.bytes_moved[:, None], tile_traffic)
    return once + (tile_traffic - once) * lost


def light(gpu: GPU, work: Work, peak: Float[Array, " kernel"]) -> Light:
    """Lower bounds for kernels on a machine. Source: Williams, Waterman, Patterson, CACM 2009; L2 term ours."""
    onchip_s = work.bytes_moved / (L2_BYTES_PER_CYCLE * gpu.num_sms * gpu.clock_hz)
    compute_s = work.bound_flop / peak
    return Light(
        compute_s=compute_s,
        memory_s=jnp.maximum(dram_bytes(work, gpu.l2_bytes, KEPT_RAMP) / gpu.mem_bytes_per_s, onchip_s),
        roofline_s=jnp.maximum(work.flop / peak, work.bytes_moved / gpu.mem_bytes_per_s),
    )


def physical_times(
    gpu: GPU,
    family: Family,
    work: Work,
    peak: Float[Array, " kernel"],
    dtype: Int[Array, " kernel"],
    relaxation: Scalar = 0.0,
) -> PhysicalTimes:
    """All component times of kernels on a machine.

    Args:
      gpu: scalars, or arrays [kernel].
      family, work, peak, dtype: of the kernels.
      relaxation: see `whole_waves`.
    Gradients: reach every GPU field; through `ceil` only when relaxation > 0. Splits of the contraction are the fastest
      one (a minimum: gradient of the chosen one).
    """
    num_sms, clock = _column(gpu.num_sms, 2), _column(gpu.clock_hz, 2)
    sm_peak = peak[:, None, None] / num_sms
    waves = whole_waves(work.blocks, num_sms, relaxation)
    block_s = work.block_flop / sm_peak + work.block_cycles / clock
    if work.block_exponentials is not None:
        vector = SOFTMAX_FLOP * num_sms / _column(gpu.fp32_flop_per_s, 2)
        block_s += work.block_exponentials * (num_sms / _column(exponentials_per_s(gpu), 2) + vector)
    wave_compute = fastest(waves * block_s)
    wave_onchip = fastest(waves * work.block_bytes / (L2_BYTES_PER_CYCLE * clock))
    streamed = jnp.maximum(work.blocks[:, -1, 0] / gpu.num_sms, 1.0) * block_s[:, -1, 0]
    kilocycle = jnp.broadcast_to(1e3 / gpu.clock_hz, work.flop.shape)
    serial = fastest(work.block_steps[:, 0, :]) / gpu.clock_hz
    # A kernel without FLOP still issues an instruction for every few bytes: its logarithms stay finite and scale.
    least = LEAST_SHARE * work.bytes_moved / gpu.mem_bytes_per_s
    flop_energy = joule_per_flop(gpu.process_nm)
    flop = work.flop[:, None]
    compute = [work.bound_flop / peak, streamed]
    dram = [work.bytes_moved, dram_bytes(work, gpu.l2_bytes, ROTATED_RAMP if family.l2_operands else WARM_RAMP)]
    again = fetched_again(gpu, work)
    if work.form_flop is not None and work.form_bytes is not None:
        flop = jnp.stack([work.flop, work.bound_flop], axis=1)
        forms = jnp.maximum(work.form_flop / peak[:, None], work.form_bytes / _column(gpu.mem_bytes_per_s, 1))
        compute.append(fastest(forms))
        dram.append(jnp.max(work.form_bytes, axis=1))
    flop_energy = _column(flop_energy, 1) * jnp.array(DTYPE_ENERGY, jnp.float32)[dtype][:, None]
    if family.matrix:
        width = _given(gpu.matrix_flop_per_cycle, NARROW_FLOP_PER_CYCLE)
        flop_energy *= jnp.where(dtype > 0, 1.0 + NARROW_FLOP_PER_CYCLE / width, 1.0)[:, None]
    padded = jnp.concatenate([flop, fastest(work.blocks * work.block_flop)], axis=1)
    traffic_j = work.bytes_moved[:, None] * JOULE_PER_BYTE
    most_power = None
    if family.matrix and not family.tensor_core:
        most_j = _column(_given(gpu.fp32_joule_per_flop, UNSAID_J), 1)
        most_power = (padded * most_j + traffic_j) / _column(gpu.tdp_w, 1)
    issue = flop / _column(ISSUE_FLOP_PER_CYCLE * gpu.num_sms * gpu.clock_hz, 1)
    off_vector_path = (jnp.asarray(gpu.fp32_matrix_flop_per_s) > 0) | (dtype > 0) if family.matrix else False
    issue = jnp.where(jnp.broadcast_to(off_vector_path, work.flop.shape)[:, None], 0.0, issue)
    tile_traffic = fastest(work.blocks * work.block_bytes)
    all_compute = [jnp.stack(compute, axis=1), wave_compute]
    if family.l2_operands:
        all_compute.append(tile_traffic / _column(L2_BYTES_PER_CYCLE * gpu.num_sms * gpu.clock_hz, 1))
        reread = jnp.broadcast_to(least[:, None], tile_traffic.shape)
    else:
        traffic = _reread_bytes(gpu, work, tile_traffic) if family.tensor_core else tile_traffic
        reread = traffic / _column(gpu.mem_bytes_per_s, 1)
    return PhysicalTimes(
        compute=jnp.maximum(jnp.concatenate(all_compute, axis=1), least[:, None]),
        dram=jnp.stack([(traffic + again) / gpu.mem_bytes_per_s for traffic in dram], axis=1),
        reread=reread,
        onchip=jnp.concatenate([kilocycle[:, None], wave_onchip], axis=1),
        power=(padded * flop_energy + traffic_j) / _column(gpu.tdp_w, 1),
        most_power=most_power,
        issue=jnp.maximum(issue, least[:, None]),
        overhead=jnp.stack([kilocycle, serial, block_s[:, -1, -1]], axis=1),
    )
