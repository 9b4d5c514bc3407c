"""The measurement schema: operators, columns and dims, and the one door where its letters become ours.

In the schema a matrix product is (m, n) × (n, k): **n is the contraction**. Inside, a product is M×K · K×N with K the
contraction. Only `row_dims` knows both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from neusight_jax.errors import unknown_name
from neusight_jax.kernels.attention import DIMS as ATTENTION_DIMS
from neusight_jax.kernels.attention import attention_dims
from neusight_jax.kernels.collective import DIMS as COLLECTIVE_DIMS
from neusight_jax.kernels.collective import OPS as COLLECTIVE_OPS
from neusight_jax.kernels.collective import OPTIONS as COLLECTIVE_OPTIONS
from neusight_jax.kernels.conv import CHANNELS, conv_dims
from neusight_jax.kernels.conv import DIMS as CONV_DIMS
from neusight_jax.kernels.families import FAMILIES, OPERATORS
from neusight_jax.kernels.family import SCALE_BLOCK, WEIGHT_SHARE
from neusight_jax.kernels.grouped_gemm import DIMS as EXPERT_DIMS
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.kernels.rowwise import BINARY_OPS, UNARY_OPS

GEMM_OPS: tuple[str, ...] = ("linear", "bmm")
"""Matrix products, dims b, m, n, k; `b` of linear may be absent (1)."""
VECTOR_OPS: tuple[str, ...] = (*BINARY_OPS, *UNARY_OPS, "softmax", "ln")
"""Operators on a tensor of b rows × h columns."""
CONV_OPS: tuple[str, ...] = ("conv",)
"""Forward convolutions of square images and windows, without bias."""
COPY_OPS: tuple[str, ...] = ("copy",)
"""Plain copies of a tensor of b rows × h columns."""
ATTENTION_OPS: tuple[str, ...] = ("prefill", "decode")
"""Fused attention of equal requests: new tokens at the end of a sequence."""
QUANTIZE_OPS: tuple[str, ...] = ("quantize", "quantize_rows")
"""Activations of b rows × h columns to eight bits, with one scale given, or one found for each row."""
EXPERT_OPS: tuple[str, ...] = ("experts",)
"""The expert layer of a mixture of experts: gate, up and down products of the experts held here, tokens
spread evenly."""
OPS: tuple[str, ...] = (
    *(*GEMM_OPS, *VECTOR_OPS, *CONV_OPS, *COPY_OPS, *ATTENTION_OPS, *EXPERT_OPS, *QUANTIZE_OPS),
    *COLLECTIVE_OPS,
    *OPERATORS,
)
"""Every operator of the schema: file names in `kernels/` and values of the column `op`."""

_COLUMNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*VECTOR_OPS, *COPY_OPS, *QUANTIZE_OPS), ("b", "h")),
    "linear": ("m", "n", "k"),
    "bmm": ("b", "m", "n", "k"),
    "conv": ("b", "input_channels", "output_channels", "kernel_size", "input_size", "stride", "padding"),
    **dict.fromkeys(
        ATTENTION_OPS, ("batch_size", "query_length", "kv_length", "heads", "kv_heads", "head_dim", "causal")
    ),
    "experts": ("tokens", "experts", "local_experts", "top_k", "hidden", "inner"),
    **dict.fromkeys(COLLECTIVE_OPS, ("bytes", "ranks", "nodes")),
    **{op: tuple(name for name, _ in operator.columns) for op, (_, operator) in OPERATORS.items()},
}
"""Dim columns that rows of an operator must have."""
OPTIONAL_COLUMNS: dict[str, dict[str, float]] = {
    "linear": {"b": 1.0, WEIGHT_SHARE: 1.0, SCALE_BLOCK: 0.0},
    "bmm": {WEIGHT_SHARE: 1.0, SCALE_BLOCK: 0.0},
    **{op: {WEIGHT_SHARE: 1.0} for op in EXPERT_OPS},
    **{op: {"window": 0.0} for op in ATTENTION_OPS},  # sees everything
    **{op: dict(COLLECTIVE_OPTIONS) for op in COLLECTIVE_OPS},
}
"""Columns an operator may lack, with what stands for them."""
GRID_COLUMNS: tuple[str, ...] = ("grid_x", "grid_y", "grid_z")
BLOCK_COLUMNS: tuple[str, ...] = ("block_x", "block_y", "block_z")
POWER_COLUMNS: tuple[str, ...] = ("power_w", "power_limit_w", "clock_hz")
"""Mean watts of the board while a kernel ran again and again, its limit, and the core clock: where they were read."""
DIM_COLUMNS: tuple[str, ...] = tuple(
    dict.fromkeys(name for table in (_COLUMNS, OPTIONAL_COLUMNS) for columns in table.values() for name in columns)
)
"""Every column that may hold a dim."""

FRAME_DIMS: tuple[str, ...] = tuple(
    dict.fromkeys(
        (
            *("batch", "m", "n", "k", "rows", "cols", "reads", "writes"),
            *(*CONV_DIMS, CHANNELS, *ATTENTION_DIMS, *EXPERT_DIMS),
            *(*COLLECTIVE_DIMS, *dict(COLLECTIVE_OPTIONS), WEIGHT_SHARE, SCALE_BLOCK),
            *(name for family, _ in OPERATORS.values() for name in family.columns),
        )
    )
)
"""Dims of the normalised frame, in our letters; NaN where an operator has no such dim."""

Columns = np.ndarray[Any, np.dtype[Any]]

_FAMILY_OPS: dict[str, tuple[str, str]] = {
    **{op: (op, op) for op in (*GEMM_OPS, *CONV_OPS, *ATTENTION_OPS)},
    **{op: ("elementwise", op) for op in (*BINARY_OPS, *UNARY_OPS)},
    **{"softmax": ("softmax", "softmax"), "ln": ("norm", "layernorm"), "copy": ("memory", "copy")},
    **{"quantize": ("stream", "quantize"), "quantize_rows": ("reduction", "quantize_rows")},
    **{op: ("grouped_gemm", op) for op in EXPERT_OPS},
    **{op: ("collective", op) for op in COLLECTIVE_OPS},
    **{op: (family.name, op) for op, (family, _) in OPERATORS.items()},
}
_TILES: tuple[re.Pattern[str], ...] = (
    re.compile(r"sgemm_(\d+)x(\d+)"),
    re.compile(r"tilesize(\d+)x(\d+)"),
    re.compile(r"_mt(\d+)x(\d+)"),
)
_CONV_TILES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"scudnn_winograd_(\d+)x(\d+)"), "winograd_2x2 "),
    (re.compile(r"sgemm_(\d+)x(\d+)"), "winograd_4x4 "),
    (re.compile(r"scudnn_(\d+)x(\d+)_(?!3dconv)"), ""),
)


def op_columns(op: str) -> tuple[str, ...]:
    """Dim columns an operator's rows must have; `InputError` for an unknown operator."""
    family_op(op)
    return _COLUMNS[op]


