"""Operators of PyTorch's aten as operations: what each moves and multiplies.

As `primitives` for JAX: names that stream in one table, a rule for each with a shape of its own, memory traffic for the
rest. A call is given as its operator's name, its arguments with tensors as `Value`, and the values it returns.
"""

from __future__ import annotations

from math import prod
from typing import Any

from neusight_jax.graph.kernel import attention_kernels, matrix_product, streamed
from neusight_jax.graph.traced.call import Call, Rule
from neusight_jax.graph.traced.operation import SORT_PASSES, Kind, Value, arithmetic_dtype, main_dtype, moved, operators
from neusight_jax.graph.traced.primitives import grouped_product, innermost, product_dtype
from neusight_jax.graph.traced.scattering import scatter_kernels
from neusight_jax.graph.traced.windows import conv_kernel, pooling
from neusight_jax.kernels.table import Kernel

POINTWISE = operators("aten", "pointwise")
REDUCTIONS = operators("aten", "reductions")
FREE = operators("aten", "free")
FILLS = operators("aten", "fills")
RANDOM = operators("aten", "random")
GATHERS = operators("aten", "gathers")
SCATTERS = operators("aten", "scatters")
SCANS = operators("aten", "scans")
SORTS = operators("aten", "sorts")
POOLS = operators("aten", "pools")
OVERWRITES = RANDOM | {"copy", "fill", "zero"}
"""Operators whose in-place form does not read what it writes to."""


def kind_of(call: Call) -> Kind:
    """How an operator runs."""
    if call.op in POINTWISE and not (call.op in ("max", "min") and len(call.inputs) < 2):
        return "pointwise"
    if call.op in ("max", "min") and len(call.inputs) > 1:
        return "pointwise"
    if call.op in REDUCTIONS and call.inputs:
        return "row" if innermost(reduced_axes(call), call.inputs[0].shape) else "column"
    return "opaque"


def reduced_axes(call: Call) -> list[int]:
    """Axes a reduction goes over."""
    rank = len(call.inputs[0].shape)
    given = call.args[1] if len(call.args) > 1 else None
    if call.op in ("norm", "linalg_vector_norm"):
        given = call.args[2] if len(call.args) > 2 else None
    if given is None or isinstance(given, bool | float) or given == []:
        return list(range(rank))
    axes = [given] if isinstance(given, int) else list(given)
    return [axis % max(rank, 1) for axis in axes if isinstance(axis, int)]


def kernels_of_call(call: Call) -> tuple[tuple[Kernel, ...], bool]:
    """Kernels of an operator of kind "opaque", and whether it is modelled.

    An operator of a known name whose arguments are not those its rule reads (another library's, or of another version)
    is not modelled, and stops no forecast.
    """
    op, inputs, outputs = call.op, call.inputs, call.outputs
    if op in FREE:
        return (), True
    rule = scatter_kernels if op in SCATTERS else _RULES.get(op)
    if rule is not None:
        try:
            return rule(call), True
        except (ValueError, IndexError, TypeError):
            return (moved("unmodelled", inputs, outputs),), False
    if op in FILLS:
        return _fill(call), True
    if op in RANDOM:
        return (moved("random", (), outputs),), True
    if op in GATHERS:
        return (moved("gather", (*outputs[:1], *inputs[1:]), outputs[:1]),), True
    if op in SCANS:
        return (moved("cumsum", inputs, outputs),), True
    if op in SORTS:
        return (moved("sort", inputs[:1], inputs[:1], SORT_PASSES),), True
    if op in POOLS or op.removesuffix("_backward") in POOLS:
        return pooling(inputs[:2], outputs[:1], backward=op.endswith("_backward")), True
    if op.removeprefix("_foreach_") in POINTWISE:  # one kernel over a list of arrays
        return (moved("copy", inputs, outputs),), True
    if "attention" in op:
        return _attention(call), True
    return (moved("unmodelled", inputs, outputs),), False


def _fill(call: Call) -> tuple[Kernel, ...]:
    value = call.outputs[0]
    if value.elements <= 1:
        return ()
    written = value.elements * value.element_bytes
    return (streamed("memory", "fill", value.shape, 0.0, written, main_dtype(call.outputs)),)


def _product(left: Value, right: Value) -> tuple[Kernel, ...]:
    """(…, M, K) · (…, K, N)."""
    *outer, m, k = left.shape if len(left.shape) > 1 else (1, *left.shape)
    n = right.shape[-1] if len(right.shape) > 1 else 1
    batch = prod(outer)
    if min(batch, m, n, k) == 0:
        return ()
    return (matrix_product(batch, m, n, k, product_dtype(left, right)),)


def _mm(call: Call) -> tuple[Kernel, ...]:
    return _product(call.inputs[0], call.inputs[1])


def _addmm(call: Call) -> tuple[Kernel, ...]:
    return _product(call.inputs[1], call.inputs[2])


