"""Matrix products M×K · K×N, K the contraction: `linear` (one product, with bias) and `bmm` (a batch of them) in fp32,
`gemm` and its like on tensor cores in every other dtype.

K×N are the weights. They may be stored narrower than the product's dtype and widened on the way to the arithmetic
(`WEIGHT_SHARE`): less traffic, the same FLOP. How long the widening takes was never measured, and networks see the
product as if nothing were narrow, so that narrower weights never take longer. Where its instructions were counted
(`UNPACK`, weights of GGUF), blocks issue them beside their arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax import arithmetic
from neusight_jax.kernels.family import (
    SCALE_BLOCK,
    TILE,
    UNPACK,
    WEIGHT_SHARE,
    AnyDims,
    Dims,
    Family,
    Work,
    is_multiple,
    whole,
    whole_down,
)

TILES: tuple[tuple[int, int], ...] = (
    (32, 32),
    (32, 64),
    (64, 64),
    (32, 128),
    (128, 32),
    (64, 128),
    (128, 64),
    (128, 128),
)
"""Output tile of one thread block, rows of M × columns of N: what SIMT GEMM libraries launch in fp32."""
TENSOR_TILES: tuple[tuple[int, int], ...] = ((16, 64), (64, 64), (128, 128), (128, 256))
"""The same on tensor cores, of one block or a pair of them: tiles of cuBLAS and CUTLASS."""

SPLITS: tuple[int, ...] = (1, 2, 4, 8, 16)
TENSOR_SPLITS: tuple[int, ...] = (*SPLITS, 32)
"""Ways the contraction may be cut over blocks (split-K)."""

MIN_SPLIT_STEPS, TENSOR_SPLIT_STEPS = 128.0, 256.0
"""Shortest contraction a split-K block is given; a shape-only rule, so that choosing a split keeps slopes monotone."""

LOAD_BYTES = 16.0
"""The widest load of a thread, and what rows must start on for libraries to take it. cuBLAS has kernels for rows
aligned to 16 bytes, to 4 (`align2` of 16 bits, `align1` of tf32) and to one element, none between (names of kernels
launched on H100). NVIDIA's Matrix Multiplication Background asks for multiples of 16 bytes."""
NARROW_SPLITS: tuple[int, ...] = (1, 2, 4)
NARROW_SPLIT_STEPS = 1024.0
"""Ways the contraction is cut, and the shortest a block is given, in kernels of narrow loads (fitted, H100)."""
LOADS_PER_CYCLE = 4.0
"""Loads an SM makes a clock, of whatever width: the 64 B/clk from L2 (`Physics.l2_bytes_per_cycle`) in loads of 16
bytes; narrower ones keep their slots. Not fitted; H100 and H200 were measured at 3.2, the same for all widths."""

HARDWARE_BLOCK = 32.0
"""Largest block whose scales matrix units take themselves (OCP Microscaling Formats 1.0)."""
SCALE_FLOP = 4.0
"""fp32 FLOP slots of a result for every block of scales beyond that: the product of both scales, and a multiply-add."""

WIDE_BYTES = 2.0
"""Bytes of an activation, and of a result of products that take packed ones."""

DIRECTIONS: tuple[int, ...] = (2, 4, 6)
"""Features a device effect may tilt along: the contraction (page reach), FLOP (heating up) and intensity."""


def multiplied_rows(dims: Dims, rows: Array, block_rows: Array, tile_rows: Array) -> Array:
    """Rows that a block multiplies: those of its tile, or only as many as there are where it unpacks on the way.

    Args:
      dims: of the kernels.
      rows: that decide how a kernel goes about it [kernel].
      block_rows: that there are for a block, broadcast against its tile.
      tile_rows: of the tile.
    """
    if UNPACK not in dims:
        return tile_rows
    # Vector kernels (mmvq.cu) go row by row, so that of few rows none is padding.
    alone = (rows <= FEW_ROWS) & (dims[UNPACK] > 0)
    return jnp.where(alone[:, None, None], jnp.minimum(block_rows, tile_rows), tile_rows)


def flop(dims: AnyDims) -> Any:
    """Arithmetic of the product, 2·batch·M·N·K FLOP."""
    return 2.0 * dims["batch"] * dims["m"] * dims["n"] * dims["k"]


