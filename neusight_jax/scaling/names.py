"""What a GPU kernel's name says: its kind, its dtype, the tile of a matrix product."""

from __future__ import annotations

import functools
import re

KINDS: tuple[str, ...] = (
    *("gemm", "conv", "attention", "elementwise", "softmax", "norm", "memory", "reduce"),
    *("copy", "transfer", "collective", "idle", "host", "unknown"),
)
"""Kinds of work. `copy` stays on the device, `transfer` crosses the link to the host, `idle` launched nothing, `host`
is an operator of a trace without GPU kernels."""

_PATTERNS: tuple[tuple[str, str], ...] = (
    ("collective", r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter"),
    ("transfer", r"memcpy.*(htod|dtoh|host)"),
    ("copy", r"memcpy|memset"),
    ("attention", r"flash|fmha|attention|paged_att|mha_"),
    ("conv", r"conv|winograd|fprop|dgrad|wgrad|im2col"),
    ("softmax", r"softmax"),
    ("norm", r"(layer|rms|batch|group)_?norm|norm_kernel|cuComputeGradInput|GammaBeta"),
    ("gemm", r"gemm|gemv|cijk_|cublas|xmma|nvjet|wgmma|tensorop|matmul|splitk"),
    ("memory", r"embedding|indexing|index_|gather|scatter|catarray|copy|transpose|fill|dropout"),
    ("elementwise", r"elementwise|pointwise|vectorized|triton_poi|gelu|relu|silu|multi_tensor"),
    ("reduce", r"reduce|triton_red|triton_per|cumsum|scan"),
)
_KINDS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)
_DTYPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("fp8", re.compile(r"e4m3|e5m2|fp8", re.IGNORECASE)),
    ("bf16", re.compile(r"bf16|bfloat16|__nv_bfloat", re.IGNORECASE)),
    ("tf32", re.compile(r"tf32|s1688|s16816gemm_f32", re.IGNORECASE)),
    ("fp16", re.compile(r"f16|half|hgemm|h884|h1688|h16816|s16816|hhs", re.IGNORECASE)),
    ("int8", re.compile(r"int8|i8816|igemm|s8", re.IGNORECASE)),
)
_TILE = re.compile(r"(?:gemm|mt|tilesize|tensorop|_)[a-z0-9_]*?(\d{2,3})x(\d{2,3})", re.IGNORECASE)


@functools.lru_cache(maxsize=65536)
def kind_of(name: str) -> str:
    """Kind of a kernel by its name; "unknown" if no word of it is known."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "unknown")


@functools.lru_cache(maxsize=65536)
def dtype_of(name: str) -> str:
    """Dtype of a kernel by its name; fp32 if it does not say."""
    return next((dtype for dtype, pattern in _DTYPES if pattern.search(name)), "fp32")


@functools.lru_cache(maxsize=65536)
def tile_of(name: str) -> tuple[int, int] | None:
    """Output tile of a matrix product by its name, or None: `volta_sgemm_128x64_tn` is (128, 64)."""
    found = _TILE.search(name)
    return (int(found[1]), int(found[2])) if found else None
