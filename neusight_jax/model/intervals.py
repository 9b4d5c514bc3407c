"""Trust in a forecast: 80 % intervals from left-out GPUs, wider where GPU or shapes leave what was trained on.

Quantiles of log(measured / forecast) come from fits that never saw the GPU they are scored on (`training.conformal`).
The log half-width of a kernel is multiplied by

    (1 + distance of the GPU / 2) · (1 + distance of the shape / 2)

where the distance of the GPU is the Euclidean one, over `GPU_RATIOS`, from the range of the GPUs that the kernel's
family was measured on (natural logarithm), and the distance of a shape the largest excess of a feature over its trained
range, in quarters of that range (of 1 where it is narrower: a feature that never varied has no range to measure by).
The errors of a GPU left out are divided by its own widening before quantiles are taken, so what is covered on left-out
GPUs is the interval as it is shown. A total takes the widening of its kernels, weighted by their time; kernels of a
kind that no measured whole model had add their own bounds instead (`in_labels`), and so do those that nothing like it
was measured of: their bounds are moved outwards beforehand (`outward`). No bound is further than `WIDEST` from the
forecast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from neusight_jax.arithmetic import DTYPES
from neusight_jax.hardware.cluster import TOPOLOGY_FIELDS, Cluster, Machine, gpu_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.variant import PEAKS
from neusight_jax.kernels.family import UNPACK, Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.residuals import other_vendor
from neusight_jax.model.roofline import element_bytes

if TYPE_CHECKING:
    from neusight_jax.model.predictor import Predictor

LEVEL = 0.8
"""Share of measurements an interval is meant to hold."""
MODELS = "models"
"""What whole models are called among families."""
GPU_RATIOS: tuple[str, ...] = ("SMs", "FLOP per byte of bandwidth", "FLOP per joule of TDP", "L2 bytes per SM")
"""What is compared between a GPU and those trained on."""
BORROWED = 2.0
"""Widening of products that are forecast by the network of other products, such as convolutions on tensor cores."""
PER_DISTANCE = 0.5
"""What a GPU at distance 1 outside those trained on adds to the widening (docs/accuracy.md, intervals)."""
WORTH_SAYING = 0.05
"""Smallest distance of a GPU, natural logarithm, that is put into words."""
WIDEST = math.log(1000.0)
"""Largest distance of a bound from the forecast, natural logarithm: further out an interval says nothing more."""
KIND_FIELDS: tuple[str, ...] = ("vendor", "memory_kind", "l2_partitions", "warp_schedulers")
"""Figures that, with the arithmetic paths, tell one architecture from another."""
SIZE_FIELDS: tuple[str, ...] = ("num_sms", "clock_hz", "mem_bytes_per_s", "l2_bytes", "tdp_w", "process_nm")
"""Figures of a GPU, beside its peaks, that two machines of one architecture may differ in."""
REACH = 1.2
"""Distance of two machines of one architecture, natural logarithm, over which their errors come apart
(`error_correlation`): the largest at which ratio intervals hold 80 %, as the mean of two experiments, an A100 at eleven
clocks (67 %) and H100 against H200 (94 %; `benchmarks.ratio_spread`, docs/renting.md)."""
UNMEASURED = (math.log(3.0), math.log(3.0))
"""How far the bounds of kernels move outwards, below and above, that are modelled and were never measured: products in
int8 and fp64, FFTs. A product of 4096 in int8 on an RTX 3080 took 3.4 times its forecast."""
UNMODELLED = (0.0, WIDEST)
"""The same for operators that nobody modelled: bytes, and FLOP where they are counted, are the least they take. Nothing
says how much more: factorisations go column by column, a custom call may compute anything. So up to `WIDEST`, a number
that is stated, not fitted."""
_OUTWARD_OPS: dict[str, tuple[float, float]] = {"unmodelled": UNMODELLED, "fft": UNMEASURED}
_UNMEASURED_PRODUCTS, _UNMEASURED_DTYPES = ("int8", "fp64"), ("fp64",)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Intervals:
    """Errors of a predictor, as far as it knows them.

    Attributes:
      kernels: low and high log(measured / forecast) of an isolated kernel on a GPU nobody has measured that lies inside
        its `gpu_range`, by family [2].
      total: the same for a whole model [2]; zeros where no whole model was measured.
      other_vendor: both for GPUs of another vendor than the hosts of the fit, by family and `MODELS`; those missing are
        as for the rest.
      measured_kernels, measured_total: for a GPU that was trained on, forecast with its device effect, where nothing is
        known of its own.
      labelled: networks of the kernels in the whole models that `total` is of; None = all.
      gpu_range: smallest and largest log `GPU_RATIOS` that each family was measured on [2, ratio].
      shape_range: the same for the features of each family [2, feature].
    """

    kernels: dict[str, Float[Array, "2"]] = field(default_factory=dict)
    total: Float[Array, "2"] = field(default_factory=lambda: jnp.zeros(2))
    other_vendor: dict[str, Float[Array, "2"]] = field(default_factory=dict)
    measured_kernels: dict[str, Float[Array, "2"]] = field(default_factory=dict)
    measured_total: Float[Array, "2"] = field(default_factory=lambda: jnp.zeros(2))
    labelled: tuple[str, ...] | None = field(default=None, metadata={"static": True})
    gpu_range: dict[str, Float[Array, "2 ratio"]] = field(default_factory=dict)
    shape_range: dict[str, Float[Array, "2 feature"]] = field(default_factory=dict)

    def measured(self, families: Iterable[str], widths: Mapping[str, float]) -> Intervals:
        """The same with the intervals of a GPU in force that was measured in these families.

        Args:
          widths: half-widths in logarithms of what is known of this GPU's errors, by family and `MODELS`.
        """
        pairs = {name: jnp.array([-width, width], jnp.float32) for name, width in widths.items()}
        kernels = {name: pairs.get(name, self.measured_kernels[name]) for name in families}
        others = {name: pair for name, pair in self.other_vendor.items() if name != MODELS}
        total = pairs.get(MODELS, self.measured_total)
        return replace(self, total=total, other_vendor=others).with_kernels(kernels)

    def with_kernels(self, kernels: Mapping[str, Float[Array, "2"]]) -> Intervals:
        """The same with these intervals of kernels in force, by family, whatever the vendor."""
        others = {name: pair for name, pair in self.other_vendor.items() if name not in kernels}
        return replace(self, kernels={**self.kernels, **kernels}, other_vendor=others)


def empty_intervals(
    feature_counts: Mapping[str, int], other_vendor: Iterable[str] = (), labelled: Iterable[str] | None = None
) -> Intervals:
    """Zeros of the right sizes, by family: the template a checkpoint is read into."""
    pairs = {name: jnp.zeros(2) for name in feature_counts}
    shapes = {name: jnp.zeros((2, count)) for name, count in feature_counts.items()}
    gpus = {name: jnp.zeros((2, len(GPU_RATIOS))) for name in feature_counts}
    others = {name: jnp.zeros(2) for name in other_vendor}
    networks = None if labelled is None else tuple(labelled)
    return Intervals(
        kernels=pairs,
        other_vendor=others,
        measured_kernels=pairs,
        labelled=networks,
        gpu_range=gpus,
        shape_range=shapes,
    )


def gpu_ratios(gpu: GPU) -> Float[Array, "*gpu ratio"]:
    """Natural logarithms of `GPU_RATIOS`."""
    peak = jnp.asarray(gpu.fp32_flop_per_s)
    ratios = (gpu.num_sms, peak / gpu.mem_bytes_per_s, peak / gpu.tdp_w, gpu.l2_bytes / jnp.asarray(gpu.num_sms))
    return jnp.stack([jnp.log(ratio) for ratio in ratios], axis=-1)


def outside(
    value: Float[Array, "*batch item"], low: Float[Array, " item"], high: Float[Array, " item"]
) -> Float[Array, "*batch item"]:
    """Distance of values outside a range; 0 inside."""
    return jnp.maximum(jnp.maximum(low - value, value - high), 0.0)


def range_of(ratios: Float[np.ndarray, "gpu ratio"]) -> Float[np.ndarray, "2 ratio"]:
    """Smallest and largest of the `gpu_ratios` of several GPUs."""
    return np.stack([ratios.min(axis=0), ratios.max(axis=0)])


def gpu_widening(ratios: Float[Array, "*gpu ratio"], gpu_range: Float[Array, "2 ratio"]) -> Float[Array, "*gpu"]:
    """Factor that widens intervals for a GPU of these `gpu_ratios`, 1 inside the range (module docstring)."""
    squares = jnp.sum(outside(ratios, *gpu_range) ** 2, axis=-1)
    # The square root has no slope at zero.
    return 1.0 + PER_DISTANCE * jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelInterval:
    """Interval of kernels, [kernel]: logarithms of the bounds over the forecast, how far they were widened, and whether
    they were moved outwards (1 or 0) because nothing like the kernel was measured."""

    log_low: Float[Array, " kernel"]
    log_high: Float[Array, " kernel"]
    widening: Float[Array, " kernel"]
    shape_widening: Float[Array, " kernel"]
    unmeasured: Float[Array, " kernel"]


def outward(family: Family, batch: KernelBatch) -> Float[Array, "2 kernel"]:
    """Distance that bounds of kernels move outwards that nothing like it was measured of, below and above, natural
    logarithm; 0 for all others."""
    by_op = jnp.array([_OUTWARD_OPS.get(op, (0.0, 0.0)) for op in family.ops])
    unmeasured = _UNMEASURED_PRODUCTS if family.matrix else _UNMEASURED_DTYPES
    by_dtype = jnp.array([UNMEASURED if dtype in unmeasured else (0.0, 0.0) for dtype in DTYPES])
    unpacked = jnp.asarray(batch.dims.get(UNPACK, jnp.zeros(batch.row.shape)))[:, None] > 0.0
    by_weights = jnp.where(unpacked, jnp.array(UNMEASURED), 0.0)
    return jnp.maximum(jnp.maximum(by_op[batch.op], by_dtype[batch.dtype]), by_weights).T


def has_intervals(predictor: Predictor, family: Family) -> bool:
    """Whether a predictor carries intervals of a family."""
    intervals: Intervals | None = getattr(predictor, "intervals", None)
    return intervals is not None and family.network in intervals.kernels


def kernel_interval(predictor: Predictor, family: Family, gpu: GPU, batch: KernelBatch) -> KernelInterval:
    """The 80 % interval of isolated kernels of one family (module docstring).

    Args:
      predictor: bounds are NaN where it carries no intervals of the family.
      family: of the kernels.
      gpu: scalars, or arrays [kernel]; one outside the trained range widens the interval.
      batch: the kernels; shapes outside the trained range widen it, and so does what was never measured.
    """
    intervals: Intervals | None = getattr(predictor, "intervals", None)
    one = jnp.ones(batch.row.shape)
    if intervals is None or not has_intervals(predictor, family):
        return KernelInterval(jnp.nan * one, jnp.nan * one, one, one, 0.0 * one)
    features = family.features(batch.dims, element_bytes(batch.dtype))
    low, high = intervals.shape_range[family.network]
    shape = 1.0 + jnp.max(outside(features, low, high) / (0.25 * jnp.maximum(high - low, 1.0)), axis=-1) / 2.0
    if family.matrix and family.network != family.name:
        shape = BORROWED * shape
    machine = gpu_widening(gpu_ratios(gpu), intervals.gpu_range[family.network])
    pair = kernel_bounds(intervals, family.network, gpu)
    moved = outward(family, batch)
    below = jnp.clip(pair[..., 0] * machine * shape - moved[0], -WIDEST, WIDEST)
    above = jnp.clip(pair[..., 1] * machine * shape + moved[1], -WIDEST, WIDEST)
    return KernelInterval(below, above, machine * shape, shape, jnp.where(moved[1] > 0.0, 1.0, 0.0))


def kernel_bounds(intervals: Intervals, network: str, gpu: GPU) -> Float[Array, "*gpu 2"]:
    """Log bounds of a kernel inside what was trained on, on a GPU of this one's vendor, not widened."""
    return _of_vendor(intervals, network, intervals.kernels[network], gpu)


