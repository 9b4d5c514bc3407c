"""Heads: the physical times a kernel could be bound by, each a row of one table.

Every time here is homogeneous of degree −1 in the machine's rates (scale all rates by c and it is divided by c) and
never rises when a rate or the L2 size does, or the SM count at a fixed rate per SM. The predictors only mix these
times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from neusight_jax.hardware.cluster import Topology
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family, Wire, Work
from neusight_jax.model.network import Network, apply_network, init_network
from neusight_jax.model.physics import STANDARD, Physics
from neusight_jax.model.roofline import (
    LEAST_SHARE,
    RESIDENT_THREADS,
    UNSAID_J,
    Isolated,
    Relaxation,
    cold_bytes,
    column,
    dram_bytes,
    exponentials_per_s,
    fastest,
    fetched_again,
    given,
    issued_flop_per_s,
    joined_logs,
    joule_per_flop,
    kept_ramp,
    reread_bytes,
    rotated_ramp,
    slot_s,
    warm_ramp,
    whole_waves,
)

# Tile choice as a model: score = −log(time in whole waves) · sharpness + learned preference of the shape.
#
# Measured tiles supervise it. It is reported by every predictor; the latency of the `neusight` kind depends on
# it, that of the `mixture` does not (a tile picked by GPU-dependent cost would break the monotone slopes).


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileChoice:
    """Parameters: a shape-only preference network over the tile menu (one member), and the sharpness of the score."""

    network: Network
    sharpness: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChosenTile:
    """The tile of each kernel. Relaxed quantities are geometric means over the menu.

    Attributes:
      index: arg-max tile of the menu.
      blocks, block_flop, block_bytes: of that tile, contraction not split.
      waves: waves of those blocks over the SMs.
    """

    index: Int[Array, " kernel"]
    blocks: Float[Array, " kernel"]
    block_flop: Float[Array, " kernel"]
    block_bytes: Float[Array, " kernel"]
    waves: Float[Array, " kernel"]


def init_tile_choice(
    key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], hidden: tuple[int, ...] = (32,)
) -> TileChoice:
    """An untrained choice: no preference, sharpness 1.

    Args:
      key: of the network's weights.
      family: whose tile menu it chooses from.
      features: of the training rows; the network is normalised to them.
      hidden: sizes of the hidden layers.
    """
    return TileChoice(init_network(key, features, hidden, len(family.tiles), 1), jnp.ones(()))


def tile_scores(
    choice: TileChoice, gpu: GPU, work: Work, features: Float[Array, "kernel feature"], relaxation: Relaxation = 0.0
) -> Float[Array, "kernel tile"]:
    """Unnormalised log-probability of every tile of the menu.

    Args:
      choice: parameters.
      gpu: scalars, or arrays [kernel].
      work: of the kernels, for the time of each tile in whole waves.
      features: shape-only inputs of the family.
      relaxation: of whole waves.
    """
    num_sms = jnp.asarray(gpu.num_sms)[..., None]
    waves = whole_waves(work.blocks[:, :, 0], num_sms, relaxation)
    cost = jnp.log(waves * jnp.maximum(work.block_flop[:, :, 0], work.block_bytes[:, :, 0]))
    return apply_network(choice.network, features)[0] - choice.sharpness * cost


def choose_tile(
    choice: TileChoice, gpu: GPU, work: Work, features: Float[Array, "kernel feature"], relaxation: Relaxation = 0.0
) -> ChosenTile:
    """The tile of each kernel on a machine.

    Args:
      relaxation: 0 = the arg-max tile; towards 1 its quantities become the soft-max weighted geometric mean over the
        menu, so that gradients see the other tiles. Biased for any value above 0.
    """
    scores = tile_scores(choice, gpu, work, features, relaxation)
    index = jnp.argmax(scores, axis=1)
    soft = 0.0 if relaxation is None else relaxation
    weight = (1.0 - soft) * jax.nn.one_hot(index, scores.shape[1]) + soft * jax.nn.softmax(scores, axis=1)

    def blend(quantity: Array) -> Array:
        return jnp.exp(jnp.sum(weight * jnp.log(jnp.maximum(quantity[:, :, 0], 1e-30)), axis=1))

    blocks = jnp.round(blend(work.blocks)) * (1.0 - soft) + blend(work.blocks) * soft
    return ChosenTile(
        index=index,
        blocks=blocks,
        block_flop=blend(work.block_flop),
        block_bytes=blend(work.block_bytes),
        waves=whole_waves(blocks, jnp.asarray(gpu.num_sms), relaxation),
    )


def largest_tile(gpu: GPU, work: Work) -> ChosenTile:
    """The last tile of the menu, for predictors that do not choose."""
    blocks = work.blocks[:, -1, 0]
    return ChosenTile(
        index=jnp.full(blocks.shape, work.blocks.shape[1] - 1),
        blocks=blocks,
        block_flop=work.block_flop[:, -1, 0],
        block_bytes=work.block_bytes[:, -1, 0],
        waves=whole_waves(blocks, jnp.asarray(gpu.num_sms), 0.0),
    )


Times: TypeAlias = Float[Array, "kernel _component"]
PROTOCOLS: tuple[tuple[float, float], ...] = ((1.0, 2.0), (1.9 / 0.6, 128.0 / 120.0), (3.4 / 0.6, 1.0))
"""Of NCCL's protocols LL, LL128 and Simple: latency of a step over that of LL, and bytes sent over those of the payload
(LL sends 4 bytes of flags with every 4 of data, LL128 8 with every 120). NCCL 2.18, src/graph/tuning.cc."""


@dataclass(frozen=True)
class Launch:
    """Kernels of one family on a machine, and what several heads need of them.

    Attributes:
      gpu: scalars, or arrays [kernel]; family, work, peak, dtype: of the kernels; physics: constants;
        relaxation: of whole waves.
      waves: of the blocks of every tile and split over the SMs.
      block_s: seconds of one block's arithmetic.
      least_s: what a kernel without FLOP takes to issue its instructions, so that its logarithms are finite and scale.
      topology: how GPUs are joined, of kernels that send to others.
      isolated: whether the kernels run alone.
    """

    gpu: GPU
    family: Family
    work: Work
    peak: Float[Array, " kernel"]
    dtype: Int[Array, " kernel"]
    physics: Physics
    relaxation: Relaxation
    waves: Float[Array, "kernel tile split"]
    block_s: Float[Array, "kernel tile split"]
    least_s: Float[Array, "kernel 1"]
    topology: Topology | None = None
    isolated: Isolated = True

    @property
    def kilocycle_s(self) -> Float[Array, " kernel"]:
        """1000 clocks."""
        return jnp.broadcast_to(1e3 / self.gpu.clock_hz, self.work.flop.shape)

    @property
    def tile_bytes(self) -> Float[Array, "kernel tile"]:
        """Traffic of every tile of the menu, between L2 and the SMs."""
        return fastest(self.work.blocks * self.work.block_bytes)

    @property
    def flop(self) -> Float[Array, "kernel _form"]:
        """All FLOP and, where algorithms differ, the fewest."""
        if self.work.form_flop is None:
            return self.work.flop[:, None]
        return jnp.stack([self.work.flop, self.work.bound_flop], axis=1)


def launched(
    gpu: GPU,
    family: Family,
    work: Work,
    peak: Float[Array, " kernel"],
    dtype: Int[Array, " kernel"],
    relaxation: Relaxation = 0.0,
    physics: Physics = STANDARD,
    topology: Topology | None = None,
    isolated: Isolated = True,
) -> Launch:
    """Kernels of one family on a machine, and what several heads need of them.

    Args:
      gpu: scalars, or arrays [kernel].
      family: of the kernels.
      work: what they ask of a machine.
      peak: of their arithmetic path, FLOP/s; less what waits for the vector path is what they reach.
      dtype: index into `arithmetic.DTYPES`.
      relaxation: as of `roofline.whole_waves`.
      physics: constants, those of the family's fit where there is one.
      topology: how GPUs are joined, for kernels that send to others; None for all others.
      isolated: whether they run alone, and may find their operands in L2.
    """
    num_sms = column(gpu.num_sms, 2)
    if work.vector_flop is not None:
        peak = peak / (1.0 + work.vector_flop / work.flop * peak / gpu.fp32_flop_per_s)
    block_s = work.block_flop / (peak[:, None, None] / num_sms)
    if work.block_exponentials is not None:
        vector = physics.softmax_flop * num_sms / column(gpu.fp32_flop_per_s, 2)
        block_s += physics.block_cycles / column(gpu.clock_hz, 2)
        block_s += work.block_exponentials * (num_sms / column(exponentials_per_s(gpu, physics), 2) + vector)
    if family.vector_products:
        block_s = _with_operands(gpu, work, physics, block_s)
    if work.slots is not None and work.block_slots is not None:
        slots = work.block_slots
        if family.vector_products:  # what unpacks on the way has no head of its own there
            slots = slots + column(work.slots, 2) / work.blocks
        block_s += slots * num_sms * column(slot_s(gpu, physics), 2)
    least_s = (LEAST_SHARE * work.bytes_moved / gpu.mem_bytes_per_s)[:, None]
    waves = whole_waves(work.blocks, num_sms, relaxation)
    return Launch(gpu, family, work, peak, dtype, physics, relaxation, waves, block_s, least_s, topology, isolated)


def _with_operands(
    gpu: GPU, work: Work, physics: Physics, arithmetic_s: Float[Array, "kernel tile split"]
) -> Float[Array, "kernel tile split"]:
    """Seconds of a block that also issues what comes with its arithmetic and brings in its operands."""
    clock_hz = column(gpu.clock_hz, 2)
    issue_s = (
        physics.issue_slots * work.block_flop / column(issued_flop_per_s(gpu, physics, matrix=True) / gpu.num_sms, 2)
    )
    operand_s = work.block_bytes / (physics.operand_bytes_per_cycle * clock_hz)
    issued = joined_logs(jnp.log(arithmetic_s), jnp.log(issue_s), physics.limit_norm)
    return jnp.exp(joined_logs(issued, jnp.log(operand_s), physics.operand_norm)) + physics.tile_cycles / clock_hz


def _compute(at: Launch) -> Times:
    """Ideal; blocks streamed without whole waves; where algorithms differ, the roofline of the fastest; every tile of
    the menu in whole waves; on tensor cores also the operands of every tile, without whole waves."""
    work, gpu = at.work, at.gpu
    streamed = jnp.maximum(work.blocks[:, -1, 0] / gpu.num_sms, 1.0) * at.block_s[:, -1, 0]
    arithmetic = work.bound_flop / at.peak
    if work.block_slots is not None:
        arithmetic += fastest(fastest(work.blocks * work.block_slots)) * slot_s(gpu, at.physics)
    times = [arithmetic, streamed]
    if work.form_flop is not None and work.form_bytes is not None:
        forms = jnp.maximum(work.form_flop / at.peak[:, None], work.form_bytes / column(gpu.mem_bytes_per_s, 1))
        times.append(fastest(forms))
    parts = [jnp.stack(times, axis=1), fastest(at.waves * at.block_s)]
    if at.family.l2_operands:
        parts.append(fastest(work.blocks * _operands(at)) / column(gpu.num_sms, 1))
    return jnp.maximum(jnp.concatenate(parts, axis=1), at.least_s)


def _operands(at: Launch) -> Float[Array, "kernel tile split"]:
    """Seconds of a block's traffic at the L2-to-SM rate, on tensor cores no more than of its arithmetic.

    For units too wide for a tile, libraries take larger ones than the menu has, and pairs of blocks that share
    operands, so that these come in while they are multiplied.
    """
    operands_s = at.work.block_bytes / (at.physics.l2_bytes_per_cycle * column(at.gpu.clock_hz, 2))
    return jnp.minimum(operands_s, at.block_s) if at.family.l2_operands else operands_s


def _dram(at: Launch) -> Times:
    """All traffic, the traffic that cannot stay in L2 (weights and the KV cache, in a running model) and, where
    algorithms differ, the most any of them moves, at DRAM bandwidth; what is fetched again on top of each."""
    work, gpu = at.work, at.gpu
    ramp = rotated_ramp(at.physics) if at.family.l2_operands else warm_ramp(at.physics)
    lost = dram_bytes(work, gpu.l2_bytes, ramp, at.physics.warm_share)
    traffic = [work.bytes_moved, jnp.maximum(lost, cold_bytes(work, at.isolated))]
    if work.form_bytes is not None:
        traffic.append(jnp.max(work.form_bytes, axis=1))
    again = fetched_again(gpu, work, at.physics)
    return jnp.stack([(amount + again) / gpu.mem_bytes_per_s for amount in traffic], axis=1)


def _reread(at: Launch) -> Times:
    """The traffic of every tile of the menu at DRAM bandwidth, as if L2 kept nothing for the next block, where the
    operands do not fit in L2; none where L2 serves all operands."""
    if at.family.l2_operands:
        return jnp.broadcast_to(at.least_s, at.tile_bytes.shape)
    traffic = at.tile_bytes
    if at.family.tensor_core:
        traffic = reread_bytes(at.gpu, at.work, traffic, kept_ramp(at.physics))
    return traffic / column(at.gpu.mem_bytes_per_s, 1)


def _onchip(at: Launch) -> Times:
    """1000 cycles; every tile of the menu in whole waves of its operands. Of row reductions, none of them less than
    what the threads of a row wait for its loads."""
    times = jnp.concatenate([at.kilocycle_s[:, None], fastest(at.waves * _operands(at))], axis=1)
    passes = at.work.row_passes
    if passes is None:
        return times
    threads = given(at.gpu.resident_threads, RESIDENT_THREADS) * at.gpu.num_sms
    trips = whole_waves(passes.threads, threads, at.relaxation) * passes.trips
    return jnp.maximum(times, (trips * at.physics.trip_cycles / at.gpu.clock_hz)[:, None])


def _issue(at: Launch) -> Times:
    """fp32 vector arithmetic at the warp schedulers' rate, with all FLOP and with the fewest; less on an fp32 matrix
    path that is fast enough, none on other matrix paths; where loads narrower than 16 bytes take as many clocks as wide
    ones, theirs; where weights are unpacked as they come from memory, that."""
    gpu = at.gpu
    issue = at.flop / column(issued_flop_per_s(gpu, at.physics, at.family.matrix), 1)
    if at.family.matrix:
        issue = jnp.where((at.dtype > 0)[:, None], 0.0, issue)
    if at.work.load_blocks is not None and at.work.load_cycles is not None:
        waves = whole_waves(at.work.load_blocks, column(gpu.num_sms, 2), at.relaxation)
        loads = waves * at.work.load_cycles / column(gpu.clock_hz, 2)
        issue = jnp.maximum(issue, fastest(fastest(loads))[:, None])
    if at.work.slots is not None:
        issue = jnp.maximum(issue, (at.work.slots * slot_s(gpu, at.physics))[:, None])
    return jnp.maximum(issue, at.least_s)


def _power(at: Launch) -> Times:
    """Energy over board power, with all FLOP, where algorithms differ with the fewest, and of every tile of the menu
    with its padding."""
    physics, gpu = at.physics, at.gpu
    energy = column(joule_per_flop(gpu.process_nm, physics), 1)
    energy = energy * jnp.array(physics.dtype_energy, jnp.float32)[at.dtype][:, None]
    if at.family.matrix:
        width = given(gpu.matrix_flop_per_cycle, physics.narrow_flop_per_cycle)
        energy *= jnp.where(at.dtype > 0, 1.0 + physics.narrow_flop_per_cycle / width, 1.0)[:, None]
    if at.work.vector_flop is not None:
        energy += column(joule_per_flop(gpu.process_nm, physics), 1) * (at.work.vector_flop / at.work.flop)[:, None]
    return _energy_s(at, energy)


def _most_power(at: Launch) -> Times | None:
    """The same with the most that a FLOP takes on a board that keeps its base clock within its power
    (`GPU.fp32_joule_per_flop`), for products and convolutions in fp32; None elsewhere."""
    if not at.family.matrix or at.family.tensor_core:
        return None
    return _energy_s(at, column(given(at.gpu.fp32_joule_per_flop, UNSAID_J), 1))


def _energy_s(at: Launch, joule: Array) -> Times:
    padded = jnp.concatenate([at.flop, fastest(at.work.blocks * at.work.block_flop)], axis=1)
    traffic = at.work.bytes_moved[:, None] * at.physics.joule_per_byte
    return (padded * joule + traffic) / column(at.gpu.tdp_w, 1)


def _overhead(at: Launch) -> Times:
    """1000 cycles; the serial loop of a block; the compute time of one block."""
    serial = fastest(at.work.block_steps[:, 0, :]) / at.gpu.clock_hz
    return jnp.stack([at.kilocycle_s, serial, at.block_s[:, -1, -1]], axis=1)


def _wire(at: Launch) -> tuple[Wire, Topology]:
    assert at.work.wire is not None
    assert at.topology is not None
    return at.work.wire, at.topology


def _link(at: Launch) -> Times:
    """Bytes of every algorithm over the links of a domain; where the switch does not add up, that one is a ring."""
    wire, joined = _wire(at)
    adds = column(joined.switch_reduction, 1)
    ring, tree, switch, direct = (wire.link_bytes[:, place, None] for place in range(4))
    sent = jnp.concatenate([ring, tree, adds * switch + (1.0 - adds) * ring, direct], axis=1)
    return jnp.maximum(sent / joined.group_bytes_per_s(wire.ranks)[:, None], at.least_s)


def _nic(at: Launch) -> Times:
    """Bytes between domains, around a ring and each once, over the network."""
    wire, joined = _wire(at)
    return jnp.maximum(wire.nic_bytes / column(joined.crossing_bytes_per_s, 1), at.least_s)


def _copies(at: Launch) -> Times:
    """Buffers read and written in memory."""
    return (at.work.bytes_moved / at.gpu.mem_bytes_per_s)[:, None]


def _hops(at: Launch) -> Times:
    """Steps of every algorithm inside a domain, each the latency of a link; a step of the direct one in clocks."""
    wire, joined = _wire(at)
    steps = wire.link_steps * column(joined.link_latency_s, 1)
    clocked = wire.link_steps * at.kilocycle_s[:, None]
    return jnp.maximum(jnp.concatenate([steps, clocked], axis=1), at.least_s)


def _far_hops(at: Launch) -> Times:
    """Steps between domains, around a ring and in a tree, each the latency of the network."""
    wire, joined = _wire(at)
    return jnp.maximum(wire.nic_steps * column(joined.nic_latency_s, 1), at.least_s)


def _protocol(at: Launch) -> Times:
    """Every algorithm by the fastest protocol: steps, each a latency, and then the bytes with what it adds to them."""
    sent, hops = _link(at), _hops(at)[:, :4]
    return fastest(jnp.stack([sent * added + hops * slower for slower, added in PROTOCOLS], axis=2))


def _startup(at: Launch) -> Times:
    """1000 clocks; one hop."""
    _, joined = _wire(at)
    hop = jnp.broadcast_to(jnp.asarray(joined.link_latency_s), at.work.flop.shape)
    return jnp.stack([at.kilocycle_s, hop], axis=1)


def _fastest_tile(at: Launch) -> Times:
    """Every tile of the menu and every split in whole waves of its blocks, operands included: the fastest."""
    return jnp.maximum(fastest(fastest(at.waves * at.block_s))[:, None], at.least_s)


def _kilocycle(at: Launch) -> Times:
    """1000 cycles."""
    return at.kilocycle_s[:, None]


def _ways(family: Family) -> int:
    return 2 if family.alternatives else 1


@dataclass(frozen=True)
class Head:
    """One head of the mixture.

    Attributes:
      time: seconds [kernel, component] a kernel could be bound by; components: how many, for a family.
      joined: "overlaps" (joined by a norm), "limits" (binds only when it is reached) or "adds" (before and after).
      low, high, start: bounds of its offset b_j, natural logarithm, and where training starts.
      tensor_bounds: the bounds beside tensor cores, where they differ; operand_bounds: those of products there.
      most: the longest it may be, in the same components; None = no such bound.
      side: "compute" or "memory", what a kernel is said to be bound by where this is the longest; "" = neither.
    """

    time: Callable[[Launch], Times]
    components: Callable[[Family], int]
    joined: str
    low: float
    high: float
    start: float
    tensor_bounds: tuple[float, float] | None = None
    operand_bounds: tuple[float, float] | None = None
    most: Callable[[Launch], Times | None] | None = None
    side: str = ""

    def bounds(self, family: Family) -> tuple[float, float]:
        """Bounds of the offset for a family."""
        if family.l2_operands and self.operand_bounds:
            return self.operand_bounds
        return self.tensor_bounds if family.tensor_core and self.tensor_bounds else (self.low, self.high)


# Compute and DRAM cannot beat their ideal. What fused attention does before and after its loop, 8 to 12 us, goes with
# the clock and not with the floor, which all machines share: hence the wider bounds of the overhead there. Operands of
# products come in at half the rate of L2 at least: on GPUs where arithmetic hides them no time tells their offset.
HEADS: dict[str, Head] = {
    "compute": Head(
        _compute,
        lambda f: (2 if f.l2_operands else 1) * len(f.tiles) + 1 + _ways(f),
        "overlaps",
        0.0,
        2.5,
        0.3,
        side="compute",
    ),
    "dram": Head(_dram, lambda f: 1 + _ways(f), "overlaps", 0.0, 1.5, 0.25, side="memory"),
    "reread": Head(_reread, lambda f: len(f.tiles), "overlaps", -3.0, 1.6, -2.0, side="memory"),
    "onchip": Head(
        _onchip, lambda f: len(f.tiles) + 1, "overlaps", -2.0, 2.5, 0.0, operand_bounds=(-2.0, math.log(2.0))
    ),
    "issue": Head(_issue, _ways, "limits", 0.1, 0.4, 0.2, side="compute"),
    "power": Head(
        _power, lambda f: len(f.tiles) + _ways(f), "limits", 0.0, 0.45, 0.2, most=_most_power, side="compute"
    ),
    "overhead": Head(_overhead, lambda f: 3, "adds", -4.0, 2.0, 0.0, tensor_bounds=(-4.0, 3.0)),
}
"""Heads by name; their order is that of the weights."""
PRODUCT_HEADS: dict[str, Head] = {
    "compute": Head(_fastest_tile, lambda f: 1, "overlaps", 0.0, 0.5, 0.1, side="compute"),
    "dram": HEADS["dram"],
    "power": HEADS["power"],
    "overhead": Head(_kilocycle, lambda f: 1, "adds", -3.0, 1.5, 0.0),
}
"""Heads of products on the vector path, whose blocks issue and bring in what their arithmetic needs."""
LINKED_HEADS: dict[str, Head] = {
    "link": Head(_link, lambda f: 4, "overlaps", 0.0, 2.5, 0.25, side="memory"),
    "dram": Head(_copies, lambda f: 1, "overlaps", -1.5, 2.0, 0.0, side="memory"),
    "nic": Head(_nic, lambda f: 2, "overlaps", 0.0, 1.5, 0.25, side="memory"),
    "protocol": Head(_protocol, lambda f: 4, "overlaps", -1.0, 1.5, 0.0),
    "hops": Head(_hops, lambda f: 8, "adds", -2.5, 2.5, 0.0),
    "far hops": Head(_far_hops, lambda f: 2, "adds", -1.5, 2.5, 0.5),
    "startup": Head(_startup, lambda f: 2, "adds", -1.0, 4.0, 2.0),
}
"""Heads of families that send to other GPUs; those that are not in `HEADS` stand in the residuals by their place."""


def heads_of(family: Family) -> dict[str, Head]:
    """The heads of a family by name, in the order of its weights."""
    if family.linked:
        return LINKED_HEADS
    return PRODUCT_HEADS if family.vector_products else HEADS


def physical_times(at: Launch) -> dict[str, Times]:
    """Times of kernels on a machine by head, seconds.

    Gradients: reach every GPU field and the physics; through `ceil` only when relaxation > 0. Splits of the contraction
    are the fastest one (a minimum: gradient of the chosen one).
    """
    return {name: head.time(at) for name, head in heads_of(at.family).items()}


def most_times(at: Launch) -> dict[str, Times]:
    """The longest that some heads may be."""
    longest = {name: head.most(at) for name, head in heads_of(at.family).items() if head.most is not None}
    return {name: times for name, times in longest.items() if times is not None}
