"""Trace: what was measured on the origin, kernel by kernel, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from neusight_jax.arithmetic import DTYPES
from neusight_jax.errors import printable
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel
from neusight_jax.scaling.names import read_name


@dataclass(frozen=True)
class Launch:
    """How a kernel was launched, as far as the trace says.

    Attributes:
      blocks: thread blocks of the grid; threads: threads of a block.
      registers: of a thread, 0 if unknown; shared_bytes: of a block.
    """

    blocks: float
    threads: float
    registers: float = 0.0
    shared_bytes: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Launches that are alike, measured together.

    Attributes:
      name: kernel or node name, for people.
      kind: what the name says it is (`names.KINDS`).
      seconds: measured time of all launches together; count: how many.
      kernels: the work behind one launch in terms this package forecasts; empty if its shapes are unknown.
      dtype: of that work; "int4" too, which no forecast takes.
      launch: grid and block, if known.
      operator: what launched it, `aten::mm` or an HLO operator; "" if the trace does not say.
      inferred: the work a size can be inferred of (`names.KernelName.work`); "" = none.
      tile: output tile of a matrix product, if its name says.
      dtype_said: whether name or operands said the dtype; else it is taken to be fp32.
    """

    name: str
    kind: str
    seconds: float
    count: float = 1.0
    kernels: tuple[Kernel, ...] = ()
    dtype: str = "fp32"
    launch: Launch | None = None
    operator: str = ""
    inferred: str = ""
    tile: tuple[int, int] | None = None
    dtype_said: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))
        object.__setattr__(self, "operator", printable(self.operator))


@dataclass(frozen=True)
class Trace:
    """A measured run.

    Attributes:
      source: file name, for people.
      items: everything that took time.
      busy_s: time in which at least one kernel ran; less than the sum where streams overlap.
      span_s: from the first start to the last end.
      notes: what was odd in the file, and how it was taken.
      gpus: names of the GPUs it says it was measured on; empty if it does not say.
    """

    source: str
    items: tuple[Measured, ...]
    busy_s: float
    span_s: float
    notes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def kernel_s(self) -> float:
        """Seconds of all kernels, one after another."""
        return float(sum(item.seconds for item in self.items))


def kernel_of_name(
    name: str,
    seconds: float,
    count: float,
    launch: Launch | None = None,
    *,
    operator: str = "",
    work: tuple[Kernel, ...] = (),
    operand_dtype: str | None = None,
) -> Measured:
    """A measured kernel by what its name says, and what its operator says where the name does not.

    Args:
      name: of the kernel; seconds, count: of all its launches; launch: grid and block.
      operator: what launched it; work: what the operator computes. A product, or attention, is the work of the kernel
        that multiplies, not of a copy or a reduction launched beside it.
      operand_dtype: of the operator's operands; a product runs in the dtype its kernel names, as with tf32.
    """
    said = read_name(name)
    if said.kind == "unknown" and operator:
        said = replace(read_name(operator.removeprefix("aten::")), dtype=said.dtype)
    product = any(FAMILIES[kernel.family].matrix for kernel in work)
    attention = any(FAMILIES[kernel.family].generations == "attention" for kernel in work)
    multiplying = ("attention", "unknown") if attention else ("gemm", "moe", "unknown")
    fits = said.kind in multiplying if product else said.kind not in ("gemm", *MOVES)
    kernels = work if fits else ()
    dtype = said.dtype or operand_dtype if product or not work else operand_dtype or said.dtype
    multiplies = product or said.work in ("product", "vector")
    if dtype not in DTYPES and not multiplies:
        dtype = "fp32" if dtype else None  # what only moves bytes is told apart by their number alone
    return Measured(
        *(name, said.kind, seconds, count, kernels, dtype or "fp32", launch, operator),
        inferred="" if kernels else said.work,
        tile=said.tile,
        dtype_said=dtype is not None or not multiplies,
    )


MOVES: tuple[str, ...] = ("collective", "transfer", "copy")
"""Kinds that are not the operator's own work, whatever launched them."""


def duration_text(seconds: float) -> str:
    """A duration for people: 12.3 ms."""
    size, unit = next(((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "us"))
    return f"{seconds / size:.4g} {unit}"


def busy_seconds(starts: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Length of the union of intervals, and the span they lie in; seconds. (0, 0) without intervals."""
    if not len(starts):
        return 0.0, 0.0
    order = np.argsort(starts, kind="stable")
    begin, end = starts[order], starts[order] + seconds[order]
    reached = np.maximum.accumulate(end)
    covered_until = np.concatenate([[-np.inf], reached[:-1]])
    busy = np.maximum(end - np.maximum(begin, covered_until), 0.0)
    return float(busy.sum()), float(reached[-1] - begin[0])
