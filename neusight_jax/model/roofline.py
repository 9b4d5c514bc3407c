"""Limits of a machine: the speed of light, and what the physical times of `heads` are made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from neusight_jax.arithmetic import ELEMENT_BYTES, dtype_index
from neusight_jax.hardware.cluster import Topology
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family, Work, stair
from neusight_jax.model.physics import STANDARD, Physics

Scalar: TypeAlias = float | Float[Array, ""]
Relaxation: TypeAlias = Scalar | None
"""How far whole waves are smoothed, 0 to 1; None is 0, by a program of its own."""
Isolated: TypeAlias = bool | Bool[Array, ""] | Float[Array, "*kernel"]
"""Whether kernels run alone, as a sweep measures them: one answer, or one (0 or 1) for each kernel."""

LEAST_SHARE = 1e-3
"""Arithmetic times are at least this share of the DRAM time: logarithms of a kernel without FLOP stay finite."""
UNSAID_J = 1e-6
"""Most energy of an fp32 FLOP where a board says none, J: far beyond any."""
RESIDENT_THREADS = 2048.0
"""Threads an SM holds where a GPU does not say: NVIDIA's with HBM."""
L2_SMS = 80.0
"""SMs whose rows in flight share the L2, a V100's: fixed, so that more SMs never take longer."""
L1_BYTES = 131072.0
"""L1 of an SM where a GPU does not say, bytes: as on Volta, Ada and RTX Blackwell."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds on a kernel's time, seconds.

    Attributes:
      compute_s: FLOP that no algorithm avoids / peak of its path.
      memory_s: traffic that cannot stay in L2 / DRAM bandwidth, or all traffic / L2 rate, whichever is longer; inside a
        running model weights and the KV cache cannot stay.
      roofline_s: the textbook roof, max(all FLOP / peak, all traffic / DRAM bandwidth).
    """

    compute_s: Float[Array, " kernel"]
    memory_s: Float[Array, " kernel"]
    roofline_s: Float[Array, " kernel"]

    @property
    def speed_of_light_s(self) -> Float[Array, " kernel"]:
        """The bound no forecast goes below."""
        return jnp.maximum(self.compute_s, self.memory_s)


def element_bytes(dtype: Int[Array, " kernel"]) -> Float[Array, " kernel"]:
    """Bytes of one element by dtype index."""
    return jnp.array(ELEMENT_BYTES, jnp.float32)[dtype]


def peak_flop_per_s(gpu: GPU, family: Family, dtype: Int[Array, " kernel"]) -> Float[Array, " kernel"]:
    """Peak of the path a family's kernels run on, FLOP/s; 0 where the chip lacks it (times become infinite).

    `gpu` holds scalars, or arrays [kernel] when every kernel has a machine of its own (training).
    """
    if not family.matrix:
        double = dtype == dtype_index("fp64")
        return jnp.where(double, jnp.asarray(gpu.fp64_flop_per_s), jnp.asarray(gpu.fp32_flop_per_s))
    paths = gpu.matrix_paths()
    return paths[dtype] if paths.ndim == 1 else paths[jnp.arange(dtype.shape[0]), dtype]


def exponentials_per_s(gpu: GPU, physics: Physics = STANDARD) -> Float[Array, "*gpu"]:
    """Rate of the special-function units, exponentials/s."""
    return given(gpu.exp_per_s, physics.exponentials_per_cycle * gpu.num_sms * gpu.clock_hz)


def issued_flop_per_s(gpu: GPU, physics: Physics, matrix: bool) -> Float[Array, "*gpu"]:
    """fp32 FLOP/s the warp schedulers can issue; `matrix` = those of products, which a faster matrix path may take."""
    schedulers = given(gpu.warp_schedulers, physics.warp_schedulers)
    vector = physics.issue_flop_per_cycle * schedulers * gpu.num_sms * gpu.clock_hz
    if not matrix:
        return jnp.asarray(vector)
    return jnp.maximum(vector, physics.matrix_issue * jnp.asarray(gpu.fp32_matrix_flop_per_s))


def slot_s(gpu: GPU, physics: Physics) -> Float[Array, "*gpu"]:
    """Seconds that an instruction of one lane takes of all the lanes there are."""
    return 2.0 / issued_flop_per_s(gpu, physics, matrix=False)


def joined_logs(log_s: Array, other_log_s: Array, norm: ArrayLike) -> Array:
    """Log of the norm of this order of two times: 1 = one after the other, of a high order the longer of the two."""
    return jnp.logaddexp(log_s * norm, other_log_s * norm) / norm


