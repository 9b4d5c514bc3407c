"""PyTorch operators with recorded shapes, as kernels this package forecasts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from neusight_jax.kernels.table import Kernel

Shapes = Sequence[Sequence[int]]

_BINARY = {"add": "add", "sub": "add", "rsub": "add", "mul": "mul", "div": "div", "pow": "pow", "where": "mul"}
_UNARY = ("relu", "tanh", "gelu", "silu", "sigmoid", "exp", "neg", "sqrt", "rsqrt", "threshold", "clamp", "log", "sin")
_BACKWARD = ("gelu_backward", "tanh_backward", "silu_backward", "sigmoid_backward", "threshold_backward")
_MEMORY = {
    "copy_": ("copy", 1, 1),
    "clone": ("copy", 1, 1),
    "contiguous": ("copy", 1, 1),
    "cat": ("copy", 1, 1),
    "fill_": ("fill", 0, 1),
    "zero_": ("fill", 0, 1),
    "native_dropout": ("dropout", 1, 2),
    "native_dropout_backward": ("dropout_backward", 2, 1),
    "sum": ("reduce", 1, 0),
    "mean": ("reduce", 1, 0),
    "cumsum": ("cumsum", 1, 1),
    "max": ("max", 1, 0),
    "index_select": ("gather", 1, 1),
    "gather": ("gather", 1, 1),
    "scatter": ("scatter", 1, 1),
}
"""Operator -> our op of the memory family, passes read and written."""
_DTYPES: dict[str, str] = {
    "float": "fp32",
    "c10::half": "fp16",
    "half": "fp16",
    "c10::bfloat16": "bf16",
    "bfloat16": "bf16",
    "signed char": "int8",
    **dict.fromkeys(("c10::float8_e4m3fn", "c10::float8_e4m3fnuz"), "fp8"),
    **dict.fromkeys(("c10::float8_e5m2", "c10::float8_e5m2fnuz"), "fp8"),
    "double": "fp64",
}


def dtype_from_types(types: Sequence[str]) -> str:
    """Dtype of an operator: that of its first floating operand, fp32 if none is known."""
    return next((_DTYPES[kind.lower()] for kind in types if kind.lower() in _DTYPES), "fp32")


def operator_kernels(name: str, shapes: Shapes) -> tuple[Kernel, ...]:
    """Kernels of one call of an operator (`aten::mm`) on operands of these shapes; empty if it is not understood.

    Args:
      name: with or without `aten::`; in-place variants (`add_`) are the same.
      shapes: of the operands in order; `[]` stands for a scalar or an operand that is no tensor.
    """
    op = name.removeprefix("aten::")
    tensors = [tuple(int(size) for size in shape) for shape in shapes if len(shape)]
    if not tensors or any(size <= 0 for shape in tensors for size in shape):
        return ()
    product = _product(op, tensors)
    if product is not None:
        return product
    if op in _MEMORY:
        ours, reads, writes = _MEMORY[op]
        return (_rowwise("memory", ours, tensors[0], reads, writes),)
    if op == "embedding" and len(tensors) >= 2:
        return (_rowwise("memory", "embedding", (*tensors[1], tensors[0][-1]), 1, 1),)
    if op in ("_softmax", "softmax", "_log_softmax", "_safe_softmax"):
        return (_rowwise("softmax", "softmax", tensors[0], 1, 1),)
    if op in ("_softmax_backward_data", "_log_softmax_backward_data"):
        return (_rowwise("softmax", "softmax_backward", tensors[0], 2, 1),)
    if op in ("native_layer_norm", "layer_norm", "rms_norm"):
        return (_rowwise("norm", "layernorm", tensors[0], 1, 1),)
    if op == "native_layer_norm_backward":
        return (
            _rowwise("norm", "layernorm_backward", tensors[0], 2, 1),
            _rowwise("norm", "layernorm_weight_gradient", tensors[0], 2, 0),
        )
    base = op.removesuffix("_")
    if base in _BACKWARD:
        return (_rowwise("elementwise", "mul", tensors[0], 2, 1),)
    largest = max(tensors, key=math.prod)
    if base in _UNARY:
        ours = base if base in ("relu", "tanh", "gelu") else "gelu"
        return (_rowwise("elementwise", ours, largest, 1, 1),)
    if base in _BINARY:
        passes = min(sum(math.prod(shape) for shape in tensors) / math.prod(largest), 3.0)
        ours = _BINARY[base] if len(tensors) > 1 else _BINARY[base] + "u"
        return (_rowwise("elementwise", ours, largest, passes, 1),)
    return ()


def _product(op: str, tensors: Sequence[tuple[int, ...]]) -> tuple[Kernel, ...] | None:
    """Matrix products: (…, M, K) × (K, N) or batches of them. None for any other operator."""
    if op not in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm"):
        return None
    left, right = tensors[1:3] if op in ("addmm", "baddbmm") and len(tensors) >= 3 else (tensors[0], tensors[-1])
    if op == "linear":
        left, right = tensors[0], tuple(reversed(tensors[1])) if len(tensors) > 1 else ()
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        return ()
    m, k, n = left[-2], left[-1], right[-1]
    if len(right) == 2:
        return (Kernel("linear", "linear", {"batch": 1, "m": math.prod(left[:-1]), "n": n, "k": k}),)
    return (Kernel("bmm", "bmm", {"batch": math.prod(right[:-2]), "m": m, "n": n, "k": k}),)


def _rowwise(family: str, op: str, shape: Sequence[int], reads: float, writes: float) -> Kernel:
    rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
    return Kernel(family, op, {"rows": rows, "cols": shape[-1], "reads": reads, "writes": writes})
