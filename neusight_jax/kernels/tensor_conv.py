"""Convolutions on tensor cores: every dtype but fp32, as implicit products by the network of `tensor_gemm`.

Images lie with channels innermost (NHWC), as tensor cores want them. No network was fitted to convolutions there: the
product has M, N and K of `conv`, the traffic of the convolution itself, and

- K padded to whole chunks of 128 bytes of channels for each position of a window beyond 1×1, where channels need no
  padding: the contraction goes through the window position by position (cuDNN's tiles take 64 of 16 bits), in tf32
  chunks of 64 bytes, padded channels too (`tilesize128x128x16`: 16 of 32 bits);
- channels padded to 16 bytes by kernels of their own (cuDNN's `nhwcAddPaddingKernel`), which write the tensor again.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.kernels import conv
from neusight_jax.kernels.family import RELAXATION, Dims, Work, is_multiple, whole
from neusight_jax.kernels.gemm import product_features, split_work
from neusight_jax.kernels.tensor_gemm import GEMM, LOAD_BYTES, MIN_SPLIT_STEPS, SPLITS, TILES

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


def _up(size: Float[Array, " kernel"], to: Float[Array, " kernel"], dims: Dims) -> Float[Array, " kernel"]:
    return whole(size / to, dims) * to


def _channels(dims: Dims) -> Float[Array, " kernel"]:
    channels = dims.get(conv.CHANNELS, jnp.zeros_like(dims["k"]))
    return jnp.where(channels > 0, channels, dims["k"])


def _product(dims: Dims, element_bytes: Float[Array, " kernel"]) -> dict[str, Float[Array, " kernel"]]:
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


def _work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    product = split_work(_product(dims, element_bytes), element_bytes, TILES, SPLITS, MIN_SPLIT_STEPS)
    read, written = _padded(_channels(dims), element_bytes, dims), _padded(dims["n"], element_bytes, dims)
    again = PADDING_PASSES * (read * dims["image"] + written * dims["result"])
    return replace(
        product,
        flop=conv.flop(dims),
        bytes_moved=conv.elements_moved(dims) * element_bytes,
        fetched_bytes=again * element_bytes,
        window_bytes=jnp.full_like(again, WINDOW_BYTES),
        more_launches=PADDING_LAUNCHES * (read + written),
    )


def _features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    product = _product(dims, element_bytes)
    features = product_features(product, element_bytes, (16.0, 128.0), (64.0, 256.0), 1.0)
    moved, total = conv.elements_moved(dims) * element_bytes, features[:, 4]
    # The traffic is that of the convolution, not of the product it is written as.
    return features.at[:, 5].set(jnp.log(moved)).at[:, 6].set(total - jnp.log(moved))


TENSOR_CONV = replace(
    GEMM,
    name="tensor_conv",
    ops=conv.OPS,
    dims=conv.DIMS,
    options=((conv.CHANNELS, 0.0),),
    work=_work,
    features=_features,
)
