"""Writes of elements picked by an index, in PyTorch's aten: what is written is moved, not the array it lies in."""

from __future__ import annotations

from math import prod

import numpy as np

from neusight_jax.graph.traced.operation import Call, Value, moved
from neusight_jax.kernels.table import Kernel

INDEX_PUTS = frozenset({"_index_put_impl", "_unsafe_index_put", "index_put"})
ADDING = frozenset({"index_add", "scatter_add", "scatter_reduce"})
"""Operators that read what they change."""
ACCUMULATING = ADDING | INDEX_PUTS
PARTS = frozenset({"as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_scatter"})


def scatter_kernels(call: Call) -> tuple[Kernel, ...]:
    """Reads indices, updates and, where it adds, what it changes; writes that. Out of place, the array is copied first.

    An array of one value, as zeros are, is made rather than copied.
    """
    target, result = call.inputs[0], call.outputs[0]
    if call.op == "masked_select":
        return (moved("gather", call.inputs, call.outputs),)
    elements, indices, updates = _changed(call)
    changed = result.view((elements,), float(elements))
    adds = call.op in ADDING or (call.op in INDEX_PUTS and call.args[3:4] == (True,))
    scatter = moved("scatter", (*indices, *updates, *((changed,) if adds else ())), (changed,))
    if call.in_place:
        return (scatter,)
    whole = target.view(target.shape, float(target.elements))
    return moved("copy", (target,), (whole,)), scatter


def _changed(call: Call) -> tuple[int, tuple[Value, ...], tuple[Value, ...]]:
    """Elements that are changed, the indices, and the updates."""
    target, args = call.inputs[0], call.args
    if call.op in PARTS:
        return args[1].elements, (), (args[1],)
    if call.op == "masked_scatter":
        return target.elements, (args[1],), (args[2],)
    if call.op in INDEX_PUTS:
        indices = tuple(index for index in args[1] if index is not None)
        return _indexed(target, args[1], args[2]), indices, (args[2],)
    index = args[2]
    updates = tuple(value for value in args[3:4] if isinstance(value, Value))
    if call.op.startswith("index"):  # whole slices along an axis
        return index.elements * target.elements // max(target.shape[args[1]], 1), (index,), updates
    return index.elements, (index,), updates


def _indexed(target: Value, indices: list[Value | None], values: Value) -> int:
    """Elements that `target[indices]` has; where a mask picks them, those of the values, or all if that is one."""
    kept, axis = 1, 0
    shapes: list[tuple[int, ...]] = []
    # As in NumPy, an index takes the place of the axes it goes along: those are left out, and its own shape counts.
    for index in indices:
        if index is None:
            kept *= target.shape[axis]
            axis += 1
        elif index.dtype in ("bool", "uint8"):
            if values.elements > 1:
                return values.elements
            shapes.append((index.elements,))
            axis += len(index.shape)
        else:
            shapes.append(index.shape)
            axis += 1
    return kept * prod(np.broadcast_shapes(*shapes)) * prod(target.shape[axis:])
