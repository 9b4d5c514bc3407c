"""The default predictor: a shape-only network mixes physical times.

For each head j (compute, DRAM, re-read, on-chip, issue, power, overhead):

    log t_j = Σ_i w_ji(shape) · log T_i(GPU, shape) + b_j(shape),   w_j a softmax, b_j bounded
                                                    # power: no more than a board that keeps a base clock takes

    body  = max(p-norm of compute, DRAM, re-read and on-chip, issue, power, speed of light)   # limits: nearly a max;
                                                                      # alone, a short kernel meets a share of power
    run   = body + overhead, and 2 us for every further kernel of one operator
    total = lead + max(floor − lead, run)                               # alone; floor + run in a model or a CUDA graph

Every logarithm is shifted by what a device, a vendor's libraries or a running model does otherwise (`shifts`).

The T_i are monotone in every GPU field and homogeneous of degree −1 in its rates (`roofline`), the weights are
non-negative, sum to one and see the shape only. So the forecast has the right slope in every field by construction,
its rate elasticities sum to −1 less the share of floor and further kernels, and it never falls below the speed of
light.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from neusight_jax.gpu import GPU
from neusight_jax.kernels.family import LIBRARY, Dims, Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.roofline import (
    Isolated,
    Light,
    PhysicalTimes,
    Scalar,
    element_bytes,
    light,
    peak_flop_per_s,
    physical_times,
    power_share,
)
from neusight_jax.shifts import (
    COMPUTE,
    DRAM,
    EFFECTS,
    FLOOR,
    HEADS,
    ISSUE,
    OVERHEAD,
    POWER,
    REREAD,
    arithmetic_shift,
    backward_shift,
    device_shift,
    effect_width,
    inside_shift,
    memory_shift,
    op_shift,
    other_vendor,
    stack_shift,
    usual_effect,
)
from neusight_jax.terms import KernelTerms
from neusight_jax.tiles import ChosenTile, TileChoice, choose_tile
from neusight_jax.trust import Trust
from neusight_jax.utilization import Network, apply_network, init_network

LIMIT_NORM = 12.0
"""Order of the norm that joins the limits to the rest: nearly a maximum, as a card throttles only at its limit."""
HOST_NORM = 24.0
"""Order of the norm that joins a kernel to the host's work beside it: a maximum but for a corner of 3 %."""
TILED: tuple[str, ...] = ("compute", "reread", "onchip", "power")
"""Heads whose last components are one for each tile of the menu."""
OFFSETS: tuple[tuple[float, float], ...] = (
    (0.0, 2.5),
    (0.0, 1.5),
    (-3.0, 1.6),
    (-2.0, 2.5),
    (0.1, 0.4),
    (0.0, 0.45),
    (-4.0, 2.0),
)
"""Bounds of b_j, natural logarithm. Compute and DRAM cannot beat their ideal."""
STREAMED: tuple[str, ...] = ("elementwise", "softmax")
"""Networks of kernels that read and write every byte once."""
STREAMED_MOST = 0.3
"""Their largest b_j of DRAM and of re-reads: long sums reach 0.74 to 0.93 of the bandwidth on seven GPUs of two
vendors. What is below 0.74 of it, as wide softmax on most of them, waits for something that does not go with
bandwidth."""
TENSOR_OVERHEAD: tuple[float, float] = (-4.0, 3.0)
"""The same of the overhead beside tensor cores: what fused attention does before and after its loop, 8 to 12 us, goes
with the clock and not with the floor, which all machines share."""
OFFSET_STARTS: tuple[float, ...] = (0.3, 0.25, -2.0, 0.0, 0.2, 0.2, 0.0)
"""b_j before training."""
MIN_NORM = 3.0
"""Smallest order of the p-norm."""
STACK_HIDDEN: tuple[int, ...] = (16, 16)
"""Hidden layers of the network of another vendor's libraries."""
FLOOR_S = 25e-6
"""Launch floor before training, seconds."""
TENSOR_FLOOR_S = 3e-6
"""The same for kernels of tensor cores, measured inside CUDA graphs."""
LAUNCH_GAP_S = 2e-6
"""What a launch costs inside a running model, seconds: kernels queue up behind each other, so nearly nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FamilyMixture:
    """Parameters of one family.

    Attributes:
      network: shape features -> mixing logits and offsets of every head.
      log_floor_s: launch floor of an isolated measurement, log seconds, per member.
      log_gap_s: what a launch costs inside a running model, log seconds, per member.
      raw_norm: p-norm order before softplus, per member.
      in_model: log shift of each head inside a running model, per member (`inside_shift`).
      stack: log shift of `EFFECTS` on GPUs with an fp32 matrix path of its own, which run another vendor's libraries.
      effect: what sets one device apart (`effect_width` numbers); zeros unless calibrated. [effect] or, in training,
        [kernel, effect].
      library: number of the library that runs the family on the device (`Family.known_libraries`); None = what the
        kernels say of it, and if they say nothing, `Family.usual_library`.
      memory: log shift of the DRAM head by kind of memory (`gpu.MEMORY_KINDS`); None = it is in `effect`, or unknown.
      usual: what GPUs share that run `Family.usual_library`, of the form of `effect`, for a GPU without a name; none on
        GPUs with an fp32 matrix path of its own. None = it is in `effect`, or unknown.
      backward: log shift of each head in any phase but forward, where operands are laid out otherwise, per member;
        None = none.
      raw_lead: share of the launch floor before the kernel starts, before a sigmoid, per member; None = all of it.
      op_floor: log of each operator's launch floor over `log_floor_s`, per member; None = all alike.
      stack_network: shape features -> what another vendor's libraries add to the outputs of `network`, where `stack` is
        in force; None = nothing.
    """

    network: Network
    log_floor_s: Float[Array, " member"]
    log_gap_s: Float[Array, " member"]
    raw_norm: Float[Array, " member"]
    in_model: Float[Array, "member head"]
    stack: Float[Array, "member effect"]
    effect: Float[Array, "*kernel effect"]
    library: Float[Array, ""] | None = None
    memory: Float[Array, " kind"] | None = None
    usual: Float[Array, " effect"] | None = None
    backward: Float[Array, "member head"] | None = None
    raw_lead: Float[Array, " member"] | None = None
    op_floor: Float[Array, "member op"] | None = None
    stack_network: Network | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixturePredictor:
    """The `mixture` predictor: parameters and tile choice of every measured family, and how far to trust them."""

    families: dict[str, FamilyMixture] = field(default_factory=dict)
    tiles: dict[str, TileChoice] = field(default_factory=dict)
    trust: Trust | None = None

    def covers(self, family: Family) -> bool:
        """Families whose network was trained."""
        return family.network in self.families

    def terms(
        self, family: Family, gpu: GPU, batch: KernelBatch, *, isolated: Isolated, relaxation: Scalar = 0.0
    ) -> KernelTerms:
        """Forecast kernels of one family; see `latency.kernel_latency`."""
        parameters = self.families[family.network]
        size = element_bytes(batch.dtype)
        dims = batch.dims
        if family.known_libraries:
            dims = {**dims, LIBRARY: jnp.broadcast_to(library_of(parameters, family, gpu, dims), batch.dtype.shape)}
        work = family.work(dims, size)
        peak = peak_flop_per_s(gpu, family, batch.dtype)
        bounds = light(gpu, work, peak)
        times = physical_times(gpu, family, work, peak, batch.dtype, relaxation)
        features = family.features(dims, size)
        tile = choose_tile(self.tiles[family.network], gpu, work, features)
        if parameters.usual is not None:
            parameters = replace(parameters, effect=parameters.effect + usual_effect(parameters.usual, gpu))
        shift = device_shift(parameters.effect, parameters.network, family, features)
        shift += stack_shift(parameters.stack, gpu)
        shift += inside_shift(parameters.in_model, gpu, isolated)
        if parameters.memory is not None:
            shift += memory_shift(parameters.memory, gpu)
        if parameters.backward is not None and family.turned:
            shift += backward_shift(parameters.backward, batch.phase)
        if parameters.op_floor is not None and family.name == family.network:
            shift += op_shift(parameters.op_floor, batch.op, isolated)
        if family.other_flop:
            shift += arithmetic_shift(family, gpu, batch.op, isolated)
        more_s = work.more_launches * LAUNCH_GAP_S
        share = power_share(gpu, family, times)
        outputs = network_outputs(parameters, gpu, features)
        return mix(parameters, outputs, times, bounds, tile, shift, offsets(family), more_s, share, isolated=isolated)


def library_of(parameters: FamilyMixture, family: Family, gpu: GPU, dims: Dims) -> Float[Array, "*#kernel"]:
    """Number of the library that runs kernels; GPUs with an fp32 matrix path run another vendor's."""
    said = parameters.library if parameters.library is not None else dims.get(LIBRARY)
    number = jnp.asarray(family.usual_library if said is None else said)
    return jnp.where(other_vendor(gpu), family.other_library, number)


