"""The default predictor: a shape-only network mixes physical times.

For each head j (compute, DRAM, re-read, on-chip, issue, power, overhead):

    log t_j = Σ_i w_ji(shape) · log T_i(GPU, shape) + b_j(shape),   w_j a softmax, b_j bounded
                                                    # power: no more than a board takes that keeps its base clock

    body  = max(p-norm of compute, DRAM, re-read and on-chip, issue, power, speed of light)   # limits: nearly a max
    total = body + overhead + floor, and 2 us for every further kernel of one operator

Every logarithm is moved by what a device, a vendor's libraries or a running model does otherwise (`residuals`).

The T_i are monotone in every GPU field and homogeneous of degree −1 in its rates (`roofline`), the weights are
non-negative, sum to one and see the shape only. So the forecast has the right slope in every field by construction,
its rate elasticities sum to −1 less the share of floor and further kernels, and it never falls below the speed of
light.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from neusight_jax.hardware.cluster import Machine, gpu_of, topology_of
from neusight_jax.kernels.family import LIBRARY, Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.heads import (
    ChosenTile,
    Launch,
    TileChoice,
    choose_tile,
    heads_of,
    launched,
    most_times,
    physical_times,
)
from neusight_jax.model.intervals import Intervals
from neusight_jax.model.network import Network, apply_network, init_network
from neusight_jax.model.physics import FITTED, STANDARD, fitted_physics
from neusight_jax.model.power import PowerLaw
from neusight_jax.model.predictor import KernelForecast
from neusight_jax.model.residuals import (
    EFFECTS,
    FLOOR,
    IN_MODEL,
    ROWS,
    device_residual,
    effect_width,
    table_residual,
)
from neusight_jax.model.roofline import (
    Isolated,
    LowerBounds,
    Relaxation,
    element_bytes,
    joined_logs,
    lower_bounds,
    peak_flop_per_s,
)

FLOOR_S = 25e-6
"""Launch floor before training, seconds."""
TENSOR_FLOOR_S = 3e-6
"""The same for kernels of tensor cores, measured inside CUDA graphs."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FamilyMixture:
    """Parameters of one family.

    Attributes:
      network: shape features -> mixing logits and offsets of every head.
      log_floor_s: launch floor of an isolated measurement, log seconds, per member.
      raw_norm: p-norm order before softplus, per member.
      residual: what running models, vendors and memories do otherwise (`residuals.ROWS`), per member.
      physics: how far the fitted constants are from their defaults (`physics.fitted_physics`).
      effect: what sets one device apart (`effect_width` numbers); zeros unless calibrated. [effect] or, in training,
        [kernel, effect].
      library: number of the library that runs the family on the device (`Family.known_libraries`); None = what the
        kernels say of it, and if they say nothing, as the rest.
    """

    network: Network
    log_floor_s: Float[Array, " member"]
    raw_norm: Float[Array, " member"]
    residual: Float[Array, "member row effect"]
    physics: Float[Array, " constant"]
    effect: Float[Array, "*kernel tilted"]
    library: Float[Array, ""] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixturePredictor:
    """The `mixture` predictor: parameters and tile choice of every measured family, and how far to trust them.

    Attributes:
      power: constants of the law of power, where they were fitted with it; None = those of `model.power`.
    """

    families: dict[str, FamilyMixture] = field(default_factory=dict)
    tiles: dict[str, TileChoice] = field(default_factory=dict)
    intervals: Intervals | None = None
    power: PowerLaw | None = None

    def __repr__(self) -> str:
        return f"<MixturePredictor: {', '.join(self.families) or 'no families'}>"

    def covers(self, family: Family) -> bool:
        """Families whose network was trained."""
        return family.network in self.families

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelForecast:
        """Forecast kernels of one family.

        Args: as of `Predictor.forecast_kernels`.
        """
        gpu, topology = gpu_of(machine), topology_of(machine) if family.linked else None
        parameters = self.families[family.network]
        size = element_bytes(batch.dtype)
        dims = batch.dims
        if parameters.library is not None:
            dims = {**dims, LIBRARY: jnp.full(batch.dtype.shape, parameters.library)}
        work = family.work(dims, size)
        peak = peak_flop_per_s(gpu, family, batch.dtype)
        physics = fitted_physics(parameters.physics)
        at = launched(gpu, family, work, peak, batch.dtype, relaxation, physics, topology, isolated)
        features = family.features(dims, size)
        residual = device_residual(parameters.effect, parameters.network, family, features)
        residual += table_residual(parameters.residual, gpu, isolated)
        return mix(
            parameters,
            apply_network(parameters.network, features),
            at,
            lower_bounds(gpu, work, peak, at.topology, isolated),
            choose_tile(self.tiles[family.network], gpu, work, features),
            residual,
        )


