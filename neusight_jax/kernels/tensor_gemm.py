"""Matrix products M×K · K×N on tensor cores: every dtype but fp32. Tiles and split-K of cuBLAS and CUTLASS there."""

from __future__ import annotations

from jaxtyping import Array, Float

from neusight_jax.kernels.family import Dims, Family, Work
from neusight_jax.kernels.gemm import OPTIONS, product_features, split_work

TILES: tuple[tuple[int, int], ...] = ((16, 64), (64, 64), (128, 128), (128, 256))
"""Output tile of one thread block (or pair of them), rows of M × columns of N."""

SPLITS: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
"""Ways the contraction may be cut over blocks (split-K)."""

MIN_SPLIT_STEPS = 256.0
"""Shortest contraction a split-K block is given; a shape-only rule, so that choosing a split keeps slopes monotone."""


def _work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    return split_work(dims, element_bytes, TILES, SPLITS, MIN_SPLIT_STEPS)


def _features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    return product_features(dims, element_bytes, (16.0, 128.0), (64.0, 256.0), 8.0)


def _family(name: str) -> Family:
    return Family(
        name=name,
        ops=("linear", "bmm"),
        dims=("batch", "m", "n", "k"),
        options=OPTIONS,
        tiles=tuple(f"{rows}x{cols}" for rows, cols in TILES),
        matrix=True,
        network=name,
        work=_work,
        features=_features,
        tensor_core=True,
        generations="tensor",
        l2_operands=True,
    )


GEMM = _family("gemm")
"""Sixteen-bit operands, and tf32."""
GEMM_FP8 = _family("gemm_fp8")
"""Eight-bit operands, quantization of the activations included: what frameworks launch for them differs more."""
GEMM_FP4 = _family("gemm_fp4")
"""Four-bit operands with block scales (nvfp4)."""

FAMILY_BY_DTYPE: dict[str, Family] = {
    **dict.fromkeys(("tf32", "bf16", "fp16"), GEMM),
    **dict.fromkeys(("fp8", "int8"), GEMM_FP8),
    "fp4": GEMM_FP4,
}
"""Family of a product by dtype, where that is not fp32."""