def network_outputs(
    parameters: FamilyMixture, gpu: GPU, features: Float[Array, "kernel feature"]
) -> Float[Array, "member kernel output"]:
    """Mixing logits and raw offsets for shapes; a switch by vendor, without gradient to the GPU."""
    outputs = apply_network(parameters.network, features)
    if parameters.stack_network is None:
        return outputs
    other = jnp.atleast_1d(other_vendor(gpu))[None, :, None]
    return outputs + jnp.where(other, apply_network(parameters.stack_network, features), 0.0)


def offsets(family: Family) -> tuple[tuple[float, float], ...]:
    """Bounds of b_j for a family."""
    bounds = list(OFFSETS)
    if family.tensor_core:
        bounds[OVERHEAD] = TENSOR_OVERHEAD
    if family.network in STREAMED:
        bounds[DRAM], bounds[REREAD] = ((OFFSETS[head][0], STREAMED_MOST) for head in (DRAM, REREAD))
    return tuple(bounds)


def mix(
    parameters: FamilyMixture,
    outputs: Float[Array, "member kernel output"],
    times: PhysicalTimes,
    bounds: Light,
    tile: ChosenTile,
    shift: Float[Array, "#member #kernel effect"],
    ranges: Sequence[tuple[float, float]],
    more_s: Float[Array, " kernel"] | float = 0.0,
    share: Float[Array, " kernel"] | None = None,
    *,
    isolated: Isolated,
) -> KernelTerms:
    """Mix physical times into a forecast (module docstring); members are averaged as logarithms.

    `more_s` is for further kernels of one operator, beside the floor; `share` is `roofline.power_share`.
    """
    alone = jnp.asarray(isolated, dtype=float)
    logs, start = [], 0
    for head, name in enumerate(HEADS):
        component = jnp.log(jnp.maximum(getattr(times, name), 1e-30))
        width = component.shape[1]
        mixing = outputs[:, :, start : start + width]
        if times.launched is not None and name in TILED:
            mixing = among_launched(mixing, times.launched)
        weight = jax.nn.softmax(mixing, axis=-1)
        low, high = ranges[head]
        middle = (OFFSET_STARTS[head] - low) / (high - low)
        raw = outputs[:, :, start + width] + jnp.log(middle / (1.0 - middle))
        offset = low + (high - low) * jax.nn.sigmoid(raw)
        log_s = jnp.sum(weight * component, axis=-1) + offset
        if head == POWER and times.promised is not None:
            log_s = jnp.minimum(log_s, jnp.sum(weight * jnp.log(times.promised), axis=-1))
        logs.append(log_s + shift[..., head])
        start += width + 1
    order = (MIN_NORM + jax.nn.softplus(parameters.raw_norm))[:, None]
    body = jax.nn.logsumexp(jnp.stack(logs[:ISSUE]) * order, axis=0) / order
    cool, arithmetic = _limit(body, logs[ISSUE]), jnp.maximum(logs[COMPUTE], logs[ISSUE])
    body, busy = _limit(cool, logs[POWER]), jnp.maximum(arithmetic, logs[POWER])
    if share is not None:
        met = 1.0 - alone * (1.0 - share)
        body, busy = _partly(cool, body, met), _partly(arithmetic, busy, met)
    body_s = jnp.maximum(jnp.exp(body), bounds.speed_of_light_s)
    floor = alone * parameters.log_floor_s[:, None] + (1.0 - alone) * parameters.log_gap_s[:, None]
    floor_s = jnp.exp(floor + shift[..., FLOOR])
    overhead_s = jnp.exp(logs[OVERHEAD]) + more_s
    launch_s = overhead_s + floor_s
    if parameters.raw_lead is not None:
        after_s = alone * (1.0 - jax.nn.sigmoid(parameters.raw_lead))[:, None] * floor_s
        run_s = body_s + overhead_s
        launch_s += jnp.maximum(longer(after_s, run_s) - run_s, 0.0) - after_s
    return KernelTerms(
        seconds=jnp.exp(jnp.mean(jnp.log(body_s + launch_s), axis=0)),
        light=bounds,
        compute_s=jnp.exp(jnp.mean(busy, axis=0)),
        memory_s=jnp.exp(jnp.mean(jnp.maximum(logs[DRAM], logs[REREAD]), axis=0)),
        launch_s=jnp.exp(jnp.mean(jnp.log(launch_s), axis=0)),
        tile=tile,
    )