def _of_vendor(intervals: Intervals, name: str, usual: Float[Array, "2"], gpu: GPU) -> Float[Array, "*gpu 2"]:
    """Bounds for a GPU's vendor: those of `name` for another one's where there are any."""
    return jnp.where(other_vendor(gpu)[..., None], intervals.other_vendor.get(name, usual), usual)


def total_interval(intervals: Intervals, gpu: GPU, seconds: float, wider: float) -> tuple[float, float]:
    """The 80 % interval of a whole model of `in_labels` kernels, seconds. Host only.

    Args:
      intervals: of the predictor.
      gpu: whose vendor decides which bounds hold.
      seconds: the forecast.
      wider: factor on the logarithms of the bounds: the widening of the kernels, weighted by their time.
    """
    pair = np.asarray(_of_vendor(intervals, MODELS, intervals.total, gpu), np.float64)
    low, high = np.clip(pair * wider, -WIDEST, WIDEST)
    return seconds * math.exp(low), seconds * math.exp(high)


def in_labels(intervals: Intervals, network: np.ndarray) -> Bool[np.ndarray, " kernel"]:
    """Mask of the kernels, by network, of a kind that the measured whole models had. Host only.

    None where no whole model was measured. What a model takes in other kernels has the sum of their own bounds.
    """
    if not np.any(np.asarray(intervals.total) != 0.0):
        return np.zeros(network.shape, bool)
    return np.ones(network.shape, bool) if intervals.labelled is None else np.isin(network, intervals.labelled)