def relaxation_switch(relaxation: Relaxation) -> Relaxation:
    """A relaxation as programs take it: None for a number that is 0, since an exact forecast is a program of less than
    half the time; a traced one as it is."""
    if relaxation is None or isinstance(relaxation, jax.core.Tracer):
        return relaxation
    return None if float(np.asarray(relaxation)) == 0.0 else relaxation


def whole_waves(blocks: Array, num_sms: Array, relaxation: Relaxation) -> Array:
    """Waves of blocks over SMs: ceil(blocks / SMs), blended with its streaming limit max(blocks / SMs, 1).

    As tiles and blocks are by `kernels.family.whole`.

    Args:
      blocks: thread blocks; num_sms: SMs, broadcast against it.
      relaxation: 0 = exact, 1 = no quantisation at all. In between the wave count is biased low by less than
        `relaxation` waves and stays monotone in both arguments.
    Gradients: to the blocks that of the limit, whatever the relaxation; to the SMs `relaxation` times that.
    """
    relaxation, exact = relaxation_switch(relaxation), stair(blocks / jax.lax.stop_gradient(num_sms))
    if relaxation is None:
        return exact
    return (1.0 - relaxation) * exact + relaxation * jnp.maximum(blocks / num_sms, 1.0)


def fastest(times: Float[Array, "... choice"]) -> Float[Array, "..."]:
    """The least time of each menu. Pairwise: `jnp.min` asks which entries equal its result when it is differentiated,
    and gives NaN where a compiler has rounded the two differently."""
    return functools.reduce(jnp.minimum, [times[..., place] for place in range(times.shape[-1])])


def joule_per_flop(process_nm: ArrayLike, physics: Physics = STANDARD) -> Float[Array, "*gpu"]:
    """Energy of one fp32 FLOP on the vector path, whole board, J; falls with the node, or stays.

    From 7 down to 6 nm it stays, and from there to 5 nm it falls twice as fast: TSMC's 6 nm is its 7 nm with some
    layers printed by EUV, 18 % denser by the same design rules, with no saving of power announced (TSMC, April 2019),
    and MI210 (6 nm) settles at the same share of its peak as MI100 (7 nm). Gradient: 0 between 6 and 7 nm, at 6 nm
    that of going on.
    """
    node = jnp.asarray(process_nm)
    node = jnp.where((node > 6.0) & (node < 7.0), 7.0, jnp.where((node > 5.0) & (node <= 6.0), 2.0 * node - 5.0, node))
    return jnp.asarray(physics.joule_per_flop_16nm * (node / 16.0) ** physics.process_exponent)


def given(value: ArrayLike, usual: ArrayLike) -> Float[Array, "*gpu"]:
    """A figure of a GPU, or the usual one where it is 0, which says nothing."""
    figure = jnp.asarray(value)
    return jnp.where(figure > 0, figure, usual)


def column(value: ArrayLike, axes: int) -> Array:
    """A GPU field as an array that broadcasts over `axes` trailing axes, whether scalar or [kernel]."""
    array = jnp.asarray(value)
    return array.reshape(array.shape + (1,) * axes)


Ramp: TypeAlias = tuple[Any, Any]
"""Where L2 begins to lose what it should keep, and over what width: bytes to be held over the room there is."""


def warm_ramp(physics: Physics) -> Ramp:
    """Ramp of a working set that lies in L2 from the launch before."""
    return physics.warm_start, physics.warm_width


def kept_ramp(physics: Physics) -> Ramp:
    """Ramp of what a running kernel comes back for."""
    return physics.kept_start, physics.kept_width


def rotated_ramp(physics: Physics) -> Ramp:
    """Ramp of a working set whose measurement goes round several copies of it."""
    return physics.rotated_start, physics.rotated_width


def row_ramp(physics: Physics) -> Ramp:
    """Ramp of the rows in flight of a reduction, in and out."""
    return physics.row_start, physics.row_width


def dram_bytes(work: Work, l2_bytes: ArrayLike, ramp: Ramp, warm_share: ArrayLike) -> Float[Array, " kernel"]:
    """Traffic that cannot stay in L2 when the working set is already there, bytes; falls with the L2 size.

    Args:
      work: of the kernels.
      l2_bytes: size of the L2, bytes.
      ramp: where L2 begins to lose the working set, and over what width.
      warm_share: share of the traffic that goes to DRAM even so.
    """
    share = jnp.minimum(jnp.asarray(warm_share), 1.0)
    return work.bytes_moved * (share + (1.0 - share) * lost_share(work.bytes_moved, l2_bytes, ramp))


def cold_bytes(work: Work, isolated: Isolated) -> Float[Array, " kernel"]:
    """Traffic that comes from DRAM whatever the L2: inside a running model other kernels passed since, bytes.

    Args:
      work: of the kernels.
      isolated: 1 where a kernel runs alone, and may find what it read in its last launch.
    """
    if work.cold_bytes is None:
        return jnp.zeros_like(work.bytes_moved)
    return work.cold_bytes * (1.0 - jnp.asarray(isolated, dtype=float))


