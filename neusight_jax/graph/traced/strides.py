"""Operands a kernel reads against their order, as a permuted view leaves them.

An elementwise kernel of PyTorch runs as its result lies in memory (`TensorIterator`). An operand whose neighbours lie
along another axis brings a whole fetch for each element, and the loop comes back for the next of it only after it has
passed all axes within.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.traced.operation import Operation, Value
from neusight_jax.kernels.rowwise import FETCH_BYTES, STRIDED
from neusight_jax.kernels.table import Kernel

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
