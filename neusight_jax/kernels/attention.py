"""Fused attention (FlashAttention and its kin): `prefill` of new tokens, `decode` of one token per request.

A batch may mix requests of any lengths: its dims are sums over the requests. `pairs` counts the query-key pairs that
mask and window leave, so that causal, windowed and full attention are one family.

Libraries (`Family.known_libraries`) differ in which query heads share a block, and in the kernels around the first.
FlashAttention 2 gives every query head a block of its own where a decode has a window, and splits keys only in blocks
that heads of a group share. FlashAttention 3 lets the heads of a group share the blocks of a prefill and takes 128 keys
at a time; a decode is followed by a kernel that combines its splits and, where layers have windows, preceded by one
that plans them. That a prefill has one further kernel is read off the measurements.

Source: Dao, FlashAttention-2 (2023), for blocks over queries; Flash-Decoding (2023) for blocks over split keys; Shah et
al., FlashAttention-3 (2024), for the time of the exponentials beside the products; what libraries do, from the sources
of vLLM and its flash-attention (`mha_varlen_fwd`, `mha_fwd`, `aot_schedule`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.kernels.family import LIBRARY, AnyDims, Dims, Family, Work, namespace, whole, whole_down

REQUEST_DIMS: tuple[str, ...] = ("requests", "queries", "keys", "pairs", "context")
DIMS: tuple[str, ...] = (*REQUEST_DIMS, "heads", "kv_heads", "head_size", "kv_share", "windowed")
"""Sums over requests: new tokens, keys read, visited query-key pairs, length of the sequences; then heads, their width,
bytes of an element of the KV cache over those of the tensors, and whether the layer has a window (0 or 1): libraries
run another kernel for it, also where the sequence is shorter than the window."""

QUERY_TILES: tuple[int, ...] = (64, 128, 256)
"""Queries of one head that a block of a prefill takes."""
ROW_TILES: tuple[int, ...] = (16, 64)
"""Rows a block of a decode pads the query heads of a group to."""
KEY_SPLITS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
"""Ways a decode may cut the keys of a request over blocks."""
KEY_STEP, FLASH3_KEY_STEP = 64.0, 128.0
"""Keys a block takes at a time, and in FlashAttention 3; the last step is padded."""
MIN_SPLIT_KEYS = 128.0
"""Fewest keys a block of a split decode is given."""

FLASH2, FLASH3 = 1.0, 2.0
"""Libraries by number (`LIBRARY`): FlashAttention 2 and 3."""

DIRECTIONS: tuple[int, ...] = (9, 10, 14)
"""Features a device or library effect may tilt along: keys of a query, heads of a group, share of keys seen."""


def attention_dims(
    queries: np.ndarray,
    context: np.ndarray,
    *,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    head_size: ArrayLike,
    window: np.ndarray | float = 0.0,
    causal: ArrayLike = True,
    kv_share: ArrayLike = 1.0,
    repeat: np.ndarray | float = 1.0,
) -> dict[str, Any]:
    """Dims of one launch for every element of the arrays: `repeat` requests, all alike. Traced may be the sizes of
    heads and `kv_share` alone.

    For a batch of unlike requests, sum `requests` to `context` over its requests.

    Args:
      queries: new tokens, the last of the sequence; context: length of the whole sequence.
      heads, kv_heads, head_size: query heads, heads of the KV cache, width of a head.
      window: keys a query sees at most, itself included (0 = all); causal: whether later keys are hidden.
      kv_share: bytes of an element of the KV cache over those of the tensors; repeat: requests.
    """
    queries, context = np.asarray(queries, np.float64), np.asarray(context, np.float64)
    context = np.maximum(context, queries)
    span = np.where(np.asarray(window) > 0, np.minimum(window, context), context)
    first = context - queries + 1.0  # keys the first new query sees
    short = np.clip(span - first + 1.0, 0.0, queries)  # queries that see no more keys than the window has
    causal_pairs = short * (first + (short - 1.0) / 2.0) + (queries - short) * span
    pairs = np.where(causal, causal_pairs, queries * span)
    keys = np.minimum(context, span + queries - 1.0)
    sums = {"requests": np.ones_like(queries), "queries": queries, "keys": keys, "pairs": pairs, "context": context}
    same = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "kv_share": kv_share}
    same["windowed"] = np.where(np.asarray(window) > 0, 1.0, 0.0)
    dims = {name: np.asarray(values * repeat) for name, values in sums.items()}
    xp = namespace(*same.values())
    return dims | {name: xp.broadcast_to(xp.asarray(value, float), queries.shape) for name, value in same.items()}


def flop(dims: AnyDims) -> Any:
    """Arithmetic of both products, 4 · heads · head size · pairs FLOP."""
    return 4.0 * dims["heads"] * dims["head_size"] * dims["pairs"]


def bytes_moved(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, " kernel"]:
    """Queries read and results written, keys and values read once per KV head, bytes."""
    queries = 2.0 * dims["queries"] * dims["heads"]
    cache = 2.0 * dims["keys"] * dims["kv_heads"] * dims["kv_share"]
    return element_bytes * dims["head_size"] * (queries + cache)


def cached_bytes(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, " kernel"]:
    """Keys and values of earlier steps, bytes: those of the new tokens were just written."""
    earlier = jnp.maximum(dims["keys"] - dims["queries"], 0.0)
    return 2.0 * element_bytes * dims["head_size"] * dims["kv_heads"] * dims["kv_share"] * earlier


def _block_bytes(dims: Dims, element_bytes: Array, rows: Array, keys: Array) -> Array:
    share, size = (dims[name][:, None, None] for name in ("kv_share", "head_size"))
    return element_bytes[:, None, None] * size * (2.0 * rows + 2.0 * keys * share)


def _run_by(dims: Dims, library: float) -> Float[Array, "#kernel"]:
    """1 where a library is known to run a kernel, else 0."""
    return jnp.where(jnp.asarray(dims.get(LIBRARY, jnp.zeros(1))) == library, 1.0, 0.0)


def _key_step(dims: Dims) -> Float[Array, "#kernel"]:
    return KEY_STEP + _run_by(dims, FLASH3) * (FLASH3_KEY_STEP - KEY_STEP)


def _heads_of_blocks(dims: Dims) -> Float[Array, " kernel"]:
    """Heads that a decode has blocks for: those of the cache, or all where heads of a group do not share a block."""
    return dims["kv_heads"] + _run_by(dims, FLASH2) * dims["windowed"] * (dims["heads"] - dims["kv_heads"])


def _prefill_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    requests, queries, pairs, context, heads, kv_heads, size, windowed = (
        dims[name][:, None, None]
        for name in ("requests", "queries", "pairs", "context", "heads", "kv_heads", "head_size", "windowed")
    )
    rows = jnp.array(QUERY_TILES, jnp.float32)[None, :, None]
    sharing = 1.0 + _run_by(dims, FLASH3)[:, None, None] * (heads / kv_heads - 1.0)
    # Queries of a block see different keys: it visits those of all, and masks at one end, with a window at both.
    other = 0.5 * (1.0 + windowed) * jnp.minimum(rows / sharing, queries / requests)
    mean = pairs / queries
    seen = jnp.minimum(mean + other, jnp.maximum(mean, context / requests))
    step = _key_step(dims)[:, None, None]
    keys = whole(seen / step, dims) * step
    return Work(
        flop=flop(dims),
        bytes_moved=bytes_moved(dims, element_bytes),
        blocks=requests * heads / sharing * whole(queries / requests * sharing / rows, dims),
        block_flop=4.0 * rows * size * keys,
        block_bytes=_block_bytes(dims, element_bytes, rows, keys),
        block_steps=keys,
        block_exponentials=rows * keys,
        more_launches=_run_by(dims, FLASH3),
        cold_bytes=cached_bytes(dims, element_bytes),
    )


def _decode_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    requests, queries, pairs, heads, size = (
        dims[name][:, None, None] for name in ("requests", "queries", "pairs", "heads", "head_size")
    )
    rows = jnp.array(ROW_TILES, jnp.float32)[None, :, None]
    seen = pairs / queries
    split = jnp.clip(whole_down(seen / MIN_SPLIT_KEYS, dims), 1.0, jnp.array(KEY_SPLITS, jnp.float32)[None, None, :])
    # FlashAttention 2 splits keys only where heads of a group share a block: not with a window, nor where none share.
    apart = _run_by(dims, FLASH2) * jnp.where(dims["heads"] <= dims["kv_heads"], 1.0, dims["windowed"])
    split = split + apart[:, None, None] * (1.0 - split)
    step = _key_step(dims)[:, None, None]
    keys = whole(seen / split / step, dims) * step
    block_heads = _heads_of_blocks(dims)[:, None, None]
    # Heads of a group read the same keys, so together they fill the rows of one tile.
    group = heads / block_heads * queries / requests
    return Work(
        flop=flop(dims),
        bytes_moved=bytes_moved(dims, element_bytes),
        blocks=requests * block_heads * whole(group / rows, dims) * split,
        block_flop=4.0 * rows * size * keys,
        block_bytes=_block_bytes(dims, element_bytes, rows, keys),
        block_steps=keys * jnp.ones_like(rows),
        block_exponentials=rows * keys,
        more_launches=_run_by(dims, FLASH3) * (1.0 + dims["windowed"]),
        cold_bytes=cached_bytes(dims, element_bytes),
    )


def _features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    requests, queries, keys, pairs = (dims[name] for name in ("requests", "queries", "keys", "pairs"))
    heads, size = dims["heads"], dims["head_size"]
    total, moved = flop(dims), bytes_moved(dims, element_bytes)
    block_heads = _heads_of_blocks(dims)
    sizes = (
        *(queries / requests, keys / requests, requests, heads, block_heads, size, total, moved, total / moved),
        *(pairs / queries, heads / block_heads, requests * block_heads, queries * heads),
        *(element_bytes * dims["kv_share"], dims["context"] / keys),
    )
    return jnp.stack([jnp.log(value) for value in sizes], axis=-1)


PREFILL = Family(
    name="prefill",
    ops=("prefill",),
    dims=DIMS,
    tiles=tuple(f"{rows} queries" for rows in QUERY_TILES),
    matrix=True,
    network="prefill",
    work=_prefill_work,
    features=_features,
    directions=DIRECTIONS,
    tensor_core=True,
    generations="attention",
    known_libraries=(("hopper", FLASH3),),
)
DECODE = replace(
    PREFILL,
    name="decode",
    ops=("decode",),
    tiles=tuple(f"{rows} rows" for rows in ROW_TILES),
    network="decode",
    work=_decode_work,
    known_libraries=(("flash2", FLASH2), ("hopper", FLASH3)),
)