def lost_share(held: Float[Array, " kernel"], room: ArrayLike, ramp: Ramp) -> Float[Array, " kernel"]:
    """Share of what L2 should keep that it does not, given the bytes to be held; falls with the room in L2."""
    start, width = ramp
    return jnp.clip((held / room - start) / width, 0.0, 1.0)


def room_bytes(gpu: GPU) -> Float[Array, "*gpu"]:
    """Bytes of a stream that find room in L2: a part of it, where parts keep what their own SMs read."""
    return jnp.asarray(gpu.l2_bytes) / jnp.maximum(jnp.asarray(gpu.l2_partitions), 1.0)


def fetched_again(gpu: GPU, work: Work, physics: Physics) -> Float[Array, " kernel"] | float:
    """Traffic of what is fetched again because no cache kept it, bytes; falls with L1 and the room in L2."""
    again: Float[Array, " kernel"] | float = 0.0
    if work.fetched_bytes is not None and work.window_bytes is not None:
        again += work.fetched_bytes * lost_share(work.window_bytes, room_bytes(gpu), kept_ramp(physics))
    if work.row_passes is not None:
        passes, ramp = work.row_passes, row_ramp(physics)
        resident = jnp.minimum(given(gpu.resident_threads, RESIDENT_THREADS), passes.threads / L2_SMS)
        held = resident * passes.thread_bytes
        lost = lost_share(held, given(gpu.l1_bytes, L1_BYTES), ramp)
        again += passes.again_bytes * lost * lost_share(L2_SMS * held, gpu.l2_bytes, ramp)
    return again


def reread_bytes(
    gpu: GPU, work: Work, tile_traffic: Float[Array, "kernel tile"], ramp: Ramp
) -> Float[Array, "kernel tile"]:
    """DRAM traffic if L2 keeps nothing for the next block, but for what finds room in it as a whole, bytes.

    Args:
      gpu: scalars, or arrays [kernel].
      work: of the kernels.
      tile_traffic: traffic of every tile of the menu between L2 and the SMs, bytes.
      ramp: where L2 begins to lose what is read again, and over what width.
    """
    lost = lost_share(work.bytes_moved, room_bytes(gpu), ramp)[:, None]
    once = jnp.minimum(work.bytes_moved[:, None], tile_traffic)
    return once + (tile_traffic - once) * lost


def wire_s(work: Work, topology: Topology) -> Float[Array, " kernel"]:
    """Least seconds that links and network take for the messages of kernels: the fewest bytes of any algorithm."""
    wire = work.wire
    if wire is None:
        return jnp.zeros_like(work.flop)
    ring, switch = wire.link_bytes[:, 0], wire.link_bytes[:, 2]
    fewest = jnp.where(jnp.asarray(topology.switch_reduction) > 0, jnp.minimum(ring, switch), ring)
    link_s = fewest / topology.group_bytes_per_s(wire.ranks)
    return jnp.maximum(link_s, fastest(wire.nic_bytes) / topology.crossing_bytes_per_s)


def lower_bounds(
    gpu: GPU,
    work: Work,
    peak: Float[Array, " kernel"],
    topology: Topology | None = None,
    isolated: Isolated = True,
) -> LowerBounds:
    """Lower bounds for kernels on a machine.

    Args:
      gpu: scalars, or arrays [kernel].
      work: of the kernels.
      peak: of their arithmetic path, FLOP/s.
      topology: how GPUs are joined; None = no kernel sends to other GPUs.
      isolated: as of `cold_bytes`.
    Reference: Williams, Waterman, Patterson, CACM 2009; L2 and link terms ours.
    """
    onchip_s = work.bytes_moved / (STANDARD.l2_bytes_per_cycle * gpu.num_sms * gpu.clock_hz)
    moved = dram_bytes(work, gpu.l2_bytes, kept_ramp(STANDARD), STANDARD.warm_share)
    moved = jnp.maximum(moved, cold_bytes(work, isolated))
    compute_s = work.bound_flop / peak
    memory_s = jnp.maximum(moved / gpu.mem_bytes_per_s, onchip_s)
    roofline_s = jnp.maximum(work.flop / peak, work.bytes_moved / gpu.mem_bytes_per_s)
    if topology is not None:
        sent_s = wire_s(work, topology)
        memory_s, roofline_s = jnp.maximum(memory_s, sent_s), jnp.maximum(roofline_s, sent_s)
    return LowerBounds(compute_s=compute_s, memory_s=memory_s, roofline_s=roofline_s)
