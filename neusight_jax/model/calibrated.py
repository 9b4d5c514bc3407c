"""The `mixture` predictor with what was measured on one GPU: small shifts of its heads, larger near measured shapes.

    effect_j(shape) = effect_j + c_j + Σ_i κ(shape, shape_i) w_ij,   κ the Matérn 3/2 kernel of `shape_points`

The shifts see the shape only and scale the heads before the speed-of-light maximum. So a calibrated predictor keeps
what holds for the mixture by construction: the sign of every slope, its rate elasticities, the speed of light. Far from
every measured shape only the constants are left. `training.calibration` fits them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.hardware.cluster import Machine
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.rowwise import TRAFFIC_DIMS
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.intervals import Intervals
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import KernelForecast
from neusight_jax.model.residuals import EFFECTS, add_to_effect
from neusight_jax.model.roofline import Isolated, Relaxation, Scalar, element_bytes

PADDING = 4.0
"""Weight of the padding coordinates beside those of size."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShapeEffect:
    """Shifts of a family's heads on one GPU, as a function of the shape.

    Attributes:
      constant: log shift of every head and the floor (`mixture.EFFECTS`) for any shape, c.
      points: measured shapes, as `shape_point` gives them.
      weights: w.
    """

    constant: Float[Array, " effect"]
    points: Float[Array, "point coordinate"]
    weights: Float[Array, "point effect"]

    def at(self, points: Float[Array, "kernel coordinate"]) -> Float[Array, "kernel effect"]:
        """The shifts of kernels."""
        return self.constant + shape_kernel(points, self.points) @ self.weights


def shape_points(family: Family, batch: KernelBatch, length: float | Scalar = 1.0) -> Float[Array, "kernel coordinate"]:
    """Where kernels lie in the space of shapes, whatever the machine: coordinates over a length, in log units.

    The logarithms of the dims, of the bytes, of the arithmetic intensity (matrix products), and what padding to the
    smallest and to the largest tile costs, `PADDING` times: it matters within a few percent.
    """
    size = element_bytes(batch.dtype)
    work = family.work(batch.dims, size)
    moved = jnp.log(work.bytes_moved)
    sizes = [jnp.log(jnp.maximum(batch.dims[name], 1.0)) for name in _sizes(family)]
    if family.matrix:
        padded, useful = work.blocks * work.block_flop, work.flop
        sizes += [moved, jnp.log(work.flop) - moved]
    else:
        padded, useful = work.blocks * work.block_bytes, work.bytes_moved
        sizes += [moved]
    waste = [PADDING * (jnp.log(padded[:, tile, 0]) - jnp.log(useful)) for tile in (0, -1)]
    return jnp.stack([*sizes, *waste], axis=-1) / length


def shape_kernel(
    left: Float[Array, "row coordinate"], right: Float[Array, "point coordinate"]
) -> Float[Array, "row point"]:
    """Matérn 3/2: (1 + √3 d) exp(−√3 d), d the distance. 1 for equal shapes, 0 far away."""
    squares = jnp.sum((left[:, None, :] - right[None, :, :]) ** 2, axis=-1)
    # The square root has no slope at zero; the kernel is flat there, so the small distance costs nothing.
    distance = jnp.sqrt(3.0 * jnp.maximum(squares, 1e-12))
    kernel: Array = (1.0 + distance) * jnp.exp(-distance)
    return kernel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CalibratedPredictor:
    """A `mixture` predictor calibrated on one GPU.

    Attributes:
      base: the predictor before, with the intervals after.
      shapes: by network, what was measured; a network without entry is as before.
      length: distance over which shapes resemble each other, in log units of the dims.
    """

    base: MixturePredictor
    shapes: dict[str, ShapeEffect] = field(default_factory=dict)
    length: Float[Array, ""] = field(default_factory=lambda: jnp.ones(()))

    def __repr__(self) -> str:
        return f"<CalibratedPredictor: {', '.join(self.shapes) or 'no families'} of {self.base!r}>"

    @property
    def intervals(self) -> Intervals | None:
        """Intervals of the base: after `calibrate` those of the measured kernels, each forecast from the others."""
        return self.base.intervals

    def covers(self, family: Family) -> bool:
        """Whether the base covers a family."""
        return self.base.covers(family)

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelForecast:
        """Forecast kernels of one family.

        Args: as of `Predictor.forecast_kernels`.
        """
        base = self.base
        if family.network in self.shapes:
            parameters = base.families[family.network]
            shift = self.shapes[family.network].at(shape_points(family, batch, self.length))
            base = shifted(base, family.network, add_to_effect(parameters.effect, shift))
        return base.forecast_kernels(family, machine, batch, isolated=isolated, relaxation=relaxation)


def shifted(base: MixturePredictor, network: str, effect: Float[Array, "*kernel tilted"]) -> MixturePredictor:
    """The predictor with other device effects for one network."""
    return replace(base, families={**base.families, network: replace(base.families[network], effect=effect)})


def init_shape_effect(points: int, coordinates: int) -> ShapeEffect:
    """No shift at all; the sizes a checkpoint is read into."""
    return ShapeEffect(jnp.zeros(len(EFFECTS)), jnp.zeros((points, coordinates)), jnp.zeros((points, len(EFFECTS))))


def shape_coordinates(family: Family) -> int:
    """Number of coordinates that `shape_points` gives."""
    return len(_sizes(family)) + (4 if family.matrix else 3)


def _sizes(family: Family) -> list[str]:
    """Dims that are extents of tensors, of the family whose network it is."""
    return [name for name in FAMILIES[family.network].dims if name not in TRAFFIC_DIMS]
