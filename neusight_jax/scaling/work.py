"""Work of measured items: the kernels that a trace's shapes describe, or that an item's name and time say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import ArrayLike

from neusight_jax.arithmetic import DTYPES, dtype_bytes
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES, OPERATORS
from neusight_jax.kernels.table import Kernel
from neusight_jax.scaling.trace import Measured

USUAL_SHARE = 0.7
"""Share of peak or bandwidth assumed when a size is inferred from a time."""
USUAL_COLS = 1024.0


def figure(value: ArrayLike) -> float:
    """A GPU figure as a number."""
    return float(np.asarray(value))


def product_peaks(gpu: GPU) -> dict[str, float]:
    """Dtypes a GPU multiplies matrices in, and the peak of each, FLOP/s."""
    return {dtype: float(peak) for dtype, peak in zip(DTYPES, np.asarray(gpu.matrix_paths()), strict=True) if peak > 0}


def lacks_path(item: Measured, peaks: Mapping[str, float]) -> bool:
    """Whether an item is a product in a dtype that a GPU of these peaks, or this package, has no path for."""
    return multiplies(item) and dtype_of(item, peaks) not in peaks


def is_product(kernels: Sequence[Kernel]) -> bool:
    """Whether any kernel multiplies matrices."""
    return any(FAMILIES[kernel.family].matrix for kernel in kernels)


def multiplies(item: Measured) -> bool:
    """Whether an item is a matrix product, by its work or by its name."""
    return is_product(item.kernels) or (not item.kernels and item.inferred in ("product", "vector"))


def dtype_of(item: Measured, peaks: Mapping[str, float]) -> str:
    """Dtype an item runs in on a GPU: libraries take fp32 where there is no tf32. Row-wise work in a dtype that this
    package, or some GPU, does not have counts as fp32: what it moves is known by its time."""
    if item.dtype == "tf32" and "tf32" not in peaks:
        return "fp32"
    return item.dtype if (item.dtype in DTYPES and item.dtype != "fp64") or multiplies(item) else "fp32"


def work_of_item(item: Measured, origin: GPU, peaks: Mapping[str, float]) -> tuple[Kernel, ...]:
    """Work of an item: by its shapes, else by its name and time; nothing where the origin has no path for it."""
    if lacks_path(item, peaks):
        return ()
    return item.kernels or _inferred(item, origin, peaks)


def _inferred(item: Measured, origin: GPU, peaks: Mapping[str, float]) -> tuple[Kernel, ...]:
    """Work of the kind an item's name says that would take its time on the origin at `USUAL_SHARE` of the limit."""
    seconds = item.seconds / max(item.count, 1.0)
    if not item.inferred or not seconds > 0.0:
        return ()
    dtype = dtype_of(item, peaks)
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