def unlabelled_note(intervals: Intervals, network: np.ndarray, cost: Float[np.ndarray, " kernel"]) -> list[str]:
    """A sentence where much of the time is in kernels that `in_labels` has none of. Host only."""
    mask = in_labels(intervals, network)
    share = float(cost[~mask].sum() / max(float(cost.sum()), 1e-30))
    if intervals.labelled is None or share < WORTH_SAYING:
        return []
    missing = ", ".join(sorted(set(network[~mask])))
    return [f"no whole model with {missing} was measured ({share:.0%} of the time): the interval adds their own bounds"]


def far_note(
    intervals: Intervals,
    gpu: GPU,
    network: np.ndarray,
    cost: Float[np.ndarray, " kernel"],
    consequence: str = "the interval is widened",
) -> list[str]:
    """A sentence where a GPU lies outside those that much of the time was measured on, naming its figures. Host only.

    Of families measured on different GPUs it speaks of the one that takes the most time.

    Args:
      intervals: of the predictor.
      gpu: scalars.
      network: name of the network that forecasts each kernel [kernel].
      cost: time of each kernel in the workload, of which only shares count.
      consequence: what ends the sentence.
    Returns: one sentence, or none.
    """
    ratios, total = np.asarray(gpu_ratios(gpu)), max(float(cost.sum()), 1e-30)
    groups: dict[tuple[str, ...], dict[str, float]] = {}
    for name in sorted(intervals.gpu_range.keys() & set(network)):
        low, high = np.asarray(intervals.gpu_range[name])
        figures = tuple(
            f"{ratio} {math.exp(value):.3g} against {math.exp(least):.3g} to {math.exp(most):.3g}"
            for ratio, value, least, most in zip(GPU_RATIOS, ratios, low, high, strict=True)
            if max(least - value, value - most) > WORTH_SAYING
        )
        if figures:
            groups.setdefault(figures, {})[name] = float(cost[network == name].sum()) / total
    shares = {figures: sum(networks.values()) for figures, networks in groups.items()}
    if sum(shares.values()) < WORTH_SAYING:
        return []
    figures = max(shares, key=lambda texts: shares[texts])
    whose = "" if shares[figures] > 1.0 - WORTH_SAYING else f" for {', '.join(sorted(groups[figures]))}"
    return [f"this GPU lies outside those trained on{whose} ({'; '.join(figures)}): {consequence}"]


