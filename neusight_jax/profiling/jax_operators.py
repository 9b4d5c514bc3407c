"""The operators of the schema as JAX functions of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from neusight_jax.profiling.case import Case

SCALAR = 1.5
"""Second operand of tensor-scalar operators; powers take `POWER`, as GELU does."""
POWER = 3.0
JAX_DTYPES: dict[str, Any] = {
    "fp32": jnp.float32,
    "tf32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "fp8": jnp.float8_e4m3fn,
}
POSITIVE: tuple[str, ...] = ("div", "pow", "powu")
"""Operators whose inputs are drawn from [0.5, 1.5): others would divide by zero or take powers of negative numbers."""

_POINTWISE: dict[str, Callable[..., Any]] = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "pow": jnp.power,
    "addu": lambda x: x + SCALAR,
    "mulu": lambda x: x * SCALAR,
    "divu": lambda x: x / SCALAR,
    "powu": lambda x: x**POWER,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "copy": jnp.copy,
}


def jax_operator(case: Case) -> Callable[..., Any]:
    """A function of the case's inputs. fp32 products run in fp32; tf32 ones on tensor cores where there are any."""
    # fp8 has no precision to choose; fp32 must not become tf32.
    precision = lax.Precision.HIGHEST if case.dtype == "fp32" else lax.Precision.DEFAULT
    wide = jnp.bfloat16 if case.dtype == "fp8" else None
    if case.op == "linear":
        return lambda x, weight, bias: (
            jnp.matmul(x, weight, precision=precision, preferred_element_type=wide) + bias.astype(wide or bias.dtype)
        )
    if case.op == "bmm":
        return lambda x, y: jnp.matmul(x, y, precision=precision, preferred_element_type=wide)
    if case.op == "conv":
        sizes = case.sizes
        stride, padding = (sizes["stride"],) * 2, ((sizes["padding"],) * 2,) * 2
        return lambda x, window: lax.conv_general_dilated(
            x, window, stride, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=precision
        )
    if case.op in ("prefill", "decode"):
        causal = bool(case.sizes["causal"])

        def attend(query: Any, key: Any, value: Any) -> Any:
            with jax.default_matmul_precision("highest" if case.dtype == "fp32" else "default"):
                return jax.nn.dot_product_attention(query, key, value, is_causal=causal)

        return attend
    if case.op == "ln":
        return _layernorm
    return _POINTWISE[case.op]


def _layernorm(x: Any, scale: Any, bias: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    norm = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return norm.astype(x.dtype) * scale + bias
