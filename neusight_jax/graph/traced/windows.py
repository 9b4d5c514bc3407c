"""Convolutions of every pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from neusight_jax.graph.kernel import matrix_product
from neusight_jax.kernels.conv import conv_dims
from neusight_jax.kernels.table import Kernel

SIZES: tuple[str, ...] = (
    *("batch", "in_channels", "out_channels", "in_size", "out_size", "window", "stride", "dilation", "groups"),
)
"""Sizes of a convolution, as `kernels.conv.conv_dims` names them; from `in_size` to `dilation` one for each axis."""


def conv_kernel(op: str, dtype: str, sizes: Mapping[str, Any]) -> tuple[Kernel, ...]:
    """One pass of a convolution; where its window is one pixel of an ungrouped image, it is a plain matrix product.

    `sizes`: by the names of `SIZES`.
    """
    inputs, outputs = sizes["in_channels"], sizes["out_channels"]
    if min(sizes["batch"], inputs, outputs, *sizes["in_size"], *sizes["out_size"], *sizes["window"], 1) == 0:
        return ()
    if prod(sizes["window"]) == 1 and sizes["groups"] == 1 and prod(sizes["stride"]) == 1:
        rows = sizes["batch"] * prod(sizes["out_size"])
        m, n, k = {
            "conv": (rows, outputs, inputs),
            "conv_data_gradient": (rows, inputs, outputs),
            "conv_weight_gradient": (outputs, inputs, rows),
        }[op]
        return (matrix_product(1, m, n, k, dtype, upright=op != "conv_weight_gradient"),)
    if sizes["groups"] == inputs > 1:
        return (_depthwise(op, dtype, sizes),)
    numbers: dict[str, Any] = {
        name: [float(extent) for extent in size] if isinstance(size, Sequence) else float(size)
        for name, size in sizes.items()
    }
    dims = conv_dims(op, **numbers)
    return (Kernel("conv", op, {name: float(size) for name, size in dims.items()}, 1.0, dtype),)


def _depthwise(op: str, dtype: str, sizes: Mapping[str, Any]) -> Kernel:
    """One pass of a convolution with a group for every channel; it loops over what it writes, or the result."""
    image = sizes["batch"] * sizes["in_channels"] * prod(sizes["in_size"])
    result = sizes["batch"] * sizes["out_channels"] * prod(sizes["out_size"])
    looped = image if op == "conv_data_gradient" else result
    read = {"conv": image, "conv_data_gradient": result, "conv_weight_gradient": image + result}[op]
    filters = sizes["out_channels"] * prod(sizes["window"])
    written = filters if op == "conv_weight_gradient" else looped
    dims = {
        "rows": looped / sizes["out_channels"],
        "cols": sizes["out_channels"],
        "reads": (read if op == "conv_weight_gradient" else read + filters) / looped,
        "writes": written / looped,
        "taps": prod(sizes["window"]) * result / looped,
    }
    return Kernel("window", f"depthwise_{op}", {name: float(size) for name, size in dims.items()}, 1.0, dtype)


def convolution(
    *,
    batch: int,
    out_batch: int,
    channels: int,
    features: int,
    images: int,
    in_size: Sequence[int],
    window: Sequence[int],
    out_size: Sequence[int],
    stride: Sequence[int],
    image_dilation: Sequence[int],
    window_dilation: Sequence[int],
    groups: int,
    weight_gradient: bool,
    backward: bool,
    dtype: str,
) -> tuple[Kernel, ...]:
    """A general dilated convolution, read back as the pass of a plain one that it is.

    JAX writes both gradients as convolutions too. The gradient of the weights convolves image with result: its "window"
    is the result (dilated by the stride), its output the window, its "batch" the input channels. The gradient of the
    data dilates the result by the stride, and so does a transposed convolution: it is counted as that gradient. So
    every pass is as much work as the forward pass of the convolution it belongs to.

    Args:
      batch, channels, in_size: of the first operand; features, images, window: outputs, inputs and size of the second.
      out_batch, out_size: of the result.
      stride, image_dilation, window_dilation, groups: of the operation.
      weight_gradient: whether it is the gradient of the weights.
      backward: whether it stands in a backward pass.
    """
    dilated = prod(image_dilation) > 1
    if weight_gradient:
        op, dilated = "conv_weight_gradient", dilated or prod(in_size) < prod(window)
        small, large = (in_size, window) if dilated else (window, in_size)
        inputs, outputs = (features, batch) if dilated else (batch, features)
        step = image_dilation if dilated else window_dilation
        sizes = (images, inputs, outputs, large, small, out_size, step, stride)
    elif dilated or prod(in_size) < prod(out_size) or (backward and prod(in_size) == prod(out_size)):
        op = "conv_data_gradient"
        sizes = (out_batch, features, channels, out_size, in_size, window, image_dilation, window_dilation)
    else:
        op = "conv"
        sizes = (batch, channels, features, in_size, out_size, window, stride, window_dilation)
    return conv_kernel(op, dtype, dict(zip(SIZES, (*sizes, groups), strict=True)))
