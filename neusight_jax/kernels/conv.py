"""Convolutions as implicit matrix products: forward, gradient of the data, gradient of the weights; `conv` in fp32,
`tensor_conv` on tensor cores in every other dtype.

Each pass of a convolution of `groups` groups is `groups` products M×K · K×N, never written out:

    forward           M = batch · output pixels   N = output channels   K = input channels · taps
    data gradient     M = batch · input pixels    N = input channels    K = output channels · taps · shrinkage
    weight gradient   M = input channels · taps   N = output channels   K = batch · output pixels

with channels of one group, shrinkage the output pixels over the input pixels, and taps the positions of the window (9
for 3×3). All three need 2·groups·M·N·K FLOP. A 3×3 window of stride 1 also has Winograd's transforms: F(2×2) and F(4×4)
multiply 2.25 and 4 times less (Lavin, Gray, CVPR 2016), as 16 and 36 products of transformed tiles. Libraries choose
among these by shape, so the tile menu holds all three. The network does not see the window itself, as measured kernels
have only one: 3×3.

On tensor cores images lie with channels innermost (NHWC), as these want them. No network was fitted to convolutions
there: they take that of `gemm`, the product has M, N and K of `conv`, the traffic of the convolution itself, and

- K padded to whole chunks of 128 bytes of channels for each position of a window beyond 1×1, where channels need no
  padding: the contraction goes through the window position by position (cuDNN's tiles take 64 of 16 bits), in tf32
  chunks of 64 bytes, padded channels too (`tilesize128x128x16`: 16 of 32 bits);
- channels padded to 16 bytes by kernels of their own (cuDNN's `nhwcAddPaddingKernel`), which write the tensor again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.kernels.family import RELAXATION, Dims, Family, Work, is_multiple, whole, whole_down
from neusight_jax.kernels.gemm import (
    GEMM,
    LOAD_BYTES,
    MIN_SPLIT_STEPS,
    SPLITS,
    aligned,
    filled,
    flop,
    product_features,
    tensor_work,
)

_PRODUCT: tuple[str, ...] = ("batch", "m", "n", "k")
_ELEMENTS: tuple[str, ...] = ("pixels", "image", "filter", "result")
_WINOGRAD: tuple[str, ...] = ("m_2x2", "k_2x2", "m_4x4", "k_4x4")
DIMS: tuple[str, ...] = (*_PRODUCT, *_ELEMENTS, *_WINOGRAD)
"""The implicit product, groups as its batch; outputs of one image, elements of all images, filter and result; M and K
of Winograd's products for tiles of 2×2 and 4×4 outputs (0 where the window is not 3×3 of stride 1)."""
CHANNELS = "channels"
"""Part of K at one place in the window: channels, or all of it for the gradient of the weights; 0 = unknown. Not
seen by the fp32 family."""
OPS: tuple[str, ...] = ("conv", "conv_data_gradient", "conv_weight_gradient")

FORMS: tuple[str, ...] = ("", "_2x2", "_4x4")
"""Direct, and Winograd's two: suffix of their dims."""
PRODUCTS: tuple[float, float, float] = (1.0, 16.0, 36.0)
"""Products of one Winograd tile: (2 + 2)² and (4 + 2)²; 1 for the direct form, whose tile is one output."""
TILES: tuple[tuple[int, int, int], ...] = (
    (0, 128, 32),
    (0, 128, 64),
    (0, 128, 128),
    (1, 128, 128),
    (2, 32, 128),
    (2, 128, 32),
    (2, 64, 64),
    (2, 128, 64),
)
"""Tile of one thread block: which form (index into `FORMS`), rows of M, columns of N; what cuDNN 8.9 launched."""
SAVINGS: tuple[float, float, float] = (1.0, 2.25, 4.0)
"""Factor by which each form makes fewer multiplications."""

CHUNK_BYTES = 128.0
"""Channels that a step of the contraction takes at least: a row of shared memory, 32 banks of 4 bytes."""
TF32_CHUNK_BYTES = 64.0
"""The same in tf32, by the names of cuDNN's kernels (`xmma_fprop_implicit_gemm_tf32f32 ... tilesize128x128x16`)."""
PADDING_PASSES = 8.0
"""Passes at the bandwidth of DRAM that padding the channels of a tensor takes, read and write together (fitted, H100:
0.7 elements a clock and SM, on H200 too, so it is not its bandwidth that binds)."""
PADDING_LAUNCHES = 2.0
"""Launches that padding a tensor adds (fitted, H100: 4 us)."""

WINDOW_BYTES = 1e20
"""Traffic before the padded copy is read: more than any L2 keeps."""


Sizes: TypeAlias = float | np.ndarray[Any, np.dtype[Any]]


