"""JAX primitives as operations: what each moves and multiplies.

One table by name for what streams, one function for each family of kernels with a shape of its own. What is in neither
is charged as memory traffic, inputs and outputs once, and marked `unmodelled`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal, TypeAlias

from neusight_jax.graph.kernel import matrix_product, streamed
from neusight_jax.graph.traced.operation import SORT_PASSES, Kind, Value, arithmetic_dtype, main_dtype, moved, operators
from neusight_jax.graph.traced.windows import convolution, pooling
from neusight_jax.kernels.table import Kernel

POINTWISE = operators("jax", "pointwise")
REDUCTIONS = operators("jax", "reductions")
VIEWS = operators("jax", "views")
GENERATED = operators("jax", "generated")
SCANS = operators("jax", "scans")
SORTS = operators("jax", "sorts")
RANDOM = operators("jax", "random")
COLLECTIVES = operators("jax", "collectives")

Rule: TypeAlias = Callable[[Mapping[str, Any], Sequence[Value], Sequence[Value], int], tuple[Kernel, ...]]


def kind_of(name: str, params: Mapping[str, Any], inputs: Sequence[Value]) -> Kind:
    """How a primitive runs."""
    if name in POINTWISE:
        return "pointwise"
    if name in REDUCTIONS:
        axes = params.get("axes", params.get("dimensions", ()))
        return "row" if innermost(axes, inputs[0].shape) else "column"
    return "opaque"


def innermost(axes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the axes are the last ones, axes of length 1 aside."""
    kept = [axis for axis, size in enumerate(shape) if size > 1 and axis not in axes]
    taken = [axis for axis in axes if shape[axis] > 1]
    return not kept or not taken or min(taken) > max(kept)


def kernels_of_primitive(
    name: str, params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[tuple[Kernel, ...], bool]:
    """Kernels of a primitive of kind "opaque", and whether it is modelled."""
    rule = _RULES.get(name)
    if rule is not None:
        return rule(params, inputs, outputs, phase), True
    if name in SCANS:
        return (moved("cumsum", inputs, outputs),), True
    if name in SORTS:
        return (moved("sort", inputs[:1], inputs[:1], SORT_PASSES),), True
    if name in RANDOM:
        return (moved("random", (), outputs),), True
    if name.startswith("scatter"):
        return _scatter(inputs, outputs), True
    return (moved("unmodelled", inputs, outputs),), False


def _dot_general(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    (left_contract, _), (left_batch, _) = params["dimension_numbers"]
    left, right = inputs[0], inputs[1]
    batch = prod(left.shape[axis] for axis in left_batch)
    k = prod(left.shape[axis] for axis in left_contract)
    m = left.elements // max(batch * k, 1)
    n = right.elements // max(batch * k, 1)
    if min(batch, m, n, k) == 0:
        return ()
    return (matrix_product(batch, m, n, k, product_dtype(left, right), 4.0 if "complex" in left.dtype else 1.0),)


def product_dtype(left: Value, right: Value) -> str:
    """Arithmetic path of a product: that of its narrower operand."""
    narrow = left if left.element_bytes <= right.element_bytes else right
    return arithmetic_dtype(narrow.dtype)


def grouped_product(
    groups: int, m: int, n: int, k: int, dtype: str, ragged: Literal["m", "n", "k"], batch: int = 1
) -> tuple[Kernel, ...]:
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


def _ragged_dot(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    """Products of groups of rows (or of columns of the contraction, or of batches) with a matrix each."""
    left, right, sizes = inputs[:3]
    numbers = params["ragged_dot_dimension_numbers"]
    (left_contract, _), (left_batch, right_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    batch = prod(left.shape[axis] for axis in left_batch)
    k = prod(left.shape[axis] for axis in left_contract)
    m = left.elements // max(batch * k, 1)
    shared = prod(right.shape[axis] for axis in (*numbers.rhs_group_dimensions, *right_batch))
    n = right.elements // max(shared * k, 1)
    dtype = product_dtype(left, right)
    if ragged in left_batch:
        return (matrix_product(batch, m, n, k, dtype),) if min(batch, m, n, k) else ()
    axis: Literal["m", "k"] = "k" if ragged in left_contract else "m"
    return grouped_product(sizes.shape[-1], m, n, k, dtype, axis, batch)


def _conv(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    numbers = params["dimension_numbers"]
    image, window, out = (
        [value.shape[axis] for axis in spec]
        for value, spec in zip(
            (inputs[0], inputs[1], outputs[0]), (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), strict=True
        )
    )
    return convolution(
        batch=image[0],
        out_batch=out[0],
        channels=image[1],
        features=window[0],
        images=window[1],
        in_size=image[2:],
        window=window[2:],
        out_size=out[2:],
        stride=params["window_strides"],
        image_dilation=params["lhs_dilation"],
        window_dilation=params["rhs_dilation"],
        groups=max(params["feature_group_count"], params["batch_group_count"]),
        # Images come first in every layout in use; where channels do, JAX has transposed the operands.
        weight_gradient=numbers.lhs_spec[0] != 0,
        backward=phase > 0,
        dtype=product_dtype(inputs[0], inputs[1]),
    )


def _gather(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    taken = outputs[0].view(outputs[0].shape)
    return (moved("gather", (taken, *inputs[1:2]), outputs),)


def _scatter(inputs: Sequence[Value], outputs: Sequence[Value]) -> tuple[Kernel, ...]:
    """Reads indices, updates and what they change, writes it, in place; an array of one value is made first."""
    target, indices, updates = inputs[:3]
    scatter = moved("scatter", (updates, updates, indices), (updates,))
    if target.stored > 1:
        return (scatter,)
    size = target.elements * target.element_bytes
    return streamed("memory", "fill", target.shape, 0.0, size, main_dtype((target,))), scatter


def _dynamic_slice(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    return (moved("copy", outputs, outputs),)


def _dynamic_update_slice(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    """In place: only the update is read and written."""
    return (moved("copy", inputs[1:2], inputs[1:2]),)


def _reduce_window(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    return pooling(inputs[:1], outputs[:1])


def _pool_gradient(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    return pooling(inputs, outputs, backward=True)


def _fill(
    params: Mapping[str, Any], inputs: Sequence[Value], outputs: Sequence[Value], phase: int
) -> tuple[Kernel, ...]:
    value = outputs[0]
    dtype = main_dtype(outputs)
    return (streamed("memory", "fill", value.shape, 0.0, value.elements * value.element_bytes, dtype),)


_RULES: dict[str, Rule] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "reduce_window": _reduce_window,
    "reduce_window_max": _reduce_window,
    "reduce_window_min": _reduce_window,
    "reduce_window_sum": _reduce_window,
    "select_and_gather_add": _pool_gradient,
    "select_and_scatter": _pool_gradient,
    "select_and_scatter_add": _pool_gradient,
    "fill": _fill,
}
