"""PyTorch operators with recorded shapes, as kernels this package forecasts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from neusight_jax.graph.kernel import fused_attention
from neusight_jax.kernels.table import Kernel

_BINARY = {"add": "add", "sub": "add", "rsub": "add", "mul": "mul", "div": "div", "pow": "pow", "where": "mul"}
_UNARY = ("relu", "tanh", "gelu", "silu", "sigmoid", "exp", "neg", "sqrt", "rsqrt", "threshold", "clamp", "log", "sin")
_ROWWISE: dict[str, tuple[tuple[str, str, float, float], ...]] = {
    **dict.fromkeys(("copy_", "clone", "contiguous", "cat"), (("memory", "copy", 1, 1),)),
    **dict.fromkeys(("fill_", "zero_"), (("memory", "fill", 0, 1),)),
    **dict.fromkeys(("sum", "mean"), (("memory", "reduce", 1, 0),)),
    **dict.fromkeys(("index_select", "gather"), (("memory", "gather", 1, 1),)),
    "native_dropout": (("memory", "dropout", 1, 2),),
    "native_dropout_backward": (("memory", "dropout_backward", 2, 1),),
    "cumsum": (("memory", "cumsum", 1, 1),),
    "max": (("memory", "max", 1, 0),),
    "scatter": (("memory", "scatter", 1, 1),),
    **dict.fromkeys(("_softmax", "softmax", "_log_softmax", "_safe_softmax"), (("softmax", "softmax", 1, 1),)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), (("softmax", "softmax_backward", 2, 1),)),
    **dict.fromkeys(("native_layer_norm", "layer_norm", "rms_norm"), (("norm", "layernorm", 1, 1),)),
    "native_layer_norm_backward": (
        ("norm", "layernorm_backward", 2, 1),
        ("norm", "layernorm_weight_gradient", 2, 0),
    ),
    **{f"{op}_backward": (("elementwise", "mul", 2, 1),) for op in ("gelu", "tanh", "silu", "sigmoid", "threshold")},
}
"""Operator -> family, our op, passes read and written of each kernel it launches over its first operand."""
_TOKENS_FIRST = ("_flash_attention", "_efficient_attention")
"""Attention of (batch, tokens, heads, head size); the others have heads before tokens."""
_HEADS_FIRST = (
    *("scaled_dot_product_attention", "_cudnn_attention"),
    *(f"_scaled_dot_product_{form}_attention" for form in ("flash", "efficient", "cudnn")),
)
_DTYPES: dict[str, str] = {
    **dict.fromkeys(("c10::half", "half"), "fp16"),
    **dict.fromkeys(("c10::bfloat16", "bfloat16"), "bf16"),
    **dict.fromkeys((f"c10::float8_{form}" for form in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")), "fp8"),
    **{"float": "fp32", "double": "fp64", "signed char": "int8"},
}


def dtype_from_types(types: Sequence[str]) -> str:
    """Dtype of an operator: that of its first floating operand, fp32 if none is known."""
    return next((_DTYPES[kind.lower()] for kind in types if kind.lower() in _DTYPES), "fp32")


def operator_kernels(name: str, shapes: Sequence[Sequence[int]]) -> tuple[Kernel, ...]:
    """Kernels of one call of an operator (`aten::mm`) on operands of these shapes; empty if it is not understood.

    Args:
      name: with or without `aten::`; in-place variants (`add_`) are the same.
      shapes: of the operands in order; `[]` stands for a scalar or an operand that is no tensor.
    """
    op = name.removeprefix("aten::")
    tensors = [tuple(int(size) for size in shape) for shape in shapes if len(shape)]
    if not tensors or any(size <= 0 for shape in tensors for size in shape):
        return ()
    if op in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm"):
        return _product(op, tensors)
    if attention := _attention(op, tensors):
        return attention
    if op == "embedding" and len(tensors) >= 2:
        return (_rowwise((*tensors[1], tensors[0][-1]), "memory", "embedding", 1, 1),)
    base, largest = op.removesuffix("_"), max(tensors, key=math.prod)
    if kernels := _ROWWISE.get(op) or (_ROWWISE.get(base) if base.endswith("_backward") else None):
        return tuple(_rowwise(tensors[0], *kernel) for kernel in kernels)
    if base in _UNARY:
        return (_rowwise(largest, "elementwise", base if base in ("relu", "tanh", "gelu") else "gelu", 1, 1),)
    if base in _BINARY:
        passes = min(sum(math.prod(shape) for shape in tensors) / math.prod(largest), 3.0)
        return (_rowwise(largest, "elementwise", _BINARY[base] + ("" if len(tensors) > 1 else "u"), passes, 1),)
    return ()


def _attention(op: str, tensors: Sequence[tuple[int, ...]]) -> tuple[Kernel, ...]:
    """Fused attention, or its gradient by the same sizes. As in decoders, tokens see none after them."""
    base = op.removesuffix("_forward").removesuffix("_backward")
    operands = tensors[op.endswith("_backward") :][:3]
    if base not in (*_TOKENS_FIRST, *_HEADS_FIRST) or [*map(len, operands)] != [4, 4, 4]:
        return ()
    tokens, heads = (1, 2) if base in _TOKENS_FIRST else (2, 1)
    query, key, _ = operands
    sizes = query[0], query[tokens], key[tokens], query[heads], key[heads], query[3]
    return (fused_attention(*sizes, "", causal=True)[0],)


def _product(op: str, tensors: Sequence[tuple[int, ...]]) -> tuple[Kernel, ...]:
    """Matrix products: (…, M, K) × (K, N) or batches of them."""
    if len(tensors) < 2:
        return ()
    # What follows the two operands are biases and the scales of narrow formats.
    left, right = tensors[1:3] if op in ("addmm", "baddbmm") and len(tensors) >= 3 else tensors[:2]
    if op == "linear":
        right = right[::-1]
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        return ()
    m, k, n = left[-2], left[-1], right[-1]
    if len(right) == 2:
        return (Kernel("linear", "linear", {"batch": 1, "m": math.prod(left[:-1]), "n": n, "k": k}),)
    return (Kernel("bmm", "bmm", {"batch": math.prod(right[:-2]), "m": m, "n": n, "k": k}),)


def _rowwise(shape: Sequence[int], family: str, op: str, reads: float, writes: float) -> Kernel:
    return Kernel(family, op, {"rows": math.prod(shape[:-1]), "cols": shape[-1], "reads": reads, "writes": writes})