def conv_dims(
    op: str,
    *,
    batch: Sizes,
    in_channels: Sizes,
    out_channels: Sizes,
    in_size: Sequence[Sizes],
    out_size: Sequence[Sizes],
    window: Sequence[Sizes],
    stride: Sequence[Sizes],
    dilation: Sequence[Sizes] = (),
    groups: Sizes = 1.0,
) -> dict[str, Sizes]:
    """Dims of one pass of a convolution with 1, 2 or 3 spatial axes; every size a number, or an array [row].

    Args:
      op: one of `OPS`.
      batch: images.
      in_channels, out_channels: of the whole convolution, all groups together.
      in_size, out_size: pixels along each axis.
      window, stride, dilation: along each axis, of the forward convolution.
      groups: of channels.
    """
    inner, outer = in_channels / groups, out_channels / groups
    taps, steps = prod(window), prod(stride)
    pixels_in, pixels_out = batch * prod(in_size), batch * prod(out_size)
    # Winograd has transforms for 3x3 windows of stride 1 alone (Lavin and Gray).
    eligible: Any = np.asarray(len(window) == 2) & (steps * prod(dilation) == 1)
    for side in window:
        eligible = eligible & (side == 3)
    image = in_size if op == "conv_data_gradient" else out_size
    tiles = [eligible * batch * prod([np.ceil(size / side) for size in image]) for side in (2.0, 4.0)]
    tensors = (in_channels * pixels_in, groups * inner * outer * taps, out_channels * pixels_out)
    sizes: tuple[Sizes, Sizes, Sizes]
    if op == "conv_weight_gradient":
        sizes, channels = (inner * taps, outer, pixels_out), pixels_out
        forms = [size for count in tiles for size in (inner * (count > 0), count)]
    elif op == "conv_data_gradient":
        sizes, channels = (pixels_in, inner, outer * taps * pixels_out / pixels_in), outer
        forms = [size for count in tiles for size in (count, outer * (count > 0))]
    else:
        sizes, channels = (pixels_out, outer, inner * taps), inner
        forms = [size for count in tiles for size in (count, inner * (count > 0))]
    return dict(zip((*DIMS, CHANNELS), (groups, *sizes, prod(out_size), *tensors, *forms, channels), strict=True))


def elements_moved(dims: Dims) -> Float[Array, " kernel"]:
    """Elements of images, filter and result."""
    return dims["image"] + dims["filter"] + dims["result"]


def _staged(dims: Dims) -> Float[Array, " kernel"]:
    """Elements moved by F(4×4) in separate kernels: transformed tensors, 36/16 of each, are written and read again."""
    grown = 1.0 + 2.0 * PRODUCTS[2] / 16.0
    return grown * (dims["image"] + dims["result"]) + (1.0 + 2.0 * PRODUCTS[2] / 9.0) * dims["filter"]


def _winograd(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, " kernel"]:
    """1 where Winograd applies, else 0; in 16 bits and less it loses too many digits and libraries leave it out."""
    return jnp.where((dims["m_4x4"] > 0) & (element_bytes >= 4.0), 1.0, 0.0)


def _work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    size = element_bytes[:, None, None]
    winograd = _winograd(dims, element_bytes)
    forms = [tile[0] for tile in TILES]
    tile_m = jnp.array([tile[1] for tile in TILES], jnp.float32)[None, :]
    tile_n = jnp.array([tile[2] for tile in TILES], jnp.float32)[None, :]
    transformed = (winograd[:, None] > 0) & jnp.array([form > 0 for form in forms])[None, :]
    m, k = (
        jnp.where(transformed, jnp.stack([dims[name + FORMS[form]] for form in forms], axis=1), dims[name][:, None])
        for name in ("m", "k")
    )
    products = jnp.where(transformed, jnp.array([PRODUCTS[form] for form in forms], jnp.float32)[None, :], PRODUCTS[0])
    blocks = dims["batch"][:, None] * products * whole(m / tile_m, dims) * whole(dims["n"][:, None] / tile_n, dims)
    split = jnp.clip(
        whole_down(k[:, :, None] / MIN_SPLIT_STEPS, dims), 1.0, jnp.array(SPLITS, jnp.float32)[None, None, :]
    )
    # Winograd has 16 or 36 products to fill the SMs with, so nobody cuts their contraction as well.
    split = jnp.where(transformed[:, :, None], 1.0, split)
    steps = k[:, :, None] / split
    area, edge = (tile_m * tile_n)[:, :, None], (tile_m + tile_n)[:, :, None]
    total, moved = flop(dims), elements_moved(dims) * element_bytes
    return Work(
        flop=total,
        bytes_moved=moved,
        blocks=blocks[:, :, None] * split,
        block_flop=2.0 * area * steps,
        block_bytes=size * (edge * steps + area),
        block_steps=steps,
        form_flop=total[:, None] / jnp.where(winograd[:, None] > 0, jnp.array(SAVINGS, jnp.float32)[None, :], 1.0),
        form_bytes=jnp.stack([moved, moved, jnp.where(winograd > 0, _staged(dims) * element_bytes, moved)], axis=1),
    )