def interval_warnings(
    intervals: Intervals,
    gpu: GPU,
    network: np.ndarray,
    shape_widening: Float[np.ndarray, " kernel"],
    cost: Float[np.ndarray, " kernel"],
) -> list[str]:
    """Sentences for a GPU (`far_note`) or shapes outside what was trained on, none inside. Host only.

    Args:
      intervals: of the predictor.
      gpu: scalars.
      network: name of the network that forecasts each kernel [kernel].
      shape_widening: factor by which the shape widens the interval of each kernel (`KernelInterval`).
      cost: time of each kernel in the workload, of which only shares count.
    """
    notes = far_note(intervals, gpu, network, cost)
    share = float(cost[shape_widening > 1.0 + WORTH_SAYING].sum() / max(float(cost.sum()), 1e-30))
    if share >= WORTH_SAYING:
        notes.append(f"{share:.0%} of the time is in kernels of shapes outside those trained on: extrapolated")
    return notes


def _sizes(machine: Machine) -> dict[str, float]:
    """Logarithms of what a machine has much or little of: sizes, peaks of an SM in a clock, and links of a cluster."""
    gpu = gpu_of(machine)
    cycles = float(np.asarray(gpu.num_sms)) * float(np.asarray(gpu.clock_hz))
    figures = {name: float(np.asarray(getattr(gpu, name))) for name in SIZE_FIELDS}
    figures |= {name: float(np.asarray(getattr(gpu, name))) / cycles for name in PEAKS}
    if isinstance(machine, Cluster):
        figures |= {name: float(np.asarray(getattr(machine.topology, name))) for name in TOPOLOGY_FIELDS}
    return {name: math.log(value) for name, value in figures.items() if value > 0.0}