OPTIONS: tuple[tuple[str, float], ...] = ((WEIGHT_SHARE, 1.0), (UNPACK, 0.0))
"""Dims that a product may leave out."""

FEW_ROWS = 8
"""Rows of M up to which llama.cpp multiplies weights as it unpacks them (`MMVQ_MAX_BATCH_SIZE`)."""
UNPACKED_ROWS = 128.0
"""Rows of M that a weight is unpacked for at a time: the largest tile of llama.cpp's mmq.cu."""
SCALED_STEPS, SCALE_SLOTS = 32.0, 5.0
"""Products of eight-bit integers that are summed before their scales apply, and the instructions a sum takes then: to
floating point, product of the scales, two multiply-adds, its part of the loads (counted, mmq-vec-dot.cuh)."""


def unpacking(
    dims: Dims, rows: Array, weights: tuple[Array, Array], tile_rows: Array, element_bytes: Array
) -> tuple[Array, Array] | tuple[None, None]:
    """`slots` and `block_slots` of `Work`: instructions to unpack weights, and to scale the sums of integers.

    Args:
      dims: of the kernels, `UNPACK` among them, or there is nothing to unpack.
      rows: of M that decide how a kernel goes about it [kernel].
      weights: elements of the kernel [kernel] and of a block [kernel, tile, split].
      tile_rows: rows of a block, broadcast against its weights.
      element_bytes: of the product's dtype, 1 = integers [kernel].
    """
    if UNPACK not in dims:
        return None, None
    few, unpack = rows <= FEW_ROWS, dims[UNPACK]
    scaled = jnp.where((unpack > 0) & (element_bytes == 1), SCALE_SLOTS / SCALED_STEPS, 0.0)
    once, scaled = jnp.where(few, 0.0, unpack)[:, None, None], jnp.where(few, 0.0, scaled)[:, None, None]
    of_kernel, of_block = weights
    # No tile of mmq.cu is taller: what is taller here unpacks its weights as many times.
    times = jnp.ceil(tile_rows / UNPACKED_ROWS)
    return jnp.where(few, unpack * of_kernel, 0.0), of_block * (once * times + scaled * tile_rows)


def weight_share(dims: Dims) -> Float[Array, " kernel"]:
    """`WEIGHT_SHARE` of kernels, all of it where it is left out."""
    return dims.get(WEIGHT_SHARE, jnp.full_like(next(iter(dims.values())), dict(OPTIONS)[WEIGHT_SHARE]))


def elements_moved(dims: Dims, share: Float[Array, " kernel"] | float = 1.0) -> Float[Array, " kernel"]:
    """Elements of both operands and the result; of the weights the share that is stored."""
    m, n, k = dims["m"], dims["n"], dims["k"]
    return dims["batch"] * (m * k + k * n * share + m * n)


def tile_sizes(
    dims: Dims, tiles: tuple[tuple[int, int], ...]
) -> tuple[Float[Array, "_kernel tile"], Float[Array, "_kernel tile"]]:
    """Rows and columns of every tile a kernel may run with: the menu, or where its tile is known (`TILE`) that one,
    lying either way, for libraries also name it by the transposed product."""
    menu = jnp.array(tiles, jnp.float32)
    if TILE not in dims:
        return menu[None, :, 0], menu[None, :, 1]
    has_tile = dims[TILE][:, None] > 0
    tile = menu[jnp.maximum(dims[TILE].astype(int) - 1, 0)]
    # Both ways stand in turn on the places of the menu, so that shapes are the same with and without a known tile.
    lying = jnp.arange(len(tiles)) % 2
    return (
        jnp.where(has_tile, tile[:, lying], menu[None, :, 0]),
        jnp.where(has_tile, tile[:, 1 - lying], menu[None, :, 1]),
    )


