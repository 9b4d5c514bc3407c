"""The rule each measured kernel is scaled by: time on the target over time on the origin.

    forecast   forecast on the target / forecast on the origin, of the work the trace's shapes describe; by a predictor
               that was fitted, what sets the measurement apart from the forecast is carried over in part (`carried`)
    inferred   the same for work of the kind the name says, of the size that would take the measured time on the origin
    wave       Habitat's wave scaling from grid and block, fully memory-bound where nothing else is known
    bandwidth  origin bandwidth / target bandwidth
    link       the same of the links, for copies to the host and collectives
    none       time that is no kernel's: unchanged

Every measured second falls under exactly one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from neusight_jax.arithmetic import DTYPES, dtype_bytes
from neusight_jax.baselines.habitat_wave import memory_boundedness, wave_ratio
from neusight_jax.errors import InputError
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES, OPERATORS
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.model.intervals import gpu_ratios
from neusight_jax.model.latency import predict_kernels
from neusight_jax.model.roofline import element_bytes, peak_flop_per_s
from neusight_jax.model.terms import Predictor
from neusight_jax.scaling.occupancy import Limits, resident_blocks
from neusight_jax.scaling.trace import Measured

RULES: tuple[str, ...] = ("forecast", "inferred", "wave", "bandwidth", "link", "none")
USUAL_SHARE = 0.7
"""Share of peak or bandwidth assumed when a size is inferred from a time."""
USUAL_COLS = 1024.0
FAR_CARRIED = 0.5
"""Share of a kernel's log deviation from its forecast that is carried to a GPU unlike the origin. One measurement
cannot tell what is odd about the kernel (carried) from what is odd about the origin (not carried): taken as equal."""
BELIEVED = math.log(2.0)
"""Largest log deviation of which a part is left behind; beyond, the work cannot be what its shapes say."""
GAMMA: dict[str, float] = {"attention": 0.5, "conv": 0.5}
"""Memory-boundedness of kinds that are neither; 1 for anything else, as Habitat does without hardware counters."""


@dataclass(frozen=True)
class Machine:
    """A GPU as the rules see it.

    Attributes:
      gpu: figures; limits: what an SM holds.
      predictor: what forecasts it; with its measured effect where it has one.
    """

    gpu: GPU
    limits: Limits
    predictor: Predictor


def scaling(
    items: Sequence[Measured], origin: Machine, target: Machine, *, plain: bool = False
) -> tuple[list[str], np.ndarray]:
    """Rule and ratio of every item.

    Args:
      plain: carry all of a kernel's deviation from its forecast to the target, as Habitat does.
    Raises: `InputError` when the target lacks the arithmetic path of a product, or a predictor its family.
    """
    rules, ratios = [""] * len(items), np.ones(len(items))
    peaks = product_peaks(origin.gpu)
    work = [_work(item, origin.gpu, peaks) for item in items]
    for at, (item, kernels) in enumerate(zip(items, work, strict=True)):
        if _covered(kernels, origin, target):
            rules[at] = "forecast" if item.kernels else "inferred"
        else:
            work[at] = ()
    before, after = (_forecasts(work, items, machine) for machine in (origin, target))
    share = 1.0 if plain else carried(origin, target)
    for at, item in enumerate(items):
        if rules[at]:
            ratios[at] = after[at] / before[at]
            if rules[at] == "forecast" and item.seconds > 0.0:
                deviation = math.log(item.seconds / (max(item.count, 1.0) * before[at]))
                ratios[at] *= math.exp((share - 1.0) * min(max(deviation, -BELIEVED), BELIEVED))
        else:
            rules[at], ratios[at] = _plain_rule(item, origin, target)
    return rules, ratios


def carried(origin: Machine, target: Machine) -> float:
    """Share of a kernel's log deviation from its forecast that goes with it: 1 to a like GPU, `FAR_CARRIED` far away.

    The distance is the sum of |log| of the `GPU_RATIOS` of one over the other. All is carried where either predictor
    knows nothing of its own errors: a bound or a baseline is not near enough for its deviations to mean anything.
    """
    if any(getattr(machine.predictor, "intervals", None) is None for machine in (origin, target)):
        return 1.0
    apart = np.abs(np.asarray(gpu_ratios(origin.gpu)) - np.asarray(gpu_ratios(target.gpu))).sum()
    return FAR_CARRIED + (1.0 - FAR_CARRIED) * math.exp(-float(apart))


def wave_scaling(items: Sequence[Measured], origin: Machine, target: Machine, *, general: bool = True) -> np.ndarray:
    """Ratio of every item by Habitat's wave scaling alone, a baseline: γ and blocks from known work, else as `_wave`.

    An item of several kernels is scaled by each, weighted with its roofline time on the origin.
    """
    ratios = np.ones(len(items))
    for at, item in enumerate(items):
        if not item.kernels:
            ratios[at] = _plain_rule(item, origin, target)[1]
            continue
        parts = [_wave_of_work(kernel, item.dtype, origin.gpu, target.gpu, general) for kernel in item.kernels]
        ratios[at] = sum(ratio * weight for ratio, weight in parts) / sum(weight for _, weight in parts)
    return ratios


def figure(value: ArrayLike) -> float:
    """A GPU figure as a number."""
    return float(np.asarray(value))


def work_of(items: Sequence[Measured], origin: GPU) -> KernelTable:
    """Work of all items that have some, by shapes or by name and time on the origin, in its dtypes, as one table."""
    peaks = product_peaks(origin)
    return table_from_kernels(
        replace(kernel, dtype=_dtype(item, peaks)) for item in items for kernel in _work(item, origin, peaks)
    )


def product_peaks(gpu: GPU) -> dict[str, float]:
    """Dtypes a GPU multiplies matrices in, and the peak of each, FLOP/s."""
    return {dtype: float(peak) for dtype, peak in zip(DTYPES, np.asarray(gpu.matrix_paths()), strict=True) if peak > 0}


def lacks_path(item: Measured, peaks: Mapping[str, float]) -> bool:
    """Whether an item is a product in a dtype that a GPU of these peaks, or this package, has no path for."""
    return multiplies(item) and _dtype(item, peaks) not in peaks


def _is_product(kernels: Sequence[Kernel]) -> bool:
    return any(FAMILIES[kernel.family].matrix for kernel in kernels)


def multiplies(item: Measured) -> bool:
    """Whether an item is a matrix product, by its work or by its name."""
    return _is_product(item.kernels) or (not item.kernels and item.inferred in ("product", "vector"))


def _dtype(item: Measured, peaks: Mapping[str, float]) -> str:
    """Dtype an item runs in on a GPU: libraries take fp32 where there is no tf32. Row-wise work in a dtype that this
    package, or some GPU, does not have counts as fp32: what it moves is known by its time."""
    if item.dtype == "tf32" and "tf32" not in peaks:
        return "fp32"
    return item.dtype if (item.dtype in DTYPES and item.dtype != "fp64") or multiplies(item) else "fp32"


def _work(item: Measured, origin: GPU, peaks: Mapping[str, float]) -> tuple[Kernel, ...]:
    """What an item computes: by its shapes, else by its name and time; nothing where the origin has no path for it."""
    if lacks_path(item, peaks):
        return ()
    return item.kernels or _inferred(item, origin, peaks)


def _covered(kernels: Sequence[Kernel], *machines: Machine) -> bool:
    families = {FAMILIES[kernel.family] for kernel in kernels}
    return bool(families) and all(each.predictor.covers(family) for each in machines for family in families)


def _forecasts(work: Sequence[tuple[Kernel, ...]], items: Sequence[Measured], machine: Machine) -> np.ndarray:
    """Seconds of the work of every item, 1 where there is none; one table of all, so that one program is compiled."""
    out, peaks = np.ones(len(items)), product_peaks(machine.gpu)
    chosen = [at for at, kernels in enumerate(work) if kernels]
    if not chosen:
        return out
    dtypes = {at: _dtype(items[at], peaks) for at in chosen}
    products = [at for at in chosen if _is_product(work[at])]
    for dtype in sorted({dtypes[at] for at in products}):
        try:
            machine.gpu.peak_flop_per_s(dtype)
        except InputError as error:
            same = [items[at] for at in products if dtypes[at] == dtype]
            found = (
                f"{len(same)} kinds of products in {dtype} ({max(same, key=lambda item: item.seconds).name[:60]} ...)"
            )
            raise InputError(f"the run has {found}, and {error}; scale it to a GPU that has the path") from None
    table = table_from_kernels(replace(kernel, count=1.0, dtype=dtypes[at]) for at in chosen for kernel in work[at])
    seconds = np.asarray(predict_kernels(machine.predictor, machine.gpu, table, isolated=False), np.float64)
    owner = np.repeat(np.arange(len(chosen)), [len(work[at]) for at in chosen])
    out[chosen] = np.bincount(owner, weights=seconds, minlength=len(chosen))
    return out


def _inferred(item: Measured, origin: GPU, peaks: Mapping[str, float]) -> tuple[Kernel, ...]:
    """Work of the kind an item's name says that would take its time on the origin at `USUAL_SHARE` of the limit."""
    seconds = item.seconds / max(item.count, 1.0)
    if not item.inferred or not seconds > 0.0:
        return ()
    dtype = _dtype(item, peaks)
    if item.inferred == "product":
        flop = USUAL_SHARE * peaks[dtype] * seconds
        if item.tile is None or item.launch is None:
            side = k = _usual_size((flop / 2.0) ** (1 / 3))
        else:
            area = item.launch.blocks * item.tile[0] * item.tile[1]
            side, k = _usual_size(math.sqrt(area)), _usual_size(flop / (2.0 * area))
        return (Kernel("linear", "linear", {"batch": 1, "m": side, "n": side, "k": k}),)
    elements = USUAL_SHARE * figure(origin.mem_bytes_per_s) * seconds / dtype_bytes(dtype)
    if item.inferred == "vector":  # the matrix is read once
        side = _usual_size(math.sqrt(elements))
        return (Kernel("linear", "linear", {"batch": 1, "m": 1, "n": side, "k": side}),)
    for op, (family, operator) in OPERATORS.items():
        if family.name == item.inferred and operator.sized:
            return (Kernel(family.name, op, operator.sized(elements)),)
    dims = {"rows": max(round(elements / 2.0 / USUAL_COLS), 1), "cols": USUAL_COLS, "reads": 1.0, "writes": 1.0}
    ops = {"softmax": "softmax", "norm": "layernorm", "elementwise": "gelu", "memory": "copy"}
    return (Kernel(item.inferred, ops[item.inferred], dims),)


