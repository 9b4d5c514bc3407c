"""The family `topk`: the k largest elements of every row, with their positions. The example of docs/extending.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.kernels.family import Dims, Family, Operator, Shape, Work, whole

POSITION_BYTES = 4.0
"""Of a position that is written beside its element: a 32-bit integer."""
ROWS_OF_A_BLOCK: tuple[int, ...] = (1, 4)
"""Rows that one block of threads searches: the tile menu."""


def work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    """Every element is read and compared once; k elements and positions of a row are written."""
    rows, cols, kept = dims["rows"], dims["cols"], dims["kept"]
    tile = jnp.array(ROWS_OF_A_BLOCK, jnp.float32)
    blocks = whole(rows[:, None] / tile, dims)
    row_bytes = cols * element_bytes + kept * (element_bytes + POSITION_BYTES)
    return Work(
        flop=rows * cols,
        bytes_moved=rows * row_bytes,
        blocks=blocks[:, :, None],
        block_flop=(cols[:, None] * tile)[:, :, None],
        block_bytes=(row_bytes[:, None] * tile)[:, :, None],
        block_steps=jnp.ones_like(blocks)[:, :, None],
    )


def features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    """Logarithms of the sizes, what the network sees: the shape and never the GPU."""
    rows, cols, kept = dims["rows"], dims["cols"], dims["kept"]
    return jnp.stack([jnp.log(rows), jnp.log(cols), jnp.log(kept), jnp.log(rows * cols * element_bytes)], axis=-1)


def family_dims(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Dims of measured rows."""
    return {"rows": columns["b"], "cols": columns["h"], "kept": columns["k"]}


def tensors(sizes: Mapping[str, int]) -> tuple[tuple[Shape, ...], Shape, float]:
    """Shapes of the input and of the output, and FLOP."""
    rows, cols, kept = sizes["b"], sizes["h"], sizes["k"]
    return ((rows, cols),), (rows, kept), float(rows * cols)


def run(backend: str, sizes: Mapping[str, int]) -> Callable[..., Any]:
    """What `neusight-jax profile` measures."""
    kept = sizes["k"]
    if backend == "torch":
        return lambda x: x.topk(kept, dim=-1).values
    from jax import lax

    return lambda x: lax.top_k(x, kept)[0]


def sized(elements: float) -> dict[str, float]:
    """Dims of a kernel of a trace that moves so many elements and has no shapes."""
    return {"rows": max(round(elements / 4096.0), 1), "cols": 4096.0, "kept": 8.0}


TOPK = Family(
    name="topk",
    ops=("topk",),
    dims=("rows", "cols", "kept"),
    tiles=tuple(f"{rows} rows" for rows in ROWS_OF_A_BLOCK),
    matrix=False,
    network="topk",
    work=work,
    features=features,
    operators=(
        (
            "topk",
            Operator(
                columns=(("b", (32, 65536, 32)), ("h", (128, 16384, 64)), ("k", (1, 64, 1))),
                dims=family_dims,
                tensors=tensors,
                run=run,
                words="gather top ?k|radix top ?k|radix find kth values",
                sized=sized,
            ),
        ),
    ),
)
