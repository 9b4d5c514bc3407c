"""The expert layer of a mixture of experts: both grouped matrix products of its gated feed-forward block as one kernel.

Every token goes to `top_k` of the experts; this device holds some of them, each `inner` wide after any split of the
experts themselves. Weights may be stored narrower than the dtype of the products; how long kernels take to widen them
was measured, so the network sees it.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.kernels.family import AnyDims, Dims, Family, Work, namespace, whole
from neusight_jax.kernels.gemm import OPTIONS, multiplied_rows, unpacking, weight_share

DIMS: tuple[str, ...] = ("tokens", "rows", "active", "hidden", "inner")
"""Tokens of the batch, token-expert pairs served here, experts here with work; widths of model and expert."""

TILES: tuple[int, ...] = (16, 64, 128)
"""Rows of one expert that a block takes."""
TILE_COLS = 128.0
"""Columns a block takes."""

Distribution = Literal["balanced", "random"]
"""Ways tokens spread: as evenly as they can, or each pair on any expert with equal chance."""


def expert_dims(
    tokens: ArrayLike,
    *,
    experts: ArrayLike,
    local_experts: ArrayLike,
    top_k: ArrayLike,
    hidden: ArrayLike,
    inner: ArrayLike,
    distribution: Distribution = "balanced",
    skew: ArrayLike = 0.0,
) -> dict[str, Any]:
    """Dims of an expert layer; sizes may be traced scalars, but not with a skew.

    Args:
      tokens: of the batch; experts: in all; local_experts: on this device; top_k: experts of a token.
      hidden, inner: width of the model and of an expert's part on this device.
      distribution: decides how many local experts have work.
      skew: exponent of Zipf's law of the popularity of experts, for distribution "random": the i-th most popular is
        taken in proportion to i^-skew. This device is then the one with most work, where experts are dealt to devices
        in turn by their popularity.
    """
    xp = namespace(tokens, experts, local_experts, top_k, hidden, inner)
    local = xp.asarray(local_experts, float)
    rows = xp.asarray(tokens, float) * top_k * local / xp.maximum(experts, 1.0)
    active = xp.minimum(local, rows) if distribution == "balanced" else local * -xp.expm1(-rows / local)
    strength = float(np.asarray(skew))
    if strength > 0.0:
        one, of_all, here, chosen = (float(np.asarray(size)) for size in (tokens, experts, local, top_k))
        rows, active = _skewed(one, of_all, here, chosen, strength)
    dims = {"tokens": tokens, "rows": rows, "active": xp.maximum(active, 1e-3), "hidden": hidden, "inner": inner}
    return {name: xp.broadcast_to(xp.asarray(value, float), rows.shape) for name, value in dims.items()}


def _skewed(tokens: float, experts: float, local: float, top_k: float, skew: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows and active experts of the device with most work, popularity by Zipf's law; a token meets an expert once."""
    popularity = np.arange(1.0, experts + 1.0) ** -skew
    # Experts that all tokens take already leave their surplus to the others, in proportion.
    share, full = popularity, np.zeros(len(popularity), bool)
    for _ in range(len(popularity)):
        share = np.where(full, 1.0, popularity * (top_k - full.sum()) / max(popularity[~full].sum(), 1e-30))
        if not np.any(share[~full] > 1.0):
            break
        full |= share > 1.0
    local_rows = tokens * share[:: max(round(experts / local), 1)]
    return np.asarray(local_rows.sum()), np.asarray(-np.expm1(-local_rows).sum())


def flop(dims: AnyDims) -> Any:
    """Arithmetic of gate, up and down projections, 6 · rows · hidden · inner FLOP."""
    return 6.0 * dims["rows"] * dims["hidden"] * dims["inner"]


def bytes_moved(
    dims: Dims, element_bytes: Float[Array, " kernel"], share: Float[Array, " kernel"] | float = 1.0
) -> Float[Array, " kernel"]:
    """Weights of the active experts once as stored, tokens in and out, the gated product written and read, bytes."""
    weights = 3.0 * dims["active"] * dims["hidden"] * dims["inner"] * share
    activations = 2.0 * dims["tokens"] * dims["hidden"] + dims["rows"] * (dims["hidden"] + 4.0 * dims["inner"])
    return element_bytes * (weights + activations)


def _work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    rows, active, hidden, inner = (dims[name][:, None, None] for name in ("rows", "active", "hidden", "inner"))
    tile = jnp.array(TILES, jnp.float32)[None, :, None]
    busy = whole(jnp.maximum(active, 1.0), dims)
    size = element_bytes[:, None, None]
    # Gate and up write twice the inner width, down writes the hidden width: blocks of both products are in one launch.
    cols = whole(2.0 * inner / TILE_COLS, dims) + whole(hidden / TILE_COLS, dims)
    steps = 3.0 * hidden * inner / (cols * TILE_COLS)  # mean contraction of a block over both products
    share = weight_share(dims)
    weights = 3.0 * dims["active"] * dims["hidden"] * dims["inner"], TILE_COLS * steps
    slots, block_slots = unpacking(dims, dims["tokens"], weights, tile, element_bytes)
    taken = multiplied_rows(dims, dims["tokens"], rows / busy, tile)
    return Work(
        flop=flop(dims),
        bytes_moved=bytes_moved(dims, element_bytes, share),
        blocks=busy * whole(rows / busy / tile, dims) * cols,
        block_flop=2.0 * taken * TILE_COLS * steps,
        block_bytes=size * ((taken + TILE_COLS * share[:, None, None]) * steps + taken * TILE_COLS),
        block_steps=steps * jnp.ones_like(tile),
        cold_bytes=3.0 * dims["active"] * dims["hidden"] * dims["inner"] * share * element_bytes,
        slots=slots,
        block_slots=block_slots,
    )


def _features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    active, total, moved = dims["active"], flop(dims), bytes_moved(dims, element_bytes)
    sizes = (
        *(dims["tokens"], dims["rows"], dims["hidden"], dims["inner"]),
        *(active, dims["rows"] / active, total, moved, total / moved, element_bytes, weight_share(dims)),
    )
    return jnp.stack([jnp.log(value) for value in sizes], axis=-1)


GROUPED_GEMM = Family(
    name="grouped_gemm",
    ops=("experts",),
    dims=DIMS,
    options=OPTIONS,
    tiles=tuple(f"{rows}x{TILE_COLS:.0f}" for rows in TILES),
    matrix=True,
    network="grouped_gemm",
    work=_work,
    features=_features,
    tensor_core=True,
    generations="tensor",
)