def _usual_size(size: float) -> int:
    """A multiple of 16 elements, as sizes of models are: rows of products then begin where libraries want them."""
    return 16 * max(round(size / 16.0), 1)


def _plain_rule(item: Measured, origin: Machine, target: Machine) -> tuple[str, float]:
    """The rule of an item whose work is not known."""
    if item.kind in ("idle", "host"):
        return "none", 1.0
    if item.kind in ("collective", "transfer"):
        return "link", figure(origin.gpu.link_bytes_per_s) / figure(target.gpu.link_bytes_per_s)
    if item.launch is None or item.kind == "copy":
        return "bandwidth", figure(origin.gpu.mem_bytes_per_s) / figure(target.gpu.mem_bytes_per_s)
    gamma = jnp.asarray(GAMMA.get(item.kind, 1.0))
    resident = (resident_blocks(item.launch, machine.limits) for machine in (origin, target))
    return "wave", float(wave_ratio(origin.gpu, target.gpu, gamma, item.launch.blocks, *resident))


def _wave_of_work(kernel: Kernel, dtype: str, origin: GPU, target: GPU, general: bool) -> tuple[float, float]:
    """Wave ratio of one kernel of known work, and its roofline time on the origin."""
    family = FAMILIES[kernel.family]
    dims = {name: jnp.array([float(kernel.dims[name])], jnp.float32) for name in family.dims}
    work = family.work(dims, element_bytes(jnp.array([DTYPES.index(dtype)])))
    flop, moved = float(work.flop[0]), float(work.bytes_moved[0])

    def peak(gpu: GPU) -> float:
        return float(peak_flop_per_s(gpu, family, jnp.array([DTYPES.index(dtype)]))[0])

    ridge = peak(target) / figure(target.mem_bytes_per_s)
    gamma = memory_boundedness(jnp.asarray(flop / moved), jnp.asarray(ridge))
    blocks = work.blocks[0, -1, 0] if general else None
    roofline_s = max(flop / peak(origin), moved / figure(origin.mem_bytes_per_s))
    return float(wave_ratio(origin, target, gamma, blocks)), roofline_s