def _limit(log_s: Float[Array, "*row"], limit_log_s: Float[Array, "*row"]) -> Float[Array, "*row"]:
    """Log times under a limit that binds only when it is reached."""
    return jnp.logaddexp(log_s * LIMIT_NORM, limit_log_s * LIMIT_NORM) / LIMIT_NORM


def _partly(
    log_s: Float[Array, "*row"], limited_log_s: Float[Array, "*row"], share: Float[Array, "*#row"]
) -> Float[Array, "*row"]:
    """Log of a time that meets a share of what a limit adds to it."""
    return log_s + jnp.log1p(share * jnp.expm1(limited_log_s - log_s))


def longer(a_s: Float[Array, "*#row"], b_s: Float[Array, "*#row"]) -> Float[Array, "*row"]:
    """Nearly the longer of two times that pass together, never less; b where a is 0."""
    logs = (jnp.log(jnp.maximum(time, 1e-30)) * HOST_NORM for time in (a_s, b_s))
    return jnp.exp(jnp.logaddexp(*logs) / HOST_NORM)


def among_launched(
    mixing: Float[Array, "member kernel component"], launched: Float[Array, "kernel tile"]
) -> Float[Array, "member kernel component"]:
    """Mixing logits with what the tiles of the menu weigh together given to those that the library launches."""
    tiles = mixing[:, :, -launched.shape[1] :]
    known = jnp.where(launched > 0, tiles, -jnp.inf)
    together, own = (jax.nn.logsumexp(part, axis=-1, keepdims=True) for part in (tiles, known))
    return jnp.concatenate([mixing[:, :, : -launched.shape[1]], known - own + together], axis=-1)


