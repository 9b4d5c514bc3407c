"""Call: one call of a JAX primitive or of an operator of PyTorch's aten, and the rules both have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

from neusight_jax.graph.kernel import matrix_product, streamed
from neusight_jax.graph.traced.operation import (
    SORT_PASSES,
    Kind,
    Value,
    arithmetic_dtype,
    is_rated,
    main_dtype,
    moved,
    operators,
)
from neusight_jax.kernels.table import Kernel

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
    """How a reduction over axes runs: "row" where they are the last ones, axes of length 1 aside."""
    kept = [axis for axis, size in enumerate(shape) if size > 1 and axis not in axes]
    taken = [axis for axis in axes if shape[axis] > 1]
    return "row" if not kept or not taken or min(taken) > max(kept) else "column"


def fill(call: Call) -> Kernels:
    """An array written, nothing read; one value is no kernel."""
    value = call.outputs[0]
    written = value.elements * value.element_bytes
    if value.elements <= 1:
        return ()
    return (streamed("memory", "fill", value.shape, 0.0, written, main_dtype(call.outputs)),)


def unmodelled(call: Call) -> Kernels:
    """Inputs read once and outputs written once."""
    return (moved("unmodelled", call.inputs, call.outputs),)


_STREAMED: dict[str, Rule] = {
    "fills": fill,
    "random": lambda call: (moved("random", (), call.outputs),),
    "gathers": lambda call: (moved("gather", (*call.outputs[:1], *call.inputs[1:]), call.outputs[:1]),),
    "scans": lambda call: (moved("cumsum", call.inputs, call.outputs),),
    "sorts": lambda call: (moved("sort", call.inputs[:1], call.inputs[:1], SORT_PASSES),),
}
"""Rules by kinds of operators.yaml."""


def streamed_kernels(section: str, call: Call) -> Kernels | None:
    """Kernels of an operator that only streams; None for all others. `section`: of operators.yaml."""
    found = (rule for kind, rule in _STREAMED.items() if call.op in operators(section, kind))
    rule = next(found, None)
    return None if rule is None else rule(call)


def product_dtype(left: Value, right: Value) -> str:
    """Arithmetic path of a product: that of its narrower operand, of those whose dtype has a rate."""
    rated = [value for value in (left, right) if is_rated(value.dtype)] or [left]
    return arithmetic_dtype(min(rated, key=lambda value: value.element_bytes).dtype)


def grouped_product(
    groups: int, m: int, n: int, k: int, dtype: str, ragged: Literal["m", "n", "k"], batch: int = 1
) -> Kernels:
    """Products of groups, one axis shared out over them, taken as balanced.

    Args:
      groups: of them; batch: of all that.
      m, n, k: sizes of the product, K the contraction; of the ragged axis over all groups together.
    Every row is in one group: with fewer rows than groups the others have no work.
    """
    sizes = {"m": float(m), "n": float(n), "k": float(k)}
    active = min(groups, int(sizes[ragged]))
    if min(batch, active, m, n, k) == 0:
        return ()
    sizes[ragged] /= active
    return (matrix_product(batch * active, sizes["m"], sizes["n"], sizes["k"], dtype),)


def pooling(inputs: Sequence[Value], outputs: Sequence[Value], *, backward: bool = False) -> Kernels:
    """Pooling by bytes: inputs read once (windows overlap in cache), outputs written once."""
    return (moved("pool_backward" if backward else "pool", inputs, outputs),)


def plain_product(
    batch: int, m: int, n: int, k: int, dtype: str, count: float = 1.0, *, upright: bool = True
) -> Kernels:
    """A matrix product, or nothing where a size is 0."""
    return (matrix_product(batch, m, n, k, dtype, count, upright=upright),) if min(batch, m, n, k) else ()


def remaining(value: Value, taken: Sequence[int]) -> int:
    """Elements of an array over those of some of its axes."""
    return value.elements // max(prod(value.shape[axis] for axis in taken), 1)
