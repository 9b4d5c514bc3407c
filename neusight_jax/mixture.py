"""The default predictor: a shape-only network mixes physical times.

For each head j (compute, DRAM, re-read, on-chip, issue, power, overhead):

    log t_j = Σ_i w_ji(shape) · log T_i(GPU, shape) + b_j(shape),   w_j a softmax, b_j bounded
                                                    # power: no more than a board takes that keeps its base clock

    body  = max(p-norm of compute, DRAM, re-read and on-chip, issue, power, speed of light)   # limits: nearly a max
    total = body + overhead + floor, and 2 us for every further kernel of one operator

Every logarithm is shifted by what a device, a vendor's libraries or a running model does otherwise (`shifts`).

The T_i are monotone in every GPU field and homogeneous of degree −1 in its rates (`roofline`), the weights are
non-negative, sum to one and see the shape only. So the forecast has the right slope in every field by construction,
its rate elasticities sum to −1 less the share of floor and further kernels, and it never falls below the speed of
light.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from neusight_jax.gpu import GPU, MEMORY_KINDS
from neusight_jax.kernels.family import LIBRARY, Family
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
    device_shift,
    effect_width,
    inside_shift,
    memory_shift,
    stack_shift,
)
from neusight_jax.terms import KernelTerms
from neusight_jax.tiles import ChosenTile, TileChoice, choose_tile
from neusight_jax.trust import Trust
from neusight_jax.utilization import Network, apply_network, init_network

LIMIT_NORM = 12.0
"""Order of the norm that joins the limits to the rest: nearly a maximum, as a card throttles only at its limit."""
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
TENSOR_OVERHEAD: tuple[float, float] = (-4.0, 3.0)
"""The same of the overhead beside tensor cores: what fused attention does before and after its loop, 8 to 12 us, goes
with the clock and not with the floor, which all machines share."""
OFFSET_STARTS: tuple[float, ...] = (0.3, 0.25, -2.0, 0.0, 0.2, 0.2, 0.0)
"""b_j before training."""
MIN_NORM = 3.0
"""Smallest order of the p-norm."""
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
      in_model: log shift of each head inside a running model, per member.
      stack: log shift of `EFFECTS` on GPUs with an fp32 matrix path of its own, which run another vendor's libraries.
      memory: log shift of the DRAM head by kind of memory (`gpu.MEMORY_KINDS`), per member.
      effect: what sets one device apart (`effect_width` numbers); zeros unless calibrated. [effect] or, in training,
        [kernel, effect].
      library: number of the library that runs the family on the device (`Family.known_libraries`); None = what the
        kernels say of it, and if they say nothing, as the rest.
    """

    network: Network
    log_floor_s: Float[Array, " member"]
    log_gap_s: Float[Array, " member"]
    raw_norm: Float[Array, " member"]
    in_model: Float[Array, "member head"]
    stack: Float[Array, "member effect"]
    memory: Float[Array, "member kind"]
    effect: Float[Array, "*kernel effect"]
    library: Float[Array, ""] | None = None


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
        if parameters.library is not None:
            dims = {**dims, LIBRARY: jnp.full(batch.dtype.shape, parameters.library)}
        work = family.work(dims, size)
        peak = peak_flop_per_s(gpu, family, batch.dtype)
        bounds = light(gpu, work, peak)
        times = physical_times(gpu, family, work, peak, batch.dtype, relaxation)
        features = family.features(dims, size)
        tile = choose_tile(self.tiles[family.network], gpu, work, features)
        shift = device_shift(parameters.effect, parameters.network, family, features)
        shift += stack_shift(parameters.stack, gpu)
        shift += inside_shift(parameters.in_model, isolated) + memory_shift(parameters.memory, gpu)
        more_s = work.more_launches * LAUNCH_GAP_S
        outputs = apply_network(parameters.network, features)
        return mix(parameters, outputs, times, bounds, tile, shift, offsets(family), more_s, isolated=isolated)


def offsets(family: Family) -> tuple[tuple[float, float], ...]:
    """Bounds of b_j for a family."""
    return (*OFFSETS[:OVERHEAD], TENSOR_OVERHEAD) if family.tensor_core else OFFSETS


def mix(
    parameters: FamilyMixture,
    outputs: Float[Array, "member kernel output"],
    times: PhysicalTimes,
    bounds: Light,
    tile: ChosenTile,
    shift: Float[Array, "#member #kernel effect"],
    ranges: Sequence[tuple[float, float]],
    more_s: Float[Array, " kernel"] | float = 0.0,
    *,
    isolated: Isolated,
) -> KernelTerms:
    """Mix physical times into a forecast (module docstring); members are averaged as logarithms.

    `more_s` is for further kernels of one operator, beside the floor.
    """
    alone = jnp.asarray(isolated, dtype=float)
    logs, start = [], 0
    for head, name in enumerate(HEADS):
        component = jnp.log(jnp.maximum(getattr(times, name), 1e-30))
        width = component.shape[1]
        mixing = outputs[:, :, start : start + width]
        weight = jax.nn.softmax(mixing, axis=-1)
        low, high = ranges[head]
        middle = (OFFSET_STARTS[head] - low) / (high - low)
        raw = outputs[:, :, start + width] + jnp.log(middle / (1.0 - middle))
        offset = low + (high - low) * jax.nn.sigmoid(raw)
        log_s = jnp.sum(weight * component, axis=-1) + offset
        if head == POWER and times.most_power is not None:
            log_s = jnp.minimum(log_s, jnp.sum(weight * jnp.log(times.most_power), axis=-1))
        logs.append(log_s + shift[..., head])
        start += width + 1
    order = (MIN_NORM + jax.nn.softplus(parameters.raw_norm))[:, None]
    body = jax.nn.logsumexp(jnp.stack(logs[:ISSUE]) * order, axis=0) / order
    body = _limit(_limit(body, logs[ISSUE]), logs[POWER])
    busy = jnp.maximum(jnp.maximum(logs[COMPUTE], logs[ISSUE]), logs[POWER])
    body_s = jnp.maximum(jnp.exp(body), bounds.speed_of_light_s)
    floor = alone * parameters.log_floor_s[:, None] + (1.0 - alone) * parameters.log_gap_s[:, None]
    launch_s = jnp.exp(logs[OVERHEAD]) + more_s + jnp.exp(floor + shift[..., FLOOR])
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
) -> FamilyMixture:
    """Untrained parameters: uniform mixing, offsets at `OFFSET_STARTS`, floor and gap as said above; the network is
    normalised to the features."""
    floor_s = TENSOR_FLOOR_S if family.tensor_core else FLOOR_S
    return FamilyMixture(
        network=init_network(key, features, hidden, sum(head_widths(family)) + len(HEADS), members),
        log_floor_s=jnp.full((members,), jnp.log(floor_s)),
        log_gap_s=jnp.full((members,), jnp.log(LAUNCH_GAP_S)),
        raw_norm=jnp.zeros((members,)),
        in_model=jnp.zeros((members, len(HEADS))),
        stack=jnp.zeros((members, len(EFFECTS))),
        memory=jnp.zeros((members, len(MEMORY_KINDS))),
        effect=jnp.zeros((effect_width(family),)),
    )