def mix(
    parameters: FamilyMixture,
    outputs: Float[Array, "member kernel output"],
    at: Launch,
    bounds: LowerBounds,
    tile: ChosenTile,
    residual: Float[Array, "#member #kernel effect"],
) -> KernelForecast:
    """Mix physical times into a forecast (module docstring); members are averaged as logarithms.

    Args:
      parameters: of the family, for its floor and the order of its norm.
      outputs: of the network: for every head its mixing logits, then its offset [member, kernel, output].
      at: the kernels on a machine.
      bounds: their lower bounds.
      tile: reported with the forecast; it changes nothing.
      residual: what is added to the logarithms of heads and floor [member, kernel, effect].
    """
    heads, logs = heads_of(at.family), _head_logs(outputs, at, residual)
    order = (at.physics.least_norm + jax.nn.softplus(parameters.raw_norm))[:, None]
    overlapping = jnp.stack([logs[name] for name, head in heads.items() if head.joined == "overlaps"])
    body = jax.nn.logsumexp(overlapping * order, axis=0) / order
    for name, head in heads.items():
        if head.joined == "limits":
            body = joined_logs(body, logs[name], at.physics.limit_norm)
    body_s = jnp.maximum(jnp.exp(body), bounds.speed_of_light_s)
    launch_s = jnp.exp(parameters.log_floor_s[:, None] + residual[..., FLOOR])
    launch_s += at.work.more_launches * at.physics.further_launch_s
    for name, head in heads.items():
        if head.joined == "adds":
            launch_s += jnp.exp(logs[name])
    sides = {side: [logs[name] for name, head in heads.items() if head.side == side] for side in ("compute", "memory")}
    busy, moving = (functools.reduce(jnp.maximum, part or [jnp.full_like(body, -jnp.inf)]) for part in sides.values())
    return KernelForecast(
        seconds=jnp.exp(jnp.mean(jnp.log(body_s + launch_s), axis=0)),
        bounds=bounds,
        compute_s=jnp.exp(jnp.mean(busy, axis=0)),
        memory_s=jnp.exp(jnp.mean(moving, axis=0)),
        launch_s=jnp.exp(jnp.mean(jnp.log(launch_s), axis=0)),
        tile=tile,
    )


def _head_logs(
    outputs: Float[Array, "member kernel output"], at: Launch, residual: Float[Array, "#member #kernel effect"]
) -> dict[str, Float[Array, "member kernel"]]:
    """log t_j of every head: a softmax over its own columns of the outputs, then its offset."""
    heads, most, times = heads_of(at.family), most_times(at), physical_times(at)
    ends = np.cumsum([component.shape[1] + 1 for component in times.values()]) - 1
    log_times = jnp.log(jnp.maximum(jnp.concatenate(list(times.values()), axis=1), 1e-30))
    low, high = np.array([head.bounds(at.family) for head in heads.values()]).T
    middle = (np.array([head.start for head in heads.values()]) - low) / (high - low)
    offset = low + (high - low) * jax.nn.sigmoid(outputs[:, :, ends] + np.log(middle / (1.0 - middle)))
    columns = [EFFECTS.index(name) if name in EFFECTS else place for place, name in enumerate(heads)]
    moved = residual[..., np.array(columns)]
    logs = {}
    # Outputs hold an offset after the logits of each head, times do not: their columns lie `place` further left.
    for place, (name, end) in enumerate(zip(heads, ends, strict=True)):
        width = times[name].shape[1]
        weight = jax.nn.softmax(outputs[:, :, end - width : end], axis=-1)
        log_s = jnp.sum(weight * log_times[:, end - place - width : end - place], axis=-1) + offset[:, :, place]
        if name in most:
            log_s = jnp.minimum(log_s, jnp.sum(weight * jnp.log(most[name]), axis=-1))
        logs[name] = log_s + moved[..., place]
    return logs


def head_widths(family: Family) -> tuple[int, ...]:
    """Components of each head for a family, in the order of `heads_of`."""
    return tuple(head.components(family) for head in heads_of(family).values())


def init_family(
    key: PRNGKeyArray,
    family: Family,
    features: Float[Array, "row feature"],
    hidden: tuple[int, ...],
    members: int,
    module: Any = None,
) -> FamilyMixture:
    """Untrained parameters: uniform mixing, offsets at their starts, and the launch floor before training.

    In a model the floor is what a further launch takes.

    Args:
      key: of the network's weights.
      family: whose heads the outputs are for.
      features: of the training rows; the network is normalised to them.
      hidden: sizes of the hidden layers.
      members: ensemble size.
      module: flax module in place of those layers; None = a perceptron of them.
    """
    floor_s = TENSOR_FLOOR_S if family.tensor_core else FLOOR_S
    residual = jnp.zeros((members, len(ROWS), len(EFFECTS)))
    return FamilyMixture(
        network=init_network(key, features, hidden, sum(head_widths(family)) + len(heads_of(family)), members, module),
        log_floor_s=jnp.full((members,), jnp.log(floor_s)),
        raw_norm=jnp.zeros((members,)),
        residual=residual.at[:, IN_MODEL, FLOOR].set(jnp.log(STANDARD.further_launch_s / floor_s)),
        physics=jnp.zeros((len(FITTED),)),
        effect=jnp.zeros((effect_width(family),)),
    )