def family_op(op: str) -> tuple[str, str]:
    """Kernel family of a schema operator, and the operator's name in it (`ln` is `layernorm` of `norm`).

    Raises: `InputError` for an unknown operator.
    """
    if op not in _FAMILY_OPS:
        raise unknown_name("op", op, OPS)
    return _FAMILY_OPS[op]


def row_dims(op: str, columns: Mapping[str, Columns]) -> tuple[str, dict[str, Columns]]:
    """Family and family dims of rows of one operator: the one door from the schema's letters to ours.

    Args:
      op: operator of the schema.
      columns: its dim columns, equal length. For matrix products n is the contraction.
    Returns: family name and its dims by name; our (m, n, k) is the schema's (m, k, n).
    Raises: `InputError` for an unknown operator.
    """
    family, _ = family_op(op)
    first = columns[_COLUMNS[op][0]]
    sizes = {name: np.full_like(first, value) for name, value in OPTIONAL_COLUMNS.get(op, {}).items()} | {**columns}
    if op in OPERATORS:
        return family, OPERATORS[op][1].dims(sizes)
    if op in GEMM_OPS:
        product_dims = {"batch": sizes["b"], "m": sizes["m"], "n": sizes["k"], "k": sizes["n"]}
        return family, {**product_dims, **{name: sizes[name] for name in (WEIGHT_SHARE, SCALE_BLOCK)}}
    if op in CONV_OPS:
        return family, _conv_dims(sizes)
    if op in ATTENTION_OPS:
        ours = {"head_size": "head_dim", "repeat": "batch_size"}
        by_name = {name: sizes[ours.get(name, name)] for name in ("heads", "kv_heads", "window", *ours)}
        return family, attention_dims(sizes["query_length"], sizes["kv_length"], causal=sizes["causal"] > 0, **by_name)
    if op in EXPERT_OPS:
        routed_dims = expert_dims(**{name: sizes[name] for name in _COLUMNS[op]}, distribution="balanced")
        return family, {**routed_dims, WEIGHT_SHARE: sizes[WEIGHT_SHARE]}
    if op in COLLECTIVE_OPS:
        same = {name: sizes[name] for name in ("bytes", "ranks", *dict(COLLECTIVE_OPTIONS))}
        operation = np.full_like(first, 1 + COLLECTIVE_OPS.index(op))
        return family, {**same, "domains": sizes["nodes"], "operation": operation}
    reads = 2.0 if op in BINARY_OPS else 1.0
    writes = 0.5 if op in QUANTIZE_OPS else 1.0  # sixteen bits in, eight out
    passes = {"reads": np.full(len(first), reads), "writes": np.full(len(first), writes)}
    dims = {"rows": sizes["b"], "cols": sizes["h"], **passes}
    return family, {name: dims[name] for name in FAMILIES[family].dims}


