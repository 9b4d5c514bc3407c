"""Operations with windows: convolutions of every pass, and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from neusight_jax.graph.kernel import matrix_product
from neusight_jax.kernels.conv import conv_dims
from neusight_jax.kernels.table import Kernel


def conv_kernel(
    op: str,
    *,
    batch: int,
    in_channels: int,
    out_channels: int,
    in_size: Sequence[int],
    out_size: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    dtype: str,
) -> tuple[Kernel, ...]:
    """One pass of a convolution; where its window is one pixel of an ungrouped image, it is a plain matrix product.

    Args: as `kernels.conv.conv_dims`.
    """
    if min(batch, in_channels, out_channels, *in_size, *out_size, *window, 1) == 0:
        return ()
    if prod(window) == 1 and groups == 1 and prod(stride) == 1:
        rows = batch * prod(out_size)
        m, n, k = {
            "conv": (rows, out_channels, in_channels),
            "conv_data_gradient": (rows, in_channels, out_channels),
            "conv_weight_gradient": (out_channels, in_channels, rows),
        }[op]
        return (matrix_product(1, m, n, k, dtype),)
    dims = conv_dims(
        op,
        batch=float(batch),
        in_channels=float(in_channels),
        out_channels=float(out_channels),
        in_size=[float(size) for size in in_size],
        out_size=[float(size) for size in out_size],
        window=[float(size) for size in window],
        stride=[float(size) for size in stride],
        dilation=[float(size) for size in dilation],
        groups=float(groups),
    )
    return (Kernel("conv", op, {name: float(size) for name, size in dims.items()}, 1.0, dtype),)


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
        dilated = dilated or prod(in_size) < prod(window)
        small, large = (in_size, window) if dilated else (window, in_size)
        return conv_kernel(
            "conv_weight_gradient",
            batch=images,
            in_channels=features if dilated else batch,
            out_channels=batch if dilated else features,
            in_size=large,
            out_size=small,
            window=out_size,
            stride=image_dilation if dilated else window_dilation,
            dilation=stride,
            groups=groups,
            dtype=dtype,
        )
    if dilated or prod(in_size) < prod(out_size) or (backward and prod(in_size) == prod(out_size)):
        return conv_kernel(
            "conv_data_gradient",
            batch=out_batch,
            in_channels=features,
            out_channels=channels,
            in_size=out_size,
            out_size=in_size,
            window=window,
            stride=image_dilation,
            dilation=window_dilation,
            groups=groups,
            dtype=dtype,
        )
    return conv_kernel(
        "conv",
        batch=batch,
        in_channels=channels,
        out_channels=features,
        in_size=in_size,
        out_size=out_size,
        window=window,
        stride=stride,
        dilation=window_dilation,
        groups=groups,
        dtype=dtype,
    )
