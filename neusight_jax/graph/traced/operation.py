"""Operations of a traced program: what the front-ends for JAX functions and torch modules write down.

Values are arrays in memory. A view (reshape, broadcast, slice) is a value with the id of the array behind it; it is no
operation. How operations become kernels is the matter of `grouping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, Literal, TypeAlias

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Shape
from neusight_jax.graph.kernel import matrix_product, streamed
from neusight_jax.kernels.rowwise import FETCH_BYTES, STRIDED
from neusight_jax.kernels.table import Kernel
from neusight_jax.records import Record
from neusight_jax.tables import table

# Call: one call of a JAX primitive or of an operator of PyTorch's aten, and the rules both have in common.

Kernels: TypeAlias = tuple[Kernel, ...]


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
      op: its name, of aten without namespace, overload and the underscore of an in-place form.
      args: positional arguments, tensors as `Value`; params: of a primitive.
      inputs, outputs: the tensors among the arguments, and what it makes: what it returns, then what it writes to.
      in_place: whether it writes its result over its first argument.
      phase: index into `kernels.table.PHASES`.
    """

    op: str
    args: tuple[Any, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    in_place: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    phase: int = 0


Rule: TypeAlias = Callable[[Call], Kernels]


def reduction(axes: Sequence[int], shape: Sequence[int]) -> Kind:
    """Kind a reduction over axes runs as: "row" where they are the last ones, axes of length 1 aside."""
    kept = [axis for axis, size in enumerate(shape) if size > 1 and axis not in axes]
    taken = [axis for axis in axes if shape[axis] > 1]
    return "row" if not kept or not taken or min(taken) > max(kept) else "column"


def fill(call: Call) -> Kernels:
    """An array written, nothing read; one value is no kernel."""
    value = call.outputs[0]
    written = value.elements * value.element_bytes
    if value.elements <= 1:
        return ()
    return (streamed("fill", value.shape, 0.0, written, main_dtype(call.outputs)),)


def unmodelled(call: Call) -> Kernels:
    """Inputs read once and outputs written once."""
    return (moved("unmodelled", call.inputs, call.outputs),)


_STREAMING: dict[str, Rule] = {
    "fills": fill,
    "random": lambda call: (moved("random", (), call.outputs),),
    "gathers": lambda call: (moved("gather", (*call.outputs[:1], *call.inputs[1:]), call.outputs[:1]),),
    "scans": lambda call: (moved("cumsum", call.inputs, call.outputs),),
    "sorts": lambda call: (moved("sort", call.inputs[:1], call.inputs[:1], SORT_PASSES),),
}
"""Rules by kinds of operators.yaml."""


def streaming_rules(section: str) -> dict[str, Rule]:
    """Rules of the operators of a section of operators.yaml that only stream."""
    return {op: rule for kind, rule in _STREAMING.items() for op in operators(section, kind)}


def product_dtype(left: Value, right: Value) -> str:
    """Arithmetic path of a product: that of its narrower operand, of those whose dtype has a rate."""
    rated = [value for value in (left, right) if is_rated(value.dtype)] or [left]
    return arithmetic_dtype(min(rated, key=lambda value: value.element_bytes).dtype)


def grouped_product(
    groups: int, m: int, n: int, k: int, dtype: str, ragged: Literal["m", "n", "k"], batch: int = 1
) -> Kernels:
    """Products of groups, one axis shared out over them, taken as balanced.

    Every row is in one group: with fewer rows than groups the others have no work.

    Args:
      groups: of them.
      m, n, k: sizes of the product, K the contraction; of the ragged axis over all groups together.
      dtype: of the arithmetic.
      ragged: the axis that is shared out.
      batch: of all that.
    """
    sizes = {"m": float(m), "n": float(n), "k": float(k)}
    active = min(groups, int(sizes[ragged]))
    if min(batch, active, m, n, k) == 0:
        return ()
    sizes[ragged] /= active
    return (matrix_product(batch * active, sizes["m"], sizes["n"], sizes["k"], dtype),)


def windowed(op: str, inputs: Sequence[Value], outputs: Sequence[Value], taps: float) -> Kernel:
    """A kernel that reads a window for each output: inputs once from memory, outputs written, a load for each tap.

    Args:
      op: one of `kernels.rowwise.WINDOW_OPS`.
      inputs: arrays that are read.
      outputs: arrays that are written; the kernel loops over the first.
      taps: loads for each element of the first output.
    """
    result = outputs[0]
    read = sum(value.bytes for value in inputs)
    written = sum(float(value.elements * value.element_bytes) for value in outputs)
    kernel = streamed(op, result.shape, read, written, main_dtype((result,)))
    return replace(kernel, dims={**kernel.dims, "taps": max(float(taps), 1.0)})


def plain_product(batch: int, m: int, n: int, k: int, dtype: str, *, upright: bool = True) -> Kernels:
    """A matrix product, or nothing where a size is 0.

    Args: as of `kernel.matrix_product`.
    """
    return (matrix_product(batch, m, n, k, dtype, upright=upright),) if min(batch, m, n, k) else ()


def remaining(value: Value, taken: Sequence[int]) -> int:
    """Elements of an array over those of some of its axes."""
    return value.elements // max(prod(value.shape[axis] for axis in taken), 1)


# How a function or module is read.

PRODUCT_FAMILIES = frozenset({"linear", "bmm", "conv"})
"""Families whose kernels multiply."""


@dataclass(frozen=True)
class TraceOptions(Record):
    """Options of reading a function or module.

    Attributes:
      fused: whether operations are fused into kernels as a compiler would; None = as the framework runs (JAX fused,
        torch not).
      while_trips: how often the body of every `while_loop` runs; None = a function with one is refused.
      branch: which branch of a `cond` or `switch` runs: "worst" (most FLOP + 50 FLOP per byte) or its index.
      fp32_products: arithmetic path of fp32 matrix products and convolutions, "fp32" or "tf32".
      name: of the graph; "" = that of the function or module.
      gpus_per_domain: neighbouring devices of a mesh that share fast links; 0 = all of it.
      parameters: arguments of a JAX function that hold parameters, by name or position ("0"); None = as use tells.
      fp32_convolutions: arithmetic path of fp32 convolutions; None = as the framework runs them (torch "tf32" where the
        GPU has it, as `torch.backends.cudnn.allow_tf32` is by default; JAX as products).
    """

    fused: bool | None = None
    while_trips: int | None = None
    branch: str | int = "worst"
    fp32_products: str = "fp32"
    name: str = ""
    parameters: tuple[str, ...] | None = None
    gpus_per_domain: int = 0
    fp32_convolutions: str | None = None

    def __post_init__(self) -> None:
        trips = self.while_trips
        if trips is not None and (isinstance(trips, bool) or not isinstance(trips, int) or trips < 0):
            raise InputError(f"while_trips is {trips!r}, expected a whole number of at least 0, or None")
        if self.branch != "worst" and (isinstance(self.branch, bool) or not isinstance(self.branch, int)):
            raise InputError(f"branch is {self.branch!r}, expected 'worst' or the index of a branch")
        for option, path in (("fp32_products", self.fp32_products), ("fp32_convolutions", self.fp32_convolutions)):
            if path not in ("fp32", "tf32") and (option, path) != ("fp32_convolutions", None):
                raise InputError(f"{option} is {path!r}, expected 'fp32' or 'tf32'")


Kind: TypeAlias = Literal["pointwise", "row", "column", "opaque", "free"]
"""Ways an operation runs: element by element; reducing innermost axes; reducing others; as kernels of its own; not at
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
    """A memory kernel that reads its inputs and writes its outputs: the rule for the unmodelled.

    Args:
      op: an operator of the family "memory".
      inputs: arrays that are read, by the bytes read to see them.
      outputs: arrays that are written.
      passes: how often all of them are moved.
    """
    largest = max((*inputs, *outputs), key=lambda value: value.elements, default=None)
    loop = largest.shape if largest is not None else ()
    dtype = main_dtype((*outputs, *inputs))
    read, written = (passes * sum(value.bytes for value in side) for side in (inputs, outputs))
    return streamed(op, loop, read, written, dtype)


def producers(operations: Sequence[Operation]) -> dict[int, int]:
    """Id of an array -> position of the operation that makes it."""
    return {value.id: at for at, item in enumerate(operations) for value in item.outputs}


def readers(operations: Sequence[Operation]) -> dict[int, set[int]]:
    """Id of an array -> positions of the operations that read it."""
    positions: dict[int, set[int]] = {}
    for at, item in enumerate(operations):
        for value in item.inputs:
            positions.setdefault(value.id, set()).add(at)
    return positions


@cache
def operators(section: str, kind: str) -> frozenset[str]:
    """Names of the operators of a section of operators.yaml ("jax", "aten" or "fusion") that are of a kind."""
    return frozenset(table("graph.traced", "operators")[section].get(kind, ()))


# Operands a kernel reads against their order, as a permuted view leaves them.
#
# An elementwise kernel of PyTorch runs as its result lies in memory (`TensorIterator`). An operand whose neighbours lie
# along another axis brings a whole fetch for each element, and the loop comes back for the next of it only after it has
# passed all axes within.

KEPT_BYTES = 2.0**20
"""Bytes every L2 keeps: an operand whose next use lies within so many bytes is read as any other."""


@dataclass(frozen=True)
class Scatter:
    """Reads of an operand against its order.

    Attributes:
      passes: over the loop; less than 1 where the innermost axes are broadcast.
      surplus: bytes an element brings beside itself, as a share of the most.
      window: elements of the loop until it comes back for the next element of a fetch.
    """

    passes: float
    surplus: float
    window: float


def scatter(result: Value, operand: Value) -> Scatter | None:
    """Reads of `operand` by a kernel that writes `result`; None = in its order, or strides are not known."""
    order, steps = result.strides, operand.strides
    if order is None or steps is None or len(steps) > len(order):
        return None
    lead = len(order) - len(steps)
    stride = {axis + lead: step for axis, step in enumerate(steps) if operand.shape[axis] > 1 and step}
    axes = [axis for axis, size in enumerate(result.shape) if size > 1]
    axes.sort(key=lambda axis: (order[axis], -axis))  # innermost first
    moving = [axis for axis in axes if axis in stride]
    nearest = min(moving, key=lambda axis: stride[axis], default=None)
    if nearest is None:
        return None
    size, window = operand.element_bytes, prod(result.shape[axis] for axis in axes[: axes.index(nearest)])
    if nearest == moving[0] or window * FETCH_BYTES <= KEPT_BYTES:
        return None
    surplus = (min(stride[moving[0]] * size, FETCH_BYTES) - size) / (FETCH_BYTES - size)
    idle = prod(result.shape[axis] for axis in axes[: axes.index(moving[0])])
    return Scatter(1.0 / idle, surplus, float(window))


def against_order(kernel: Kernel, operation: Operation) -> Kernel:
    """The kernel of one elementwise operation, of family "strided" where it reads operands against their order."""
    op = f"{kernel.op}_permuted"
    if op not in STRIDED.ops or len(operation.outputs) != 1 or not operation.outputs[0].elements:
        return kernel
    (result,) = operation.outputs
    scatters = {operand.id: (operand, scatter(result, operand)) for operand in operation.inputs}
    scattered = [(operand, how) for operand, how in scatters.values() if how is not None]
    if not scattered:
        return kernel
    # An operand that is broadcast is read again: its fetches are as long gone.
    again = sum(
        max(how.passes * result.elements - operand.stored, 0.0) * operand.element_bytes for operand, how in scattered
    )
    dims = {
        **kernel.dims,
        "reads": kernel.dims["reads"] + again / (result.elements * dtype_bytes(kernel.dtype)),
        "scattered": sum(how.passes * how.surplus for _, how in scattered),
        "window": max(how.window for _, how in scattered),
    }
    return replace(kernel, family=STRIDED.name, op=op, dims=dims)