def split_work(
    dims: Dims,
    element_bytes: Float[Array, " kernel"],
    tiles: tuple[tuple[int, int], ...],
    splits: tuple[int, ...],
    min_split_steps: float,
) -> Work:
    """Work of a product under a menu of output tiles and of ways to cut the contraction.

    Args:
      dims: batch, m, n, k, and options of the family, each [kernel].
      element_bytes: of one element [kernel].
      tiles: the menu, rows of M × columns of N [tile].
      splits: ways to cut the contraction over blocks [split].
      min_split_steps: shortest contraction a block is given, elements.
    """
    m, n, k = (dims[name][:, None, None] for name in ("m", "n", "k"))
    batch, size = dims["batch"][:, None, None], element_bytes[:, None, None]
    tile_m, tile_n = (side[:, :, None] for side in tile_sizes(dims, tiles))
    # Few output tiles leave SMs idle, so libraries cut the contraction over more blocks; each way is a candidate.
    split = jnp.clip(whole_down(k / min_split_steps, dims), 1.0, jnp.array(splits, jnp.float32)[None, None, :])
    steps = k / split
    share = weight_share(dims)
    weights = dims["batch"] * dims["n"] * dims["k"], tile_n * steps
    slots, block_slots = unpacking(dims, dims["m"], weights, tile_m, element_bytes)
    rows = multiplied_rows(dims, dims["m"], m, tile_m)
    return Work(
        flop=flop(dims),
        bytes_moved=elements_moved(dims, share) * element_bytes,
        blocks=batch * whole(m / tile_m, dims) * whole(n / tile_n, dims) * split,
        block_flop=2.0 * rows * tile_n * steps,
        block_bytes=size * ((rows + tile_n * share[:, None, None]) * steps + rows * tile_n),
        block_steps=steps * jnp.ones_like(tile_m),
        # Weights alone: the kernel before just wrote the activations, which may still be in L2.
        cold_bytes=dims["batch"] * dims["k"] * dims["n"] * share * element_bytes,
        slots=slots,
        block_slots=block_slots,
    )


def tensor_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    """Work of a product on tensor cores."""
    return split_work(dims, element_bytes, TENSOR_TILES, TENSOR_SPLITS, TENSOR_SPLIT_STEPS)


def loaded_bytes(
    sizes: tuple[Float[Array, " kernel"], ...], element_bytes: Float[Array, " kernel"], dims: Dims
) -> Float[Array, " kernel"]:
    """Bytes of a load where rows of these sizes lie one after the other: 16, or 4 where that divides them, or one
    element."""
    load = jnp.full_like(element_bytes, LOAD_BYTES)
    for size in sizes:
        narrow = jnp.where(is_multiple(size, 4.0 / element_bytes, dims), 4.0, element_bytes)
        widest = is_multiple(size, LOAD_BYTES / element_bytes, dims)
        load = jnp.minimum(load, jnp.where(widest, LOAD_BYTES, jnp.maximum(narrow, element_bytes)))
    return load


def _aligned_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    """Work where rows of both operands and the result (contraction innermost, or N) may not start on 16 bytes."""
    load = loaded_bytes((dims["k"], dims["n"]), element_bytes, dims)[:, None, None]
    narrow = split_work(dims, element_bytes, TENSOR_TILES, NARROW_SPLITS, NARROW_SPLIT_STEPS)
    clocks = narrow.block_bytes / load / LOADS_PER_CYCLE
    return replace(
        tensor_work(dims, element_bytes),
        load_blocks=narrow.blocks,
        load_cycles=jnp.where(load < LOAD_BYTES, clocks, 0.0),
    )


def _scaled_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    """Work where partial sums of every block of the contraction are scaled on the vector path."""
    block = dims.get(SCALE_BLOCK, jnp.zeros_like(dims["k"]))
    scaled = block > HARDWARE_BLOCK
    # The inner `where` keeps kernels without blocks from dividing by zero, which would be a NaN gradient.
    blocks_per_step = jnp.where(scaled, 1.0 / jnp.where(scaled, block, 1.0), 0.0)
    return replace(tensor_work(dims, element_bytes), vector_flop=0.5 * SCALE_FLOP * blocks_per_step * flop(dims))