def head_widths(family: Family) -> tuple[int, ...]:
    """Components of each head for a family, in the order of `HEADS`."""
    tiles = len(family.tiles)
    ways = 2 if family.alternatives else 1
    arithmetic = 2 * tiles if family.l2_operands else tiles
    return (arithmetic + 1 + ways, 1 + ways, tiles, tiles + 1, ways, tiles + ways, 3)


def offset_outputs(family: Family) -> tuple[int, ...]:
    """Where the raw offset of each head stands among the network's outputs: after the head's mixing logits."""
    return tuple(itertools.accumulate((width + 1 for width in head_widths(family)), initial=-1))[1:]


def init_family(
    key: PRNGKeyArray,
    family: Family,
    features: Float[Array, "row feature"],
    hidden: tuple[int, ...],
    members: int,
    stack_features: Float[Array, "row feature"] | None = None,
) -> FamilyMixture:
    """Untrained parameters: uniform mixing, offsets at `OFFSET_STARTS`, floor and gap as said above.

    Args:
      features, stack_features: what the networks are normalised to, the second that of another vendor's libraries;
        None = there is none.
    """
    outputs = sum(head_widths(family)) + len(HEADS)
    stack_network = None
    if stack_features is not None:
        stack_network = init_network(jax.random.fold_in(key, 1), stack_features, STACK_HIDDEN, outputs, members)
    floor_s = TENSOR_FLOOR_S if family.tensor_core else FLOOR_S
    return FamilyMixture(
        network=init_network(key, features, hidden, outputs, members),
        log_floor_s=jnp.full((members,), jnp.log(floor_s)),
        log_gap_s=jnp.full((members,), jnp.log(LAUNCH_GAP_S)),
        raw_norm=jnp.zeros((members,)),
        in_model=jnp.zeros((members, len(HEADS))),
        stack=jnp.zeros((members, len(EFFECTS))),
        effect=jnp.zeros((effect_width(family),)),
        backward=jnp.zeros((members, len(HEADS))) if family.turned else None,
        raw_lead=None if family.tensor_core else jnp.zeros((members,)),
        op_floor=None if family.tensor_core else jnp.zeros((members, len(family.ops))),
        stack_network=stack_network,
    )