def machine_distance(first: Machine, second: Machine) -> float:
    """Euclidean distance of two machines' figures in natural logarithms, infinite between two architectures; of the
    peaks the one that differs most counts. Host only."""
    if _architecture(first) != _architecture(second):
        return math.inf
    one, other = _sizes(first), _sizes(second)
    apart = {name: abs(one[name] - other[name]) for name in one.keys() & other.keys()}
    peak = max(value for name, value in apart.items() if name in PEAKS)
    return math.hypot(peak, *(value for name, value in apart.items() if name not in PEAKS))


def _architecture(machine: Machine) -> tuple[object, ...]:
    """Figures that tell one architecture from another."""
    gpu = gpu_of(machine)
    return (*(float(np.asarray(getattr(gpu, name))) for name in KIND_FIELDS), gpu.paths)


def error_correlation(distance: float) -> float:
    """Correlation of the log errors of one predictor, of the same work, on two machines at a `machine_distance`.

        exp(−(distance / REACH)² / 2)

    So the error of a ratio grows in proportion to a small distance, as that of a wrong slope does; on two architectures
    errors share nothing, as those of GPUs left out together did (`benchmarks.ratio_spread`).
    """
    return math.exp(-((distance / REACH) ** 2) / 2.0)


def ratio_interval(
    seconds: tuple[float, float],
    bounds: tuple[tuple[float, float] | None, tuple[float, float] | None],
    machines: tuple[Machine, Machine],
) -> tuple[float, float] | None:
    """80 % interval of first / second, two forecasts of the same work by one predictor. Host only.

    The same predictor errs alike on machines alike: with half-widths a and b of the two intervals in logarithms and c
    the `error_correlation`, that of the ratio is √(a² + b² − 2abc).

    Args:
      seconds: the forecasts; bounds: their intervals, seconds; machines: what they are of.
    Returns: low and high; None where a forecast has no interval, or takes no time.
    """
    if bounds[0] is None or bounds[1] is None or min(bounds[0][0], bounds[1][0]) <= 0.0:
        return None
    one, other = (min(0.5 * math.log(high / low), WIDEST) for low, high in (bounds[0], bounds[1]))
    square = one**2 + other**2 - 2.0 * one * other * error_correlation(machine_distance(*machines))
    half = min(math.sqrt(max(square, 0.0)), WIDEST)
    ratio = seconds[0] / seconds[1]
    return ratio * math.exp(-half), ratio * math.exp(half)