def _packed_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    """Work where results are in sixteen bits, and activations are until a pass before the product packs them, which
    reads them so; what it writes the product finds in L2 at best."""
    work, (tile_m, tile_n) = tensor_work(dims, element_bytes), tile_sizes(dims, TENSOR_TILES)
    wider = jnp.maximum(WIDE_BYTES - element_bytes, 0.0)
    return replace(
        work,
        bytes_moved=work.bytes_moved + dims["batch"] * dims["m"] * (wider * dims["n"] + WIDE_BYTES * dims["k"]),
        block_bytes=work.block_bytes + (wider[:, None] * tile_m * tile_n)[:, :, None],
    )


def aligned(size: Float[Array, " kernel"], to: float, dims: Dims) -> Float[Array, " kernel"]:
    """1 where a size is a multiple, else 0."""
    return jnp.where(is_multiple(size, to, dims), 1.0, 0.0)


def filled(size: Float[Array, " kernel"], tile: float, dims: Dims) -> Float[Array, " kernel"]:
    """Share of whole tiles that a size fills."""
    return size / (whole(size / tile, dims) * tile)


def product_features(
    dims: Dims,
    element_bytes: Float[Array, " kernel"],
    tiles_m: tuple[float, ...],
    tiles_n: tuple[float, ...],
    alignment: float,
) -> Float[Array, "kernel feature"]:
    """Shape-only inputs of a product: sizes, how far tiles of M and of N are filled, alignment of K and N.

    Args:
      dims: batch, m, n, k, each [kernel].
      element_bytes: of one element [kernel].
      tiles_m: rows of tiles whose filling is a feature.
      tiles_n: columns of tiles, likewise.
      alignment: elements that K and N should be multiples of.
    """
    batch, m, n, k = dims["batch"], dims["m"], dims["n"], dims["k"]
    total, moved = flop(dims), elements_moved(dims) * element_bytes
    fills = [filled(m, tile, dims) for tile in tiles_m] + [filled(n, tile, dims) for tile in tiles_n]
    logs = [jnp.log(size) for size in (m, n, k, batch, total, moved, total / moved, batch * m * n)]
    return jnp.stack([*logs, *fills, aligned(k, alignment, dims), aligned(n, alignment, dims)], axis=-1)


def _features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    return product_features(dims, element_bytes, (32.0, 128.0), (32.0, 128.0), 4.0)


def _tensor_features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    return product_features(dims, element_bytes, (16.0, 128.0), (64.0, 256.0), 8.0)


def _names(tiles: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    return tuple(f"{rows}x{cols}" for rows, cols in tiles)


LINEAR = Family(
    name="linear",
    ops=("linear",),
    dims=("batch", "m", "n", "k"),
    options=OPTIONS,
    tiles=_names(TILES),
    matrix=True,
    network="linear",
    work=partial(split_work, tiles=TILES, splits=SPLITS, min_split_steps=MIN_SPLIT_STEPS),
    features=_features,
    directions=DIRECTIONS,
)
BMM = replace(
    LINEAR,
    name="bmm",
    ops=("bmm",),
    network="bmm",
    work=partial(split_work, tiles=TILES, splits=(1,), min_split_steps=MIN_SPLIT_STEPS),
)
GEMM = Family(
    name="gemm",
    ops=("linear", "bmm", "expert"),
    dims=LINEAR.dims,
    options=OPTIONS,
    tiles=_names(TENSOR_TILES),
    matrix=True,
    network="gemm",
    work=_aligned_work,
    features=_tensor_features,
    tensor_core=True,
    generations="tensor",
    l2_operands=True,
)
"""Sixteen-bit operands, and tf32."""
GEMM_FP8 = replace(GEMM, name="gemm_fp8", network="gemm_fp8", work=_scaled_work, options=(*OPTIONS, (SCALE_BLOCK, 0.0)))
"""Eight-bit operands, quantization of the activations included: what frameworks launch for them differs more."""
GEMM_FP4 = replace(GEMM, name="gemm_fp4", network="gemm_fp4", work=_packed_work)
"""Four-bit operands with block scales (nvfp4), packing of the activations included."""

_PRODUCTS = {family.name: family for family in (GEMM, GEMM_FP8, GEMM_FP4)}
FAMILY_BY_DTYPE: dict[str, Family] = {
    name: _PRODUCTS[dtype.products] for name, dtype in arithmetic.TABLE.items() if dtype.products
}
"""Family of a product by dtype, where that is not fp32."""