def _dot(call: Call) -> tuple[Kernel, ...]:
    return (matrix_product(1, 1, 1, call.inputs[0].elements, product_dtype(*call.inputs[:2])),)


def _grouped(call: Call) -> tuple[Kernel, ...]:
    """Products of groups of rows with a matrix each; or of columns, or of parts of the contraction."""
    left, right = call.inputs[:2]
    dtype = product_dtype(left, right)
    ranks = len(left.shape), len(right.shape)
    if ranks == (2, 3):
        groups, k, n = right.shape
        return grouped_product(groups, left.shape[0], n, k, dtype, "m")
    if ranks == (3, 2):
        groups, m, k = left.shape
        return grouped_product(groups, m, right.shape[1], k, dtype, "n")
    if ranks == (2, 2):
        groups = call.outputs[0].shape[0]
        return grouped_product(groups, left.shape[0], right.shape[1], left.shape[1], dtype, "k")
    return _product(left, right)


def _grouped_backward(call: Call) -> tuple[Kernel, ...]:
    """Gradients of both operands, of their shapes."""
    rows, weights = call.outputs
    groups, k, n = weights.shape
    dtype = product_dtype(rows, weights)
    return (
        *grouped_product(groups, rows.shape[0], k, n, dtype, "m"),
        *grouped_product(groups, k, n, rows.shape[0], dtype, "k"),
    )


def _conv_sizes(call: Call, image: Value, weight: Value, result: tuple[int, ...], at: int) -> dict[str, Any]:
    stride, _, dilation, transposed, _, groups = call.args[at : at + 6]
    axes = len(weight.shape) - 2
    inner, outer = weight.shape[1] * groups, weight.shape[0]
    in_size, out_size = image.shape[2:], result
    if transposed:
        # The weight is stored for the convolution this one is the gradient of.
        in_size, out_size = out_size, in_size
    return {
        "batch": image.shape[0] if len(image.shape) > axes + 1 else 1,
        "in_channels": inner,
        "out_channels": outer,
        "in_size": in_size,
        "out_size": out_size,
        "window": weight.shape[2:],
        "stride": _per_axis(stride, axes),
        "dilation": _per_axis(dilation, axes),
        "groups": groups,
        "dtype": product_dtype(image, weight),
    }


def _per_axis(sizes: Any, axes: int) -> list[int]:
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    return listed * axes if len(listed) == 1 else listed


def _convolution(call: Call) -> tuple[Kernel, ...]:
    image, weight = call.inputs[0], call.inputs[1]
    op = "conv_data_gradient" if call.args[6] else "conv"
    kernels = conv_kernel(op, **_conv_sizes(call, image, weight, call.outputs[0].shape[2:], 3))
    return (*kernels, *_bias(call)) if len(call.inputs) > 2 else kernels


def _bias(call: Call) -> tuple[Kernel, ...]:
    out = call.outputs[0]
    return (streamed("elementwise", "add", out.shape, out.bytes, out.bytes, main_dtype((out,))),)


def _convolution_backward(call: Call) -> tuple[Kernel, ...]:
    gradient, image, weight = call.inputs[:3]
    sizes = _conv_sizes(call, image, weight, gradient.shape[2:], 4)
    transposed, wanted = call.args[7], call.args[10]
    kernels: tuple[Kernel, ...] = ()
    if wanted[0]:
        kernels += conv_kernel("conv" if transposed else "conv_data_gradient", **sizes)
    if wanted[1]:
        kernels += conv_kernel("conv_weight_gradient", **sizes)
    if len(wanted) > 2 and wanted[2]:
        kernels += (moved("reduce", (gradient,), ()),)
    return kernels


def _row_norm(op: str, reads: float, writes: float) -> Rule:
    """A norm over innermost axes: passes over the tensor."""

    def rule(call: Call) -> tuple[Kernel, ...]:
        x = call.inputs[0]
        shape = next((arg for arg in call.args if isinstance(arg, list | tuple) and arg), x.shape[-1:])
        cols = prod(size for size in shape if isinstance(size, int))
        return (streamed("norm", op, x.shape, reads * x.bytes, writes * x.bytes, main_dtype((x,)), cols),)

    return rule


def _layer_norm_backward(call: Call) -> tuple[Kernel, ...]:
    kernels = _row_norm("layernorm_backward", 2, 1)(call)
    if len(call.outputs) > 1 and call.args[-1][1]:
        kernels += _row_norm("layernorm_weight_gradient", 2, 0)(call)
    return kernels


def _by_bytes(op: str, passes: tuple[float, float]) -> Rule:
    """A norm over images, by its passes: statistics, then the result."""

    def rule(call: Call) -> tuple[Kernel, ...]:
        x = call.inputs[0]
        reads, writes = (share * x.bytes for share in passes)
        return (streamed("memory", op, x.shape, reads, writes, main_dtype((x,))),)

    return rule


