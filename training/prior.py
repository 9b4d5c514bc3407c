"""Prior of a GPU nobody has measured: how far a predictor's kernels may be off there, and together with which others.

The log error is modelled as a Gaussian process: with J_j(x) = ∂ log t(x) / ∂ effect_j, the share of head j in the
forecast of shape x,

    cov(x, x') = Σ_j J_j(x) J_j(x') (σ_c² + σ_s² κ(x, x')) + σ_b² κ(x, x') Σ_j J_j(x) Σ_j J_j(x'),

a constant per head, a shape-dependent part per head, and one common to all heads; κ from `calibrated`. The widths were
chosen by leave-one-GPU-out (`evaluate --protocol few-shot`): flat around these values, so one set serves most families
(`prior_of`). `calibration` fits kernels under it, `plan` asks which kernels to measure, `identification` what a machine
is that explains them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from neusight_jax.hardware.cluster import Machine, gpu_of, on_device
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelBatch, KernelTable
from neusight_jax.model.calibrated import shape_kernel, shape_points, shifted
from neusight_jax.model.intervals import KernelInterval, kernel_interval
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.residuals import EFFECTS, add_to_effect
from neusight_jax.model.roofline import Isolated

DEVIATIONS = 1.2816
"""Half-width of an 80 % interval in standard deviations of a normal distribution."""


@dataclass(frozen=True)
class Prior:
    """Prior of a GPU before it is measured; natural logarithms.

    Attributes:
      constants: σ_c, spread of each head and of the floor over GPUs.
      shape: σ_s, spread of its shape-dependent part; common: σ_b, of the part all heads share.
      length: distance over which shapes resemble each other, log units of the dims.
      noise: spread of a measurement around what the model can say.
      few: the same on top of it for a single row; in a fit to K rows its square counts 1/K. Of one or two shapes nobody
        knows whether they are the odd ones.
      width: residual from which a row counts less (Huber).
      slow: the same of a row that is slower than the model can say and than the median row is, which counts for nothing
        in the end (Cauchy): a kernel can be slow for reasons of its own, a clock or an algorithm, but not fast. Beside
        the median, for where all are slow the GPU is. None: as any other row.
    """

    constants: tuple[float, ...] = (0.25,) * len(EFFECTS)
    shape: float = 0.2
    common: float = 0.2
    length: float = 4.0
    noise: float = 0.1
    few: float = 0.0
    width: float = 0.2
    slow: float | None = None

    def noise_of(self, count: int) -> float:
        """Spread of a measurement in a fit to this many rows."""
        return math.sqrt(self.noise**2 + self.few**2 / count)

    def weight(self, error: np.ndarray) -> np.ndarray:
        """Weight of rows of these residuals, log(measured / forecast): 1 while they are small."""
        weight: np.ndarray = self.width / np.maximum(self.width, np.abs(error))
        if self.slow is not None:
            behind = np.maximum(error - max(float(np.median(error)), 0.0), 0.0)
            weight /= 1.0 + (behind / self.slow) ** 2
        return weight

    def covariance(self, left: np.ndarray, right: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        """cov(x, x') from the head shares J of both sides and κ."""
        constants = (left * np.square(self.constants)) @ right.T
        heads = left @ right.T
        common = np.outer(left.sum(axis=1), right.sum(axis=1))
        total: np.ndarray = constants + kernel * (self.shape**2 * heads + self.common**2 * common)
        return total


TENSOR_PRIOR = Prior(shape=0.08, common=0.08)
"""The same on tensor cores: what is wrong there depends less on the shape."""
PRODUCT_PRIOR = replace(TENSOR_PRIOR, constants=(0.15, 0.1, 0.25, 0.3, 0.05, 0.1, 0.15, 0.25))
"""The same of products on tensor cores, least unsure of DRAM and power: the spreads that 400 bf16 products of each GPU,
its architecture left out, asked for."""

FEW = 0.28
"""`Prior.few` of fp32 products and convolutions, whose errors differ from one shape to the next."""
LINEAR_PRIOR = Prior(few=FEW, width=0.3, slow=0.3)
"""Prior of single fp32 products."""
ALTERNATIVES_PRIOR = Prior(noise=0.2, few=FEW, slow=0.3)
"""The same of convolutions: which algorithm the library takes changes from one shape to the next."""
BATCHED_PRIOR = Prior(constants=(0.4,) * len(EFFECTS), common=0.1, few=FEW, slow=0.15)
"""The same of fp32 batched products, whose tiles are known: what is left goes with the GPU more than with the shape."""

LINKED_PRIOR = Prior(constants=(0.3,) * len(EFFECTS), shape=0.3, common=0.1, noise=0.05)
"""The same of collectives: smooth in the size, and every server has protocols of its own."""


def prior_of(network: str) -> Prior:
    """Prior of a family's errors."""
    family = FAMILIES[network]
    if network == "linear":
        return LINEAR_PRIOR
    if family.linked:
        return LINKED_PRIOR
    if network == "bmm":
        return BATCHED_PRIOR
    if family.alternatives:
        return ALTERNATIVES_PRIOR
    return PRODUCT_PRIOR if family.l2_operands else TENSOR_PRIOR if family.tensor_core else Prior()


@functools.partial(jax.jit, static_argnums=0)
def linearised(
    name: str,
    predictor: MixturePredictor,
    gpu: Machine,
    batch: KernelBatch,
    shift: Float[Array, "kernel effect"],
    isolated: Isolated = True,
) -> tuple[Float[Array, " kernel"], Float[Array, "kernel effect"]]:
    """Log seconds of kernels, and their slopes in the kernel's own shifts (the shares of the heads).

    Args:
      name: of the family of all kernels.
      gpu: the machine, its figures on the device (`on_device`).
      batch: the kernels, without padding rows.
      shift: added to the effect of the family, for each kernel by itself.
      isolated: whether they are measured alone, or run inside a model.
    """
    family = FAMILIES[name]
    effect = predictor.families[family.network].effect

    def logs(shift: Array) -> Array:
        moved = shifted(predictor, family.network, add_to_effect(effect, shift))
        return jnp.log(moved.forecast_kernels(family, gpu, batch, isolated=isolated).seconds)

    value, pull = jax.vjp(logs, shift)
    return value, pull(jnp.ones_like(value))[0]


@functools.partial(jax.jit, static_argnums=0)
def points_of(name: str, batch: KernelBatch, length: float) -> Float[Array, "kernel coordinate"]:
    """`shape_points` of a family by its name."""
    return shape_points(FAMILIES[name], batch, length)


def head_shares(
    predictor: MixturePredictor, machine: Machine, name: str, batch: KernelBatch, isolated: Isolated = True
) -> Float[np.ndarray, "kernel effect"]:
    """Shares of the heads in kernels of one family, J.

    Args:
      predictor: what forecasts them.
      machine: that nobody has measured.
      name: of the family.
      batch: the kernels.
      isolated: as of `linearised`.
    """
    still = jnp.zeros((len(batch.row), len(EFFECTS)))
    return np.asarray(linearised(name, predictor, on_device(machine), batch, still, isolated)[1], np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _interval(name: str, predictor: MixturePredictor, gpu: GPU, batch: KernelBatch) -> KernelInterval:
    return kernel_interval(predictor, FAMILIES[name], gpu, batch)


def error_covariance(
    predictor: MixturePredictor,
    machine: Machine,
    table: KernelTable,
    isolated: bool | Bool[np.ndarray, " row"] = True,
    *,
    tied: bool = True,
) -> tuple[Float[np.ndarray, "row row"], Float[np.ndarray, " row"]]:
    """Prior covariance of the log errors of a table of kernels, and variance of each measurement, in row order.

    Both are scaled so that a kernel is as unsure as the predictor's own interval of it says, where it has one.

    Args:
      predictor: what forecasts them.
      machine: that nobody has measured; figures are scalars, or arrays [row].
      table: the kernels.
      isolated: rows that are measured alone; the others run inside a model.
      tied: whether families are off together: heads are one physics, and what a machine does otherwise by a head it
        does in all of them. False = as `calibration` fits them, family by family.
    """
    rows, networks = table.num_rows, list(predictor.families)
    alone = np.broadcast_to(isolated, rows).astype(np.float32)
    covariance, noise = np.zeros((rows, rows)), np.zeros(rows)
    heads = np.zeros((rows, len(networks), len(EFFECTS)))
    # Families have blocks on the diagonal; what their heads have in common comes in by the product at the end.
    for name, padded in table.families.items():
        family, row = FAMILIES[name], np.asarray(padded.row)
        real, network = np.flatnonzero(row >= 0), networks.index(family.network)
        place, spread = row[real], prior_of(family.network).noise_of(max(len(real), 1))
        on_each: Machine = jax.tree.map(lambda figure, row=row: figure[row] if np.ndim(figure) else figure, machine)
        # With padding, so that tables of one length share a program.
        prior, shares = prior_of(family.network), head_shares(predictor, on_each, name, padded, alone[row])
        points = points_of(name, padded, prior.length)
        kernel = np.asarray(shape_kernel(points, points), np.float64)
        by_head = shares * prior.constants
        by_shape = replace(prior, constants=(0.0,) * len(EFFECTS)).covariance(shares, shares, kernel)
        interval = _interval(name, predictor, on_device(gpu_of(on_each)), padded)
        deviation = 0.5 * np.asarray(interval.log_high - interval.log_low, np.float64) / DEVIATIONS
        wide = np.sqrt(np.sum(by_head**2, axis=1) + np.diag(by_shape) + spread**2)
        scale = np.where(np.isfinite(deviation), deviation, wide) / wide
        covariance[np.ix_(place, place)] = (by_shape * np.outer(scale, scale))[np.ix_(real, real)]
        noise[place] = (spread * scale[real]) ** 2
        # Links have heads of their own.
        heads[place, 0 if tied and not family.linked else network] = (by_head * scale[:, None])[real]
    flat = heads.reshape(rows, -1)
    return covariance + flat @ flat.T, noise


# Which kernels to measure first: those that tell most about all the others, before any is measured.
#
# Under the prior the uncertainty of every kernel on a machine is known in advance, and so is how far one measurement
# lowers it. Kernels are taken greedily, each the one that lowers the summed variance most, given those taken already.


def most_telling(
    covariances: Sequence[Float[np.ndarray, "kernel kernel"]],
    count: int,
    noise: float | Float[np.ndarray, " kernel"],
    decisions: Float[np.ndarray, "decision kernel"] | None = None,
    allowed: np.ndarray | None = None,
) -> list[int]:
    """Positions of the kernels to measure, the most telling first.

    Args:
      covariances: prior covariance of the log errors of the same kernels, one for each machine considered; the gain is
        averaged over machines, each in units of its own variance before any measurement.
      count: how many to take; noise: of a measurement, standard deviation of its logarithm.
      decisions: what is decided upon, by its slope in the logarithm of every kernel; None = every kernel by itself.
      allowed: mask of those that may be taken.
    """
    aims = np.eye(len(covariances[0])) if decisions is None else np.asarray(decisions)
    before = [max(float(np.einsum("dk,kj,dj->", aims, matrix, aims, optimize=True)), 1e-30) for matrix in covariances]
    left = np.array([matrix / size for matrix, size in zip(covariances, before, strict=True)])
    variance = np.square(noise) * np.ones(left.shape[1]) / np.array(before)[:, None]
    open_to = np.ones(left.shape[1], bool) if allowed is None else np.array(allowed, bool)
    chosen: list[int] = []
    # Taken one by one: each measurement also lowers what is left to learn from its neighbours.
    for _ in range(min(count, int(open_to.sum()))):
        variances = np.einsum("mkk->mk", left) + variance
        gain = np.sum(np.sum((aims @ left) ** 2, axis=1) / variances, axis=0)
        best = int(np.argmax(np.where(open_to, gain, -np.inf)))
        open_to[best] = False
        chosen.append(best)
        left -= left[:, :, best, None] * left[:, best, None, :] / variances[:, best, None, None]
    return chosen


def telling_order(
    predictor: MixturePredictor, machines: Sequence[Machine], name: str, batch: KernelBatch, count: int, prior: Prior
) -> list[int]:
    """Positions of the kernels of a family to measure first, the most telling first, by shapes and figures alone.

    Args:
      predictor: its forecast says which head a kernel would tell about.
      machines: to measure on; a gain is averaged over them.
      name: of the family of all kernels.
      batch: the kernels, without padding rows.
      count: how many to take.
      prior: of the log errors.
    """
    points = points_of(name, batch, prior.length)
    kernel = np.asarray(shape_kernel(points, points), np.float64)
    shares = [head_shares(predictor, machine, name, batch) for machine in machines]
    return most_telling([prior.covariance(share, share, kernel) for share in shares], count, prior.noise)