def schema_dims(op: str, dims: Mapping[str, float]) -> dict[str, int]:
    """Dim columns of one kernel in the schema's letters, `row_dims` backwards.

    Args:
      op: operator of the schema; dims: dims of its family. Passes (`reads`, `writes`) are the operator's own.
    """
    if op in GEMM_OPS:
        columns = {"b": dims["batch"], "m": dims["m"], "n": dims["k"], "k": dims["n"]}
    else:
        columns = {"b": dims["rows"], "h": dims["cols"]}
    return {name: int(size) for name, size in columns.items()}


def _conv_dims(columns: Mapping[str, Columns]) -> dict[str, Columns]:
    size, window, stride = columns["input_size"], columns["kernel_size"], columns["stride"]
    # A bad row may have no stride; it is refused elsewhere.
    out = np.floor((size + 2.0 * columns["padding"] - window) / np.maximum(stride, 1.0)) + 1.0
    dims = conv_dims(
        "conv",
        batch=columns["b"],
        in_channels=columns["input_channels"],
        out_channels=columns["output_channels"],
        in_size=(size, size),
        out_size=(out, out),
        window=(window, window),
        stride=(stride, stride),
    )
    return {name: np.broadcast_to(np.asarray(values, np.float64), size.shape) for name, values in dims.items()}


@functools.lru_cache(maxsize=4096)
def parse_tile(kernel_name: str) -> str | None:
    """Output tile of a GEMM kernel from its name, as "rows of M x columns of N"; None when the name does not say.

    Libraries are column-major, so the first number of the name tiles our N and the second our M: `sgemm_128x64` is
    "64x128".
    """
    matches = (pattern.search(kernel_name.lower()) for pattern in _TILES)
    return next((f"{match[2]}x{match[1]}" for match in matches if match), None)


@functools.lru_cache(maxsize=4096)
def parse_conv_tile(kernel_name: str) -> str | None:
    """Tile of the main kernel of a convolution, as `kernels.conv` names it; None when the name does not say.

    Images are stored with pixels innermost, so that the first number tiles our M. Winograd's fused kernels transform
    2×2 outputs; a matrix product in a convolution multiplies tiles of 4×4 outputs that were transformed apart.
    """
    matches = ((form, pattern.search(kernel_name.lower())) for pattern, form in _CONV_TILES)
    return next((f"{form}{match[1]}x{match[2]}" for form, match in matches if match), None)


def grid_in_threads(kernel_name: str) -> bool:
    """Whether the profiler gives this kernel's grid in threads, not blocks: AMD's GEMM library (`Cijk_...`) does."""
    return kernel_name.lower().startswith("cijk_")
