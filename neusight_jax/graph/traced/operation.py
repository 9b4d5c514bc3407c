"""Operations of a traced program: what the front-ends for JAX functions and torch modules write down.

Values are arrays in memory. A view (reshape, broadcast, slice) is a value with the id of the array behind it; it is no
operation. How operations become kernels is the matter of `grouping`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal, TypeAlias

from neusight_jax.graph.graph import Shape
from neusight_jax.graph.kernel import streamed
from neusight_jax.kernels.table import Kernel
from neusight_jax.tables import table

Kind: TypeAlias = Literal["pointwise", "row", "column", "opaque", "free"]
"""How an operation runs: element by element; reducing innermost axes; reducing others; as kernels of its own; not at
all (a loop's boundary)."""

SORT_PASSES = 8.0
"""Passes of a sort, each read and written: radix sort of 32-bit keys, 8 bits at a time, keys and payload."""

_PATHS: dict[str, str] = {
    **{"float32": "fp32", "complex64": "fp32", "float64": "fp64", "complex128": "fp64"},
    **{"bfloat16": "bf16", "float16": "fp16", "int8": "int8", "uint8": "int8"},
}
"""Arithmetic path of a dtype by NumPy's name."""


@dataclass(frozen=True)
class Value:
    """An array, or a view of one.

    Attributes:
      id: of the array behind it.
      shape: as seen.
      stored: elements in memory that are read to see it; 0 for what is generated on the way.
      element_bytes: of one element.
      dtype: name as NumPy spells it.
      strides: elements from one to the next of each axis; None where a layout is the compiler's choice.
    """

    id: int
    shape: Shape
    stored: float
    element_bytes: float
    dtype: str
    strides: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Elements as seen."""
        return prod(self.shape)

    @property
    def bytes(self) -> float:
        """Bytes read to see it."""
        return self.stored * self.element_bytes

    def view(self, shape: Shape, stored: float | None = None, strides: tuple[int, ...] | None = None) -> Value:
        """The same array under another shape."""
        return replace(self, shape=tuple(shape), stored=self.stored if stored is None else stored, strides=strides)

    def part(self, shape: Shape) -> Value:
        """A part of the array: only that part is read."""
        return self.view(tuple(shape), self.stored * min(prod(shape) / max(self.elements, 1), 1.0))


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation.

    Attributes:
      name: where it stands in the program, dotted.
      op: the primitive or operator.
      kind: how it runs.
      inputs, outputs: arrays.
      loop: shape it iterates over; of a reduction, that of its input.
      kernels: of one execution, for kind "opaque".
      repeat: executions.
      body: the loop body it stands in; only operations of one body and phase run as one kernel.
      phase: index into `kernels.table.PHASES`.
      reduced: innermost axes a "row" reduction takes together, as their product.
      looped: the loop body whose results it is, 0 for none.
    """

    name: str
    op: str
    kind: Kind
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    loop: Shape
    kernels: tuple[Kernel, ...] = ()
    repeat: float = 1.0
    body: int = 0
    phase: int = 0
    reduced: int = 1
    looped: int = 0


def arithmetic_dtype(name: str) -> str:
    """Arithmetic path of a dtype by NumPy's name. What no path has (`is_rated`) goes as fp32."""
    if name.startswith("float8"):
        return "fp8"
    if name.startswith("float4"):
        return "fp4"
    return _PATHS.get(name, "fp32")


def is_rated(name: str) -> bool:
    """Whether GPUs have a rate for products in a dtype, by NumPy's name: none for wide integers and booleans."""
    return name in _PATHS or name.startswith(("float8", "float4"))


def main_dtype(values: Iterable[Value]) -> str:
    """Arithmetic dtype of the largest array."""
    best = max(values, key=lambda value: value.elements, default=None)
    computes = best is not None and best.dtype.startswith(("float", "bfloat", "complex"))
    return arithmetic_dtype(best.dtype) if best is not None and computes else "fp32"


def moved(op: str, inputs: Sequence[Value], outputs: Sequence[Value], passes: float = 1.0) -> Kernel:
    """A memory kernel that reads its inputs and writes its outputs, `passes` times: the rule for the unmodelled."""
    largest = max((*inputs, *outputs), key=lambda value: value.elements, default=None)
    loop = largest.shape if largest is not None else ()
    dtype = main_dtype((*outputs, *inputs))
    read, written = (passes * sum(value.bytes for value in side) for side in (inputs, outputs))
    return streamed("memory", op, loop, read, written, dtype)


def producers(operations: Sequence[Operation]) -> dict[int, int]:
    """Id of an array -> position of the operation that makes it."""
    return {value.id: at for at, item in enumerate(operations) for value in item.outputs}


def readers(operations: Sequence[Operation]) -> dict[int, set[int]]:
    """Id of an array -> positions of the operations that read it."""
    found: dict[int, set[int]] = {}
    for at, item in enumerate(operations):
        for value in item.inputs:
            found.setdefault(value.id, set()).add(at)
    return found


@cache
def operators(section: str, kind: str) -> frozenset[str]:
    """Names of the operators of a section of operators.yaml ("jax", "aten" or "fusion") that are of a kind."""
    return frozenset(table("graph.traced", "operators")[section].get(kind, ()))
