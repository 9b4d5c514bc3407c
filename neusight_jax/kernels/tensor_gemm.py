"""Matrix products M×K · K×N on tensor cores: every dtype but fp32. Tiles and split-K of cuBLAS and CUTLASS there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.kernels.family import SCALE_BLOCK, Dims, Family, Work, is_multiple
from neusight_jax.kernels.gemm import OPTIONS, flop, product_features, split_work

TILES: tuple[tuple[int, int], ...] = ((16, 64), (64, 64), (128, 128), (128, 256))
"""Output tile of one thread block (or pair of them), rows of M × columns of N."""

SPLITS: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
"""Ways the contraction may be cut over blocks (split-K)."""

MIN_SPLIT_STEPS = 256.0
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


def _work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    return split_work(dims, element_bytes, TILES, SPLITS, MIN_SPLIT_STEPS)


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
    narrow = split_work(dims, element_bytes, TILES, NARROW_SPLITS, NARROW_SPLIT_STEPS)
    clocks = narrow.block_bytes / load / LOADS_PER_CYCLE
    return replace(
        _work(dims, element_bytes),
        load_blocks=narrow.blocks,
        load_cycles=jnp.where(load < LOAD_BYTES, clocks, 0.0),
    )


def _scaled_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    """Work where partial sums of every block of the contraction are scaled on the vector path."""
    block = dims.get(SCALE_BLOCK, jnp.zeros_like(dims["k"]))
    scaled = block > HARDWARE_BLOCK
    blocks_per_step = jnp.where(scaled, 1.0 / jnp.where(scaled, block, 1.0), 0.0)
    return replace(_work(dims, element_bytes), vector_flop=0.5 * SCALE_FLOP * blocks_per_step * flop(dims))


def _features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    return product_features(dims, element_bytes, (16.0, 128.0), (64.0, 256.0), 8.0)


def _family(
    name: str,
    work: Callable[[Dims, Float[Array, " kernel"]], Work] = _work,
    options: tuple[tuple[str, float], ...] = OPTIONS,
) -> Family:
    return Family(
        name=name,
        ops=("linear", "bmm", "expert"),
        dims=("batch", "m", "n", "k"),
        options=options,
        tiles=tuple(f"{rows}x{cols}" for rows, cols in TILES),
        matrix=True,
        network=name,
        work=work,
        features=_features,
        tensor_core=True,
        generations="tensor",
        l2_operands=True,
    )


GEMM = _family("gemm", _aligned_work)
"""Sixteen-bit operands, and tf32."""
GEMM_FP8 = _family("gemm_fp8", _scaled_work, (*OPTIONS, (SCALE_BLOCK, 0.0)))
"""Eight-bit operands, quantization of the activations included: what frameworks launch for them differs more."""
GEMM_FP4 = _family("gemm_fp4")
"""Four-bit operands with block scales (nvfp4)."""

FAMILY_BY_DTYPE: dict[str, Family] = {
    **dict.fromkeys(("tf32", "bf16", "fp16"), GEMM),
    **dict.fromkeys(("fp8", "int8"), GEMM_FP8),
    "fp4": GEMM_FP4,
}
"""Family of a product by dtype, where that is not fp32."""
