"""Operators of PyTorch's aten as operations: what each moves and multiplies.

As `primitives` for JAX: names that stream in one table, a rule for each with a shape of its own, memory traffic for the
rest. A call is given as its operator's name, its arguments with tensors as `Value`, and the values it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, log2, prod
from typing import Any

import numpy as np

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.kernel import FLASH, attention_kernels, conv_kernel, fused_attention, streamed
from neusight_jax.graph.traced.linear_algebra import factorisation, fourier
from neusight_jax.graph.traced.operation import (
    PRODUCT_FAMILIES,
    Call,
    Kernels,
    Kind,
    Rule,
    Value,
    arithmetic_dtype,
    fill,
    grouped_product,
    main_dtype,
    moved,
    operators,
    plain_product,
    product_dtype,
    reduction,
    streaming_rules,
    unmodelled,
    windowed,
)
from neusight_jax.kernels.table import Kernel
from neusight_jax.tables import table

POINTWISE = operators("aten", "pointwise")
REDUCTIONS = operators("aten", "reductions")
FREE = operators("aten", "free")
SCATTERS = operators("aten", "scatters")
POOLS = operators("aten", "pools")
BATCH_NORMS = operators("aten", "batch_norms")
RESAMPLED: dict[str, float] = {"bicubic": 16.0, "trilinear": 8.0, "bilinear": 4.0, "grid_sampler": 4.0, "linear": 2.0}
"""Elements that resampling loads for one of its result, by word of its name."""
VOLUME_COLUMNS = 64
"""Channels of a block of `convolveNd_dgrad_float_engine<float, 3, 1024, 6, ...>`: 2^6."""
INDEX_PUTS = frozenset({"_index_put_impl", "_unsafe_index_put", "index_put"})
ADDING = frozenset({"index_add", "scatter_add", "scatter_reduce"})
"""Operators that read what they change."""
ACCUMULATING = ADDING | INDEX_PUTS
PARTS = frozenset({"as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_scatter"})
OVERWRITES = operators("aten", "random") | {"copy", "fill", "zero"}
"""Operators whose in-place form does not read what it writes to."""


def kind_of(call: Call) -> Kind:
    """Kind an operator runs as; `max` and `min` of two arrays are pointwise."""
    if call.op in POINTWISE or (call.op in ("max", "min") and len(call.inputs) > 1):
        return "pointwise"
    if call.op in REDUCTIONS and call.inputs:
        return reduction(reduced_axes(call), call.inputs[0].shape)
    return "opaque"


def reduced_axes(call: Call) -> list[int]:
    """Axes a reduction goes over."""
    rank = len(call.inputs[0].shape)
    argument = call.args[1] if len(call.args) > 1 else None
    if call.op in ("norm", "linalg_vector_norm"):
        argument = call.args[2] if len(call.args) > 2 else None
    if argument is None or isinstance(argument, bool | float) or argument == []:
        return list(range(rank))
    axes = [argument] if isinstance(argument, int) else list(argument)
    return [axis % max(rank, 1) for axis in axes if isinstance(axis, int)]


def kernels_of_call(call: Call) -> tuple[Kernels, bool]:
    """Kernels of an operator of kind "opaque", and whether it is modelled.

    An operator of a known name whose arguments are not those its rule reads (another library's, or of another version)
    is not modelled, and stops no forecast.
    """
    rule = _RULES.get(call.op) or (_attention if "attention" in call.op else None)
    if rule is None:
        return factorisation(call) or unmodelled(call), False
    try:
        return rule(call), True
    except (ValueError, IndexError, TypeError):
        return unmodelled(call), False


def _scatter(call: Call) -> Kernels:
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


def _pool(call: Call) -> Kernels:
    """Pooling and resampling: a load for each tap of a window, and the places of maxima written with them."""
    backward = call.op.endswith("_backward")
    image, result = (call.outputs[0], call.inputs[0]) if backward else (call.inputs[0], call.outputs[0])
    taps = next((number for word, number in RESAMPLED.items() if word in call.op), 1.0)
    if call.op.startswith("adaptive"):
        taps = image.elements / max(result.elements, 1)
    elif call.op.startswith(("max_pool", "avg_pool")):
        window = next(argument for argument in call.args if isinstance(argument, int | list | tuple))
        taps = float(prod(_per_axis(window, int(call.op[len("max_pool")]))))
    if backward:  # the windows of all results, shared out over the image
        return (windowed("pool_backward", call.inputs, (image,), taps * result.elements / max(image.elements, 1)),)
    return (windowed("pool", (image,), call.outputs, taps),)


def _scan(call: Call) -> Kernels:
    """Cumulative sums and their like: one pass, over an array that is made contiguous first (ScanUtils.cuh).

    Along the innermost axis, threads of a block load two elements each and join them in a tree in shared memory, a step
    of half the elements for each level; about 512 threads share the rows and columns of a block.
    """
    image, axis = call.inputs[0], call.args[1] if len(call.args) > 1 else -1
    columns = image.shape[axis] if image.shape else 1
    rows, taps = image.elements // max(columns, 1), 1.0
    if rows > 1 and prod(image.shape[axis % len(image.shape) + 1 :]) == 1:
        threads = (9 + ceil(log2(columns)) - ceil(log2(rows))) // 2
        taps = 1.0 + (min(max(threads, 4), 9) + 1) / 2
    copied = () if _is_contiguous(image) else (moved("copy", (image,), (image,)),)
    return (*copied, windowed("scan", (image,), call.outputs, taps))


def _product(left: Value, right: Value) -> Kernels:
    """(…, M, K) · (…, K, N); fp32 with a vector streams the matrix, as cuBLAS has kernels of its own for that."""
    *outer, m, k = left.shape if len(left.shape) > 1 else (1, *left.shape)
    n = right.shape[-1] if len(right.shape) > 1 else 1
    batch, upright = prod(outer), not (len(left.shape) > 1 and left.strides and left.strides[-1] > left.strides[-2] > 0)
    if right.stored * batch == right.elements:  # all products are with one matrix
        batch, m = 1, m * batch
    if batch == 1 and 1 in (m, n) and product_dtype(left, right) == "fp32":
        return (moved("reduce", (left, right), ()),)
    return plain_product(batch, m, n, k, product_dtype(left, right), upright=upright)


def _grouped(call: Call) -> Kernels:
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


def _grouped_backward(call: Call) -> Kernels:
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
    }


def _per_axis(sizes: Any, axes: int) -> list[int]:
    extents = [sizes] if isinstance(sizes, int) else list(sizes)
    return extents * axes if len(extents) == 1 else extents


def _convolution(call: Call) -> Kernels:
    (image, weight, *bias), out = call.inputs, call.outputs[0]
    op = "conv_data_gradient" if call.args[6] else "conv"
    sizes = _conv_sizes(call, image, weight, out.shape[2:], 3)
    kernels = _conv_pass(op, product_dtype(image, weight), sizes, (image, out), call)
    return (*kernels, streamed("add", out.shape, out.bytes, out.bytes, main_dtype((out,)))) if bias else kernels


def _conv_pass(op: str, dtype: str, sizes: Mapping[str, Any], tensors: Sequence[Value], call: Call) -> Kernels:
    """One pass of a convolution as cuDNN runs it, fp32 as tf32 where that is allowed and the GPU has it.

    Tensor cores want channels innermost: images that lie otherwise are copied, there and back. The gradient of a volume
    that lies otherwise stays on the vector path in fp32 (`_volume_gradient`).
    """
    kernels = conv_kernel(op, dtype, sizes)
    apart = [value for value in tensors if value.strides and not _channels_last(value)]
    if dtype == "fp32" and op == "conv_data_gradient" and len(sizes["window"]) == 3 and apart:
        return tuple(_volume_gradient(kernel, sizes) for kernel in kernels)
    if dtype == "fp32" and call.params.get("fp32_convolutions") == "tf32":
        products = [kernel for kernel in kernels if kernel.family in PRODUCT_FAMILIES]
        kernels = tuple(replace(kernel, dtype="tf32", instead=kernel) for kernel in products) or kernels
    if any(kernel.family == "conv" and kernel.dtype != "fp32" for kernel in kernels):
        for value in apart:
            copy = moved("copy", (value,), (value,))
            only = replace(copy, path="tf32", instead=replace(copy, count=0.0))
            kernels += (only if dtype == "fp32" else copy,)
    return kernels


def _volume_gradient(kernel: Kernel, sizes: Mapping[str, Any]) -> Kernel:
    """The data gradient of a convolution over three axes by cuDNN's `convolveNd_dgrad_float_engine`.

    A block makes 64 channels, wanted or not, and goes over the whole window where it hangs over the edge too.
    """
    if kernel.family != "conv":
        return kernel
    groups, taps = sizes["groups"], prod(sizes["window"]) / prod(sizes["stride"])
    columns = ceil(kernel.dims["n"] / VOLUME_COLUMNS) * VOLUME_COLUMNS
    return replace(kernel, dims={**kernel.dims, "n": columns, "k": sizes["out_channels"] / groups * taps})


def _is_contiguous(value: Value) -> bool:
    """Whether elements lie in memory in the order of the axes."""
    expected, steps = 1, value.strides or ()
    for size, step in zip(reversed(value.shape), reversed(steps), strict=False):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _channels_last(value: Value) -> bool:
    """Whether channels, axis 1, are the innermost of an image in memory."""
    steps = [step for size, step in zip(value.shape, value.strides or (), strict=False) if size > 1]
    return value.shape[1] == 1 or (value.strides or (0, 1))[1] == min(steps, default=1)


def _convolution_backward(call: Call) -> Kernels:
    gradient, image, weight = call.inputs[:3]
    sizes = _conv_sizes(call, image, weight, gradient.shape[2:], 4)
    dtype, transposed, wanted = product_dtype(image, weight), call.args[7], call.args[10]
    kernels: Kernels = ()
    if wanted[0]:
        kernels += _conv_pass("conv" if transposed else "conv_data_gradient", dtype, sizes, (gradient, image), call)
    if wanted[1]:
        kernels += _conv_pass("conv_weight_gradient", dtype, sizes, (gradient, image), call)
    if len(wanted) > 2 and wanted[2]:
        kernels += (moved("reduce", (gradient,), ()),)
    return kernels


def _passes(op: str, reads: float, writes: float, row: int | str | None = None) -> Rule:
    """The rule of an operator of the table of passes."""

    def rule(call: Call) -> Kernels:
        x, out, cols = call.inputs[0], call.outputs[0], None
        if row == "shape":
            shape = next((arg for arg in call.args if isinstance(arg, list | tuple) and arg), x.shape[-1:])
            cols = prod(size for size in shape if isinstance(size, int))
        elif isinstance(row, int):
            axis = call.args[row] if len(call.args) > row else -1
            cols = x.shape[axis] if isinstance(axis, int) and x.shape else 1
        written = out.elements * out.element_bytes if op.startswith("softmax") else writes * x.bytes
        return (streamed(op, x.shape, reads * x.bytes, written, main_dtype((x,)), cols),)

    return rule


def _batch_norm(call: Call) -> Kernels:
    """Batch norm: by the statistics of the batch twice over it, four times for its gradient; by known ones once.

    Its kernels take elements one by one, however narrow (aten/native/cuda/Normalization.cuh): time as in fp32.
    """
    backward = call.op.endswith("backward")
    image, name = call.inputs[0], "batchnorm"
    trains = next((argument for argument in call.args if isinstance(argument, bool)), "no_training" not in call.op)
    uses_running = not (backward or trains)
    reads = 4.0 if backward else 1.0 if uses_running else 2.0
    if uses_running or not image.strides or _channels_last(image):
        cols = image.shape[1]
    else:
        # The second pass over a row is the kernel's own (`rowwise.NORM`).
        name, reads, cols = "batchnorm_channels", reads / 2.0, image.elements // image.shape[1]
    full, op = image.elements * dtype_bytes("fp32"), f"{name}_backward" if backward else name
    return (streamed(op, image.shape, reads * full, full, "fp32", cols),)


def _group_norm(call: Call) -> Kernels:
    """Group norm: moments of every group of an image, then the image again; for its gradient sums of every channel."""
    image, backward = call.inputs[0], call.op.endswith("backward")
    channels, pixels, groups = (call.args[at] for at in ((6, 7, 8) if backward else (4, 5, 6)))
    reads, cols = (2.0, pixels) if backward else (1.0, channels // groups * pixels)
    op = "groupnorm_backward" if backward else "groupnorm"
    return (streamed(op, image.shape, reads * image.bytes, image.bytes, main_dtype((image,)), cols),)


def _loss(call: Call) -> Kernels:
    """A loss that is one operator: elements from both arrays, and their sum or mean; its gradient likewise.

    That of logits goes over the elements in four kernels (aten/native/Loss.cpp).
    """
    largest = max(call.inputs, key=lambda value: value.elements)
    made = largest.view(largest.shape, float(largest.elements))
    pointwise = streamed(
        "pointwise",
        made.shape,
        sum(value.bytes for value in call.inputs),
        made.bytes,
        main_dtype((made,)),
    )
    pointwise = replace(pointwise, count=4.0 if call.op == "binary_cross_entropy_with_logits" else 1.0)
    return (pointwise,) if call.outputs[0].elements == made.elements else (pointwise, moved("reduce", (made,), ()))


def _softmax_backward(call: Call) -> Kernels:
    """The gradient times the result, then its kernel (aten/native/cuda/SoftMax.cu)."""
    gradient, out = call.inputs[0], call.outputs[0]
    product = streamed("mul", gradient.shape, 2.0 * gradient.bytes, gradient.bytes, main_dtype((out,)))
    return (product, *_passes("softmax_backward", 2, 1, 2)(call))


def _layer_norm_backward(call: Call) -> Kernels:
    kernels = _passes("layernorm_backward", 2, 1, "shape")(call)
    if len(call.outputs) > 1 and call.args[-1][1]:
        kernels += _passes("layernorm_weight_gradient", 2, 0, "shape")(call)
    return kernels


def _picked(call: Call, table: Value) -> Value:
    """The rows of a table that the indices of an embedding bag pick."""
    rows = (call.inputs[1].elements, table.shape[-1])
    return table.view(rows, float(prod(rows)))


def _embedding_backward(call: Call) -> Kernels:
    """The table of zeros, and a row added to for every index."""
    gradient = call.inputs[0]
    return *fill(call), moved("embedding_backward", (gradient, gradient), (gradient,))


def _embedding_bag_backward(call: Call) -> Kernels:
    rows = _picked(call, call.outputs[0])
    return *fill(call), moved("embedding_backward", (rows, rows, call.inputs[1]), (rows,))


def _dropout(call: Call) -> Kernels:
    """One kernel; its boolean mask is written, and read back in the gradient."""
    x, out = call.inputs[0], call.outputs[0]
    op, written = call.op.removeprefix("native_"), float(out.elements * out.element_bytes)
    read, written = (x.bytes, written + x.elements) if op == "dropout" else (x.bytes + x.elements, written)
    return (streamed(op, out.shape, read, written, main_dtype((out,))),)


def _attention(call: Call) -> Kernels:
    """Attention as one operator: (batch, heads, length, width) of query, key and value; one kernel in 16 bits."""
    backward = call.op.endswith("backward")
    query, key, value = call.inputs[1:4] if backward else call.inputs[:3]
    *outer, queries, head = query.shape
    keys, value_head, dtype = key.shape[-2], value.shape[-1], arithmetic_dtype(query.dtype)
    if dtype not in FLASH:
        return attention_kernels(prod(outer), queries, keys, head, value_head, dtype, backward=backward)
    heads, kv_heads = (tensor.shape[-3] if len(tensor.shape) > 2 else 1 for tensor in (query, key))
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": (head + value_head) / 2}
    causal = any(argument is True for argument in call.args)
    kernels = fused_attention(queries, keys, dtype, repeat=prod(outer) // heads, causal=causal, **sizes)
    return (kernels[backward],)


_RULES: dict[str, Rule] = {
    **streaming_rules("aten"),
    # An operator of this kind is one kernel over a list of arrays.
    **{f"_foreach_{name}": lambda call: (moved("copy", call.inputs, call.outputs),) for name in POINTWISE},
    **dict.fromkeys((*POOLS, *(f"{name}_backward" for name in POOLS)), _pool),
    **{name: _passes(*row) for name, row in table("graph.traced", "operators")["aten"]["passes"].items()},
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "_scaled_mm", "_int_mm"), lambda call: _product(*call.inputs[:2])),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), lambda call: _product(*call.inputs[1:3])),
    **dict.fromkeys(
        ("dot", "vdot"), lambda call: plain_product(1, 1, 1, call.inputs[0].elements, product_dtype(*call.inputs[:2]))
    ),
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), _grouped),  # the second is of transformers
    "grouped_mm_fallback_backward": _grouped_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), lambda call: fourier(call, call.args[1])),
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _group_norm),
    **dict.fromkeys(operators("aten", "losses"), _loss),
    **dict.fromkeys(operators("aten", "scans"), _scan),
    "_softmax_backward_data": _softmax_backward,
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_norm_backward),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only"),
        lambda call: (moved("gather", (_picked(call, call.inputs[0]), call.inputs[1]), call.outputs[:1]),),
    ),
    **dict.fromkeys(("_embedding_bag_backward", "_embedding_bag_dense_backward"), _embedding_bag_backward),
    **dict.fromkeys(("native_dropout", "dropout", "native_dropout_backward", "dropout_backward"), _dropout),
    "nll_loss_forward": lambda call: (moved("gather", (call.inputs[1], call.inputs[1]), call.outputs[:1]),),
    "nll_loss_backward": fill,
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(FREE, lambda _: ()),
}