def _features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    groups, m, n, k = dims["batch"], dims["m"], dims["n"], dims["k"]
    total, moved = flop(dims), elements_moved(dims) * element_bytes
    fills = [filled(size, tile, dims) for size in (m, n) for tile in (32.0, 128.0)]
    winograd = _winograd(dims, element_bytes)
    for form, outputs in (("_4x4", 16.0), ("_2x2", 4.0)):
        # At least 1, as the branch that `where` drops must not divide by zero: its gradient would be NaN.
        padded = jnp.maximum(dims[f"m{form}"] * dims[f"k{form}"], 1.0) * outputs * 9.0
        fills.append(jnp.where(winograd > 0, m * k / padded, 1.0))  # outputs of the tiles that are wanted
    multiples = [aligned(size, 4.0, dims) for size in (k, n)]
    logs = [jnp.log(size) for size in (m, n, k, groups, total, moved, total / moved, groups * m * n, dims["pixels"])]
    return jnp.stack([*logs, *fills, *multiples], axis=-1)


def _up(size: Float[Array, " kernel"], to: Float[Array, " kernel"], dims: Dims) -> Float[Array, " kernel"]:
    return whole(size / to, dims) * to


def _channels(dims: Dims) -> Float[Array, " kernel"]:
    channels = dims.get(CHANNELS, jnp.zeros_like(dims["k"]))
    return jnp.where(channels > 0, channels, dims["k"])


def _padded_product(dims: Dims, element_bytes: Float[Array, " kernel"]) -> dict[str, Float[Array, " kernel"]]:
    """The implicit product, channels padded."""
    channels = _channels(dims)
    positions = dims["k"] / channels
    is_tf32 = element_bytes >= 4.0
    chunked = (positions > 1.0) & ((_padded(channels, element_bytes, dims) == 0.0) | is_tf32)
    chunk = jnp.where(chunked, jnp.where(is_tf32, TF32_CHUNK_BYTES, CHUNK_BYTES), LOAD_BYTES) / element_bytes
    padded_k = positions * _up(channels, chunk, dims)
    padded_n = _up(dims["n"], LOAD_BYTES / element_bytes, dims)
    product = {"batch": dims["batch"], "m": dims["m"], "n": padded_n, "k": padded_k}
    return {**product, RELAXATION: dims[RELAXATION]} if RELAXATION in dims else product


def _padded(
    size: Float[Array, " kernel"], element_bytes: Float[Array, " kernel"], dims: Dims
) -> Float[Array, " kernel"]:
    return jnp.where(is_multiple(size, LOAD_BYTES / element_bytes, dims), 0.0, 1.0)


def _tensor_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    product = tensor_work(_padded_product(dims, element_bytes), element_bytes)
    read, written = _padded(_channels(dims), element_bytes, dims), _padded(dims["n"], element_bytes, dims)
    again = PADDING_PASSES * (read * dims["image"] + written * dims["result"])
    return replace(
        product,
        flop=flop(dims),
        bytes_moved=elements_moved(dims) * element_bytes,
        fetched_bytes=again * element_bytes,
        window_bytes=jnp.full_like(again, WINDOW_BYTES),
        more_launches=PADDING_LAUNCHES * (read + written),
    )


def _tensor_features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    product = _padded_product(dims, element_bytes)
    features = product_features(product, element_bytes, (16.0, 128.0), (64.0, 256.0), 1.0)
    moved, total = elements_moved(dims) * element_bytes, features[:, 4]
    # The traffic is that of the convolution, not of the product it is written as.
    return features.at[:, 5].set(jnp.log(moved)).at[:, 6].set(total - jnp.log(moved))


CONV = Family(
    name="conv",
    ops=OPS,
    dims=DIMS,
    tiles=tuple(f"winograd{FORMS[form]} {m}x{n}" if form else f"{m}x{n}" for form, m, n in TILES),
    matrix=True,
    network="conv",
    work=_work,
    features=_features,
    alternatives=True,
)
TENSOR_CONV = replace(
    GEMM,
    name="tensor_conv",
    ops=OPS,
    dims=DIMS,
    options=((CHANNELS, 0.0),),
    work=_tensor_work,
    features=_tensor_features,
)
