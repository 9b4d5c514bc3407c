"""JAX primitives as operations: what each moves and multiplies.

One table by name for what streams, one function for each family of kernels with a shape of its own. What is in neither
is charged as memory traffic, inputs and outputs once, and marked `unmodelled`.
"""

from __future__ import annotations

from math import prod

from neusight_jax.graph.kernel import conv_kernel, streamed
from neusight_jax.graph.traced.linear_algebra import factorisation, fourier
from neusight_jax.graph.traced.operation import (
    Call,
    Kernels,
    Kind,
    Rule,
    grouped_product,
    main_dtype,
    moved,
    operators,
    plain_product,
    product_dtype,
    reduction,
    remaining,
    streaming_rules,
    unmodelled,
    windowed,
)

POINTWISE = operators("jax", "pointwise")
REDUCTIONS = operators("jax", "reductions")
CONV_SIZES: tuple[str, ...] = (
    *("batch", "in_channels", "out_channels", "in_size", "out_size", "window", "stride", "dilation", "groups"),
)
"""Sizes of a convolution, as `kernels.conv.conv_dims` names them."""


def kind_of(call: Call) -> Kind:
    """Kind a primitive runs as."""
    if call.op in POINTWISE:
        return "pointwise"
    return reduction(reduced_axes(call), call.inputs[0].shape) if call.op in REDUCTIONS else "opaque"


def reduced_axes(call: Call) -> list[int]:
    """Axes a reduction goes over."""
    return list(call.params.get("axes", call.params.get("dimensions", ())))


def kernels_of_primitive(call: Call) -> tuple[Kernels, bool]:
    """Kernels of a primitive of kind "opaque", and whether it is modelled."""
    rule = _RULES.get(call.op, _scatter if call.op.startswith("scatter") else None)
    return (factorisation(call) or unmodelled(call), False) if rule is None else (rule(call), True)


def _dot_general(call: Call) -> Kernels:
    (left_contract, right_contract), (left_batch, right_batch) = call.params["dimension_numbers"]
    left, right = call.inputs[:2]
    batch, k = (prod(left.shape[axis] for axis in axes) for axes in (left_batch, left_contract))
    m, n = remaining(left, (*left_batch, *left_contract)), remaining(right, (*right_batch, *right_contract))
    return plain_product(batch, m, n, k, product_dtype(left, right))


def _ragged_dot(call: Call) -> Kernels:
    """Products of groups of rows (or of columns of the contraction, or of batches) with a matrix each."""
    left, right, sizes = call.inputs[:3]
    numbers = call.params["ragged_dot_dimension_numbers"]
    (left_contract, right_contract), (left_batch, right_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    batch, k = (prod(left.shape[axis] for axis in axes) for axes in (left_batch, left_contract))
    m = remaining(left, (*left_batch, *left_contract))
    n = remaining(right, (*numbers.rhs_group_dimensions, *right_batch, *right_contract))
    dtype = product_dtype(left, right)
    if ragged in left_batch:
        return plain_product(batch, m, n, k, dtype)
    return grouped_product(sizes.shape[-1], m, n, k, dtype, "k" if ragged in left_contract else "m", batch)


def _conv(call: Call) -> Kernels:
    """A general dilated convolution, read back as the pass of a plain one that it is.

    JAX writes both gradients as convolutions too. The gradient of the weights convolves image with result: its "window"
    is the result (dilated by the stride), its output the window, its "batch" the input channels. The gradient of the
    data dilates the result by the stride, and so does a transposed convolution: it is counted as that gradient. So
    every pass is as much work as the forward pass of the convolution it belongs to.
    """
    numbers, params = call.params["dimension_numbers"], call.params
    values, specs = (*call.inputs[:2], call.outputs[0]), (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    sides = [[value.shape[axis] for axis in spec] for value, spec in zip(values, specs, strict=True)]
    (batch, channels, *in_size), (features, images, *window), (out_batch, _, *out_size) = sides
    stride, window_dilation, dilation = (params[key] for key in ("window_strides", "rhs_dilation", "lhs_dilation"))
    dilated, grows = prod(dilation) > 1, prod(out_size) - prod(in_size)
    # Images come first in every layout in use; where channels do, JAX has transposed the operands.
    if numbers.lhs_spec[0] != 0:
        op, dilated = "conv_weight_gradient", dilated or prod(in_size) < prod(window)
        small, large = (in_size, window) if dilated else (window, in_size)
        inputs, outputs = (features, batch) if dilated else (batch, features)
        step = dilation if dilated else window_dilation
        sizes = (images, inputs, outputs, large, small, out_size, step, stride)
    elif dilated or grows > 0 or (call.phase > 0 and grows == 0):
        op = "conv_data_gradient"
        sizes = (out_batch, features, channels, out_size, in_size, window, dilation, window_dilation)
    else:
        op = "conv"
        sizes = (batch, channels, features, in_size, out_size, window, stride, window_dilation)
    groups = max(params["feature_group_count"], params["batch_group_count"])
    by_name = dict(zip(CONV_SIZES, (*sizes, groups), strict=True))
    return conv_kernel(op, product_dtype(*call.inputs[:2]), by_name)


def _scatter(call: Call) -> Kernels:
    """Reads indices, updates and what they change, writes it, in place; an array of one value is made first."""
    target, indices, updates = call.inputs[:3]
    scatter = moved("scatter", (updates, updates, indices), (updates,))
    if target.stored > 1:
        return (scatter,)
    size = target.elements * target.element_bytes
    return streamed("fill", target.shape, 0.0, size, main_dtype((target,))), scatter


def _pooling_backward(call: Call) -> Kernels:
    """The windows of all results, shared out over the image."""
    image, results = call.outputs[0], min(value.elements for value in call.inputs[:2])
    taps = prod(call.params["window_dimensions"]) * results / max(image.elements, 1)
    return (windowed("pool_backward", call.inputs, call.outputs, taps),)


_RULES: dict[str, Rule] = {
    **streaming_rules("jax"),
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "fft": lambda call: fourier(call, range(-len(call.params["fft_lengths"]), 0)),
    "dynamic_slice": lambda call: (moved("copy", call.outputs, call.outputs),),
    # In place: only the update is read and written.
    "dynamic_update_slice": lambda call: (moved("copy", call.inputs[1:2], call.inputs[1:2]),),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"),
        lambda call: (windowed("pool", call.inputs[:1], call.outputs[:1], prod(call.params["window_dimensions"])),),
    ),
    **dict.fromkeys(
        ("select_and_gather_add", "select_and_scatter", "select_and_scatter_add"),
        _pooling_backward,
    ),
}