def _softmax(op: str, reads: float, softmax_axis: int) -> Rule:
    def rule(call: Call) -> tuple[Kernel, ...]:
        x = call.inputs[0]
        axis = call.args[softmax_axis] if len(call.args) > softmax_axis else -1
        cols = x.shape[axis] if isinstance(axis, int) and x.shape else 1
        out = call.outputs[0]
        dtype = main_dtype((x,))
        return (streamed("softmax", op, x.shape, reads * x.bytes, out.elements * out.element_bytes, dtype, cols),)

    return rule


def _embedding_backward(call: Call) -> tuple[Kernel, ...]:
    gradient, table = call.inputs[0], call.outputs[0]
    fill = streamed("memory", "fill", table.shape, 0.0, table.elements * table.element_bytes, main_dtype((table,)))
    return fill, moved("embedding_backward", (gradient, gradient), (gradient,))


def _embedding_bag(call: Call) -> tuple[Kernel, ...]:
    """Sums of the rows that are picked, not of the table."""
    table, indices, out = call.inputs[0], call.inputs[1], call.outputs[0]
    rows = table.view((indices.elements, table.shape[-1]), float(indices.elements * table.shape[-1]))
    return (moved("gather", (rows, indices), (out,)),)


def _embedding_bag_backward(call: Call) -> tuple[Kernel, ...]:
    """The table of zeros, and a row added to for every index."""
    indices, table = call.inputs[1], call.outputs[0]
    rows = table.view((indices.elements, table.shape[-1]), float(indices.elements * table.shape[-1]))
    return *_fill(call), moved("embedding_backward", (rows, rows, indices), (rows,))


def _dropout(op: str) -> Rule:
    """One kernel; its boolean mask is written and read back."""

    def rule(call: Call) -> tuple[Kernel, ...]:
        x, out = call.inputs[0], call.outputs[0]
        read, written = x.bytes, float(out.elements * out.element_bytes)
        if op == "dropout":
            written += x.elements
        else:
            read += x.elements
        return (streamed("memory", op, out.shape, read, written, main_dtype((out,))),)

    return rule


def _attention(call: Call) -> tuple[Kernel, ...]:
    """Attention as one operator: (batch, heads, length, width) of query, key and value."""
    backward = call.op.endswith("backward")
    query, key, value = call.inputs[1:4] if backward else call.inputs[:3]
    *outer, queries, head = query.shape
    return attention_kernels(
        prod(outer),
        queries,
        key.shape[-2],
        head,
        value.shape[-1],
        arithmetic_dtype(query.dtype),
        backward=backward,
    )


def _nll(call: Call) -> tuple[Kernel, ...]:
    return (moved("gather", (*call.inputs[1:2], *call.inputs[1:2]), call.outputs[:1]),)


def _nll_backward(call: Call) -> tuple[Kernel, ...]:
    return _fill(call)


_RULES: dict[str, Rule] = {
    "mm": _mm,
    "bmm": _mm,
    "matmul": _mm,
    "mv": _mm,
    "_scaled_mm": _mm,
    "_int_mm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "addmv": _addmm,
    "dot": _dot,
    "vdot": _dot,
    "_grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,  # of transformers
    "grouped_mm_fallback_backward": _grouped_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_layer_norm": _row_norm("layernorm", 1, 1),
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _row_norm("layernorm", 1, 1),
    "_fused_rms_norm_backward": _layer_norm_backward,
    "native_batch_norm": _by_bytes("batchnorm", (2, 1)),
    "_native_batch_norm_legit": _by_bytes("batchnorm", (2, 1)),
    "_native_batch_norm_legit_no_training": _by_bytes("batchnorm", (1, 1)),
    "_batch_norm_with_update": _by_bytes("batchnorm", (2, 1)),
    "cudnn_batch_norm": _by_bytes("batchnorm", (2, 1)),
    "native_batch_norm_backward": _by_bytes("batchnorm_backward", (4, 1)),
    "batch_norm_backward": _by_bytes("batchnorm_backward", (4, 1)),
    "native_group_norm": _by_bytes("groupnorm", (2, 1)),
    "native_group_norm_backward": _by_bytes("groupnorm_backward", (4, 1)),
    "_softmax": _softmax("softmax", 1, 1),
    "_safe_softmax": _softmax("softmax", 1, 1),
    "_log_softmax": _softmax("softmax", 1, 1),
    "_softmax_backward_data": _softmax("softmax_backward", 2, 2),
    "_log_softmax_backward_data": _softmax("softmax_backward", 2, 2),
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    "_embedding_bag_backward": _embedding_bag_backward,
    "_embedding_bag_dense_backward": _embedding_bag_backward,
    "native_dropout": _dropout("dropout"),
    "dropout": _dropout("dropout"),
    "native_dropout_backward": _dropout("dropout_backward"),
    "dropout_backward": _dropout("dropout_backward"),
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
}
